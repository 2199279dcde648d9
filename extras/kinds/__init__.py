"""Kinds of models of which no case is measured by default; most test forecasts."""
