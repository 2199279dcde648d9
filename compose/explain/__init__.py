"""Explains a forecast: where its time goes, what it assumes, and which change would gain most."""
