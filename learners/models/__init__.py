"""Regression models: trees, baselines, small networks, Gaussian processes, and their ensemble."""
