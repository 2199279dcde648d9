"""Peak memory of a plan's ranks, by purpose."""
