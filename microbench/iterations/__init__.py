"""Whole training iterations, measured: in one process, under plans, on a GPU."""
