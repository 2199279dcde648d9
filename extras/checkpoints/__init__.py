"""Checkpoints of layers, and what those of ``recompute=budget`` save."""
