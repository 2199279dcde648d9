"""Captures the op calls of one training step on tensors without data."""
