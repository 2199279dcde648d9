"""Captured ops to a plan, a timeline and an iteration time."""
