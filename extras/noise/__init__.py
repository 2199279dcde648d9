"""Steps whose ranks are noisy."""
