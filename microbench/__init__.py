"""Measures ops: captures which ops a model calls, and times them and whole iterations."""
