"""Sequences of unlike lengths in a batch, padded or packed: the option ``--lengths``."""
