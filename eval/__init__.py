"""Predicted against measured, MLflow, reports."""
