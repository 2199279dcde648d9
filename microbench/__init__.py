"""Measures: what an op is, which ops a model calls, how long they take."""
