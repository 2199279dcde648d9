"""A page with sliders that forecasts as they move."""
