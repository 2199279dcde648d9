"""The op calls of one training step, captured on tensors without data."""
