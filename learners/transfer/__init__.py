"""Forecasts of GPUs that were measured little or not at all."""
