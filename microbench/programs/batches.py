"""DataLoaders run for real while a program is captured; their batches become fake tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from itercast.microbench.capture.facts import is_small_integer
from itercast.microbench.capture.fake import fake_tensor


class BatchTimes:
    """Seconds that the batches of a program's DataLoaders took, and the samples of each.

    Of one step: all since the last ``begin_step``.
    """

    def __init__(self) -> None:
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the batches so far."""
        self.seconds: list[float] = []
        self.samples: list[int] = []

    def note(self, seconds: float, batch: Any) -> None:
        """Note a batch; its samples are the length of its first tensor."""
        self.seconds.append(seconds)
        sizes = [t.shape[0] for t in _tensors(batch) if t.dim()]
        self.samples.append(sizes[0] if sizes else 0)


def _tensors(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, batch)
    return found


def _faked(value: Any) -> Any:
    """A fake tensor of the same form; small integers keep their values, programs may read them."""
    if not isinstance(value, torch.Tensor) or is_small_integer(value):
        return value
    return fake_tensor(value, None)


@contextmanager
def real_batches(times: BatchTimes) -> Iterator[None]:
    """Let DataLoaders load real data inside the context, although all else is fake."""
    from torch.utils.data import dataloader

    take, make = dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__iter__

    def taking(loader: Any) -> Any:
        with _disable_current_modes():
            start = time.perf_counter()
            batch = take(loader)
            seconds = time.perf_counter() - start
        times.note(seconds, batch)
        return tree_map(_faked, batch)

    def making(loader: Any) -> Any:
        with _disable_current_modes():
            return make(loader)

    with (
        patch.object(dataloader._BaseDataLoaderIter, "__next__", taking),
        patch.object(dataloader.DataLoader, "__iter__", making),
    ):
        yield
