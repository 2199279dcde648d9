"""A policy with its value function, what it reads and its loss, as PPO trains it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs

CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01  # no assumption: PPO's (arXiv:1707.06347)


class ActorCritic(nn.Module):
    """Policy over discrete actions and value function on one body, as PPO trains them.

    ``shape`` is that of an observation: (channels, height, width) are images and go through the
    three convolutions of Nature DQN (https://doi.org/10.1038/nature14236), (features,) are vectors.
    Layers of ``widths`` follow. In eval mode it acts: it draws an action by its probabilities.
    """

    def __init__(self, shape: tuple[int, ...], widths: tuple[int, ...], actions: int) -> None:
        super().__init__()
        self.images = len(shape) > 1
        body, features = list[nn.Module](), shape[0]
        if self.images:
            side = shape[-1]
            for width, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                body += [nn.Conv2d(features, width, kernel, stride), nn.ReLU()]
                features, side = width, (side - kernel) // stride + 1
            body, features = [*body, nn.Flatten()], features * side**2
        for a, b in pairwise((features, *widths)):
            body += [nn.Linear(a, b), nn.ReLU() if self.images else nn.Tanh()]
        self.body = nn.Sequential(*body)
        self.policy, self.value = nn.Linear(widths[-1], actions), nn.Linear(widths[-1], 1)

    def forward(self, observed: torch.Tensor, **experience: Any) -> tuple[torch.Tensor, ...]:
        """(batch, *shape) to log-probabilities, values, and in eval mode an action each."""
        x = self.body(observed.float() / 255 if self.images else observed)
        log_probs, values = self.policy(x).log_softmax(-1), self.value(x).squeeze(-1)
        if self.training:
            return log_probs, values
        return log_probs, values, torch.multinomial(log_probs.exp(), 1)


def experience(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """What rollouts gathered: observations (bytes for images), and what PPO needs besides."""
    shape = (batch, *sizes["shape"])
    images = len(sizes["shape"]) > 1
    seen = torch.randint(0, 256, shape, dtype=torch.uint8) if images else torch.randn(shape)
    drawn = {name: torch.randn(batch) for name in ("advantages", "returns")}
    actions = torch.randint(0, sizes["actions"], (batch, 1))
    return {"observed": seen, "actions": actions, "log_probs": -torch.rand(batch), **drawn}


def ppo_loss(output: tuple[Tensor, ...], inputs: Inputs) -> Tensor:
    """PPO's clipped objective with the losses of values and entropy."""
    log_probs, values = output[:2]
    ratio = (log_probs.gather(-1, inputs["actions"]).squeeze(-1) - inputs["log_probs"]).exp()
    gained = inputs["advantages"]
    clipped = torch.min(ratio * gained, ratio.clamp(1 - CLIP, 1 + CLIP) * gained).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    errors = F.mse_loss(values, inputs["returns"])
    return VALUE_WEIGHT * errors - clipped - ENTROPY_WEIGHT * entropy
