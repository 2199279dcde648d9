"""The public benchmark: errors on published measurements, beside baselines."""
