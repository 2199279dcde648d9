"""Timelines of iterations for Perfetto: of steps under plans, and of captured programs."""
