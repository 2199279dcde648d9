"""Sweeps of single ops: their points, the order of measuring, and the workers that measure."""
