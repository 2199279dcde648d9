"""Emulates GPUs that the machine does not have: their answers, tensors and streams."""
