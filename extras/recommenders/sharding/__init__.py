"""Shards embedding tables over ranks: placements, their forecast, and the choice among them."""
