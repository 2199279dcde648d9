"""Dataset roots at URLs."""
