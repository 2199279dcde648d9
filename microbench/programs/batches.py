"""DataLoaders run for real while a program is captured; their batches become fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from itercast.microbench.capture.facts import is_small_integer
from itercast.microbench.capture.fake import fake_tensor
from itercast.microbench.input.lane import Batches, InputLane
from itercast.microbench.input.timers import (
    BatchLog,
    Clock,
    batch_size,
    own_times,
    timed_batches,
    usable_cores,
    worker_times,
)


class TakenBatches:
    """The batches that a program took from its DataLoaders, and what they took to make.

    ``samples``: of each batch since the last ``begin_step``.
    """

    def __init__(self) -> None:
        self.log = BatchLog()
        self.took_us: list[float] = []
        self.loader: Any = None
        self.nbytes = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget how many samples were taken so far."""
        self.samples: list[int] = []

    def note(self, loader: Any, took_us: float, batch: Any) -> None:
        """Note a batch that an iterator over a loader gave after so much of this process's time."""
        samples, self.nbytes = batch_size(batch)
        self.samples.append(samples)
        self.took_us.append(took_us)
        self.loader = loader
        self.log.collect()

    def lane(self, name: str) -> InputLane | None:
        """The input lane of the loader whose batch came last; None where no batch was timed."""
        made = self.log.batches[1:] or self.log.batches
        if self.loader is None or not made or not self.samples:
            return None
        workers = self.loader._num_workers
        return InputLane(
            loader=name,
            workers=workers,
            prefetch=getattr(self.loader, "_prefetch_factor", None) or 1,
            batch_samples=self.samples[-1],
            batch_bytes=self.nbytes,
            cores=usable_cores(),
            alone=Batches() if workers else own_times(made),
            worker=worker_times(made) if workers else Batches(),
            receive_us=sum(self.took_us) / len(self.took_us) if workers else 0.0,
        )


def _faked(value: Any) -> Any:
    """A fake tensor of the same form; small integers keep their values, programs may read them."""
    if not isinstance(value, torch.Tensor) or is_small_integer(value):
        return value
    return fake_tensor(value, None)


@contextmanager
def real_batches(taken: TakenBatches) -> Iterator[None]:
    """Let DataLoaders load real data inside the context, although all else is fake."""
    from torch.utils.data import dataloader

    take, make = dataloader._BaseDataLoaderIter.__next__, dataloader.DataLoader.__iter__

    def taking(loader: Any) -> Any:
        with _disable_current_modes():
            clock = Clock()
            batch = take(loader)
            took_us = clock.read()[1]
        taken.note(loader, took_us, batch)
        return tree_map(_faked, batch)

    def making(loader: Any) -> Any:
        with _disable_current_modes():
            return make(loader)

    with (
        timed_batches(taken.log.note),
        patch.object(dataloader._BaseDataLoaderIter, "__next__", taking),
        patch.object(dataloader.DataLoader, "__iter__", making),
    ):
        yield
