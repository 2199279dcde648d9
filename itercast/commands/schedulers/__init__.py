"""Commands that forecast for cluster schedulers."""
