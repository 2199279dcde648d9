"""Searches parallel plans for the fastest or cheapest one that fits."""
