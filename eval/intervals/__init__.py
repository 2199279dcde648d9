"""Fits the assumed numbers behind 80 % intervals: how errors correlate and add up."""
