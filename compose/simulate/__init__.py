"""A rank simulated: lanes, timeline, pipeline, data parallelism, memory."""
