"""Whether a bundle still fits the machine, and which of two bundles forecasts better."""
