"""A fleet: measures many machines through Ray, with dataset roots at URLs."""
