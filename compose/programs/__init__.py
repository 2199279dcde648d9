"""Forecasts captured programs: prices the launches of their ranks and simulates them together."""
