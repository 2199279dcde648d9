"""Forecasts for cluster schedulers: a table of throughputs, and a replay of jobs with it."""
