"""Measured rows as tables of features."""
