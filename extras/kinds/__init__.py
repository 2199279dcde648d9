"""Kinds of models that test forecasts: none of their cases is measured by default."""
