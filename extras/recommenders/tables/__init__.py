"""Embedding tables spread over ranks: placements, and the step of the slowest rank."""
