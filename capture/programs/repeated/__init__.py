"""Micro-batches of a step that are alike: a model runs for the first of them, and is repeated."""
