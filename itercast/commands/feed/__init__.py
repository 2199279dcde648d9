"""Commands about stages that feed a training step: its input, its rollouts."""
