"""The optimizer of small models is torch's, step by step."""

import pytest
import torch

from itercast.learners.models.one_cycle import Adam


@pytest.mark.parametrize(("decay", "rising"), [(0.0, 0.2), (0.01, 0.1)])
def test_it_moves_weights_as_torchs_adam_under_one_cycle(decay: float, rising: float) -> None:
    """30 steps of two weights down the sum of their squares, with and without decay."""
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(5)]
    ours, theirs = ([w.clone().requires_grad_() for w in start] for _ in range(2))
    optimizer = Adam(ours, 0.1, 30, rising=rising, decay=decay)
    known = torch.optim.AdamW(theirs, lr=0.1, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(known, 0.1, 30, pct_start=rising)
    for _ in range(30):
        sum(w.square().sum() for w in ours).backward()  # type: ignore[union-attr]
        optimizer.step()
        known.zero_grad()
        sum(w.square().sum() for w in theirs).backward()  # type: ignore[union-attr]
        known.step()
        schedule.step()
    for mine, other, first in zip(ours, theirs, start, strict=True):
        assert torch.allclose(mine, other, atol=1e-6) and not torch.allclose(mine, first, atol=0.1)
