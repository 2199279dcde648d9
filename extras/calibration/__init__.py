"""Corrects a bundle, or a host, by a few measured rows: `itercast calibrate`."""
