"""Sweeps of single ops: which points, in which order, measured by which worker."""
