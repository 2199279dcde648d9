"""Models that are not ours: Hugging Face and timm configurations, a user's own module."""
