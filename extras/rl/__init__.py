"""Reinforcement learning: rollouts of environments and a learner."""
