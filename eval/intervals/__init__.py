"""Fits what decides the intervals of forecasts: correlations of errors, and their common parts."""
