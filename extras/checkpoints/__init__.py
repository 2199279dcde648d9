"""Checkpoints of layers, and their choice of what to save under ``recompute=budget``."""
