"""Recommendation models with embedding tables, and cases of them."""
