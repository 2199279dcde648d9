"""Whether a bundle still fits the machine: measure some points again, compare, judge."""
