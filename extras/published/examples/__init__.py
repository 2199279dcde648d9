"""Models that only published tables need."""
