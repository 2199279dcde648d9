"""Judges forecasts of recommendation models: lookups, iterations, and the choice of a sharding."""
