"""Models from outside this project: Hugging Face and timm configurations, users' modules."""
