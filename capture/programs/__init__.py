"""Captures distributed programs as they are: one rank's step, without the other ranks or GPUs."""
