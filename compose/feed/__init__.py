"""Stages of an iteration that feed each other: input, rollouts, learners."""
