"""Models of `datasets/mixed_runs` that no configuration describes: functions for ``model:``."""
