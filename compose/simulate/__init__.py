"""Simulates an iteration on one rank: lanes, timeline, pipeline, data parallelism, memory."""
