"""Optimizers that torch does not have."""
