"""Models that only published tables need: Transformer-XL and SSD."""
