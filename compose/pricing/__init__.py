"""Durations of ops, collectives and the host."""
