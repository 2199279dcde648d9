"""Another name of `python -m itercast.extras.campaign`."""
