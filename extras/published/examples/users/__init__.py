"""Models of `datasets/user_runs` that no configuration describes."""
