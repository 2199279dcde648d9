"""Measures whole training iterations: in one process, under parallel plans, on a GPU."""
