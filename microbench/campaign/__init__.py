"""The GPU campaign: a lent half hour spent by a plan with a clock, brought home as one archive."""
