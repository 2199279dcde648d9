"""Models from outside this project: Hugging Face configurations, users' modules."""
