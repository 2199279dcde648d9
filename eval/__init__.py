"""Forecasts compared with measurements: tables, plots, reports, MLflow runs."""
