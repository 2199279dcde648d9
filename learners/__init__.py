"""Rows to features to one model per op family to a bundle."""
