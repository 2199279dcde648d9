"""Forecasts iterations: from captured ops and a plan to a timeline and an iteration time."""
