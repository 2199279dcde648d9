"""GPUs that are not there, as programs find them: what they answer, tensors, streams."""
