"""Times of a DataLoader's batches, stage by stage, in the process that makes them."""

from __future__ import annotations

import copy
import functools
import importlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence, ValuesView
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, dataloader, get_worker_info
from torch.utils.data._utils import fetch as fetchers

from itercast.capture.input.files import Opened, OpenedFiles
from itercast.capture.input.lane import Batches

SCHEDULED = Path("/proc/thread-self/schedstat")  # its second number: ns in the run queue
DECODERS = {  # module and functions, by the module whose import shows that a dataset may use them
    "PIL.Image": ("PIL.ImageFile", ("ImageFile.load",)),
    "cv2": ("cv2", ("imread", "imdecode")),
    "torchvision.io": ("torchvision.io", ("decode_image", "decode_jpeg", "read_image")),
}
HOLDERS = (torch.Tensor, list, tuple, dict)  # attributes of a batch that is an object
TRANSFORMS = ("transform", "target_transform", "transforms")  # attributes, as torchvision has them
INNER = ("dataset", "datasets")  # of Subset and ConcatDataset


class LoaderError(ValueError):
    """Raised where something cannot be measured, with the one line that says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """Times of making one batch: ``wall_us`` is without waits for a core that others had.

    ``stages_us``: CPU time by stage, ``waiting`` the rest of ``wall_us``. ``process_us``: all CPU
    time of the process until then. ``files``: those that it opened.
    """

    wall_us: float
    cpu_us: float
    stages_us: dict[str, float] = field(default_factory=dict)
    process_us: float = 0.0
    files: tuple[Opened, ...] = ()


@dataclass(slots=True)
class Clock:
    """Wall and CPU time since it was made, in us."""

    wall_ns: int = field(default_factory=time.perf_counter_ns)
    cpu_ns: int = field(default_factory=time.process_time_ns)
    queued_ns: int = field(default_factory=lambda: _queued_ns())

    def read(self) -> tuple[float, float]:
        """Wall time in which this thread ran or waited by itself, and CPU time of its process."""
        queued = _queued_ns() - self.queued_ns
        wall = time.perf_counter_ns() - self.wall_ns - queued
        return max(0, wall) * 1e-3, (time.process_time_ns() - self.cpu_ns) * 1e-3

    def waited(self) -> float:
        """Wall time so far in which nothing was computed."""
        wall_us, cpu_us = self.read()
        return wall_us - cpu_us


def _queued_ns() -> int:
    """Time that this thread waited for a core; 0 where Linux does not tell."""
    try:
        return int(SCHEDULED.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class _Stages:
    """CPU time by stage; what runs inside another stage counts for the inner one only."""

    def __init__(self) -> None:
        self.us: dict[str, float] = {}
        self.inner_us = [0.0]  # of each stage that runs now: time of stages inside it

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls are timed as this stage."""

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            start_ns = time.thread_time_ns()
            self.inner_us.append(0.0)
            try:
                return function(*args, **options)
            finally:
                us = (time.thread_time_ns() - start_ns) * 1e-3
                self.us[name] = self.us.get(name, 0.0) + us - self.inner_us.pop()
                self.inner_us[-1] += us

        return run


def worker_times(batches: Sequence[BatchTime]) -> Batches:
    """Times of batches that one worker makes and sends: it fetches a batch, then pickles it.

    A worker's CPU time between two fetches is sending; its mean is added to each batch.
    """
    between_us = [
        batch.process_us - before.process_us - batch.cpu_us for before, batch in pairwise(batches)
    ]
    sends_us = [us for us in between_us if us > 0]  # below 0: the two are of different workers
    send_us = sum(sends_us) / len(sends_us) if sends_us else 0.0
    return own_times(batches, send_us)


def own_times(batches: Sequence[BatchTime], more_us: float = 0.0) -> Batches:
    """The times of batches, with ``more_us`` of computing added to each."""
    return Batches(
        wall_us=tuple(b.wall_us + more_us for b in batches),
        cpu_us=tuple(b.cpu_us + more_us for b in batches),
    )


def batch_size(batch: Any, loader: DataLoader[Any]) -> tuple[int, int]:
    """Samples and bytes of a batch.

    Samples: the loader's ``batch_size``, if some tensor or list of the batch has this length
    (others may be lists of boxes), or the first tensor's is a multiple of it (several crops of each
    sample). Else the first tensor's length; without tensors ``batch_size``, or the length of the
    batch.
    """
    tensors = _tensors(batch)
    lengths = [t.shape[0] for t in tensors if t.dim()]
    asked = [getattr(owner, "batch_size", None) for owner in (loader, loader.batch_sampler)]
    own = len(batch) if hasattr(batch, "__len__") else 1
    samples = lengths[0] if lengths else next(filter(None, asked), own)
    parts = batch.values() if isinstance(batch, dict) else batch
    if isinstance(parts, list | tuple | ValuesView):
        lengths += [len(part) for part in parts if isinstance(part, list | tuple)]
    several = (n for n in asked if n and (n in lengths or (n > 1 and samples % n == 0)))
    samples = next(several, samples)
    return max(1, samples), sum(t.numel() * t.element_size() for t in tensors)


def _tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return tensor

    with_tensors(note, batch)
    return tensors


def with_tensors(make: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of a batch in which ``make`` of each tensor is in the tensor's place.

    Tensors may be in lists, tuples, dicts, and attributes of objects: ``UserDict``, which
    tokenizers make, and others.
    """
    if isinstance(value, torch.Tensor):
        return make(value)
    if isinstance(value, list | tuple | dict):
        return tree_map(partial(with_tensors, make), value, is_leaf=lambda x: x is not value)
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, HOLDERS)}
    if isinstance(value, type | ModuleType) or not held:
        return value
    opened = copy.copy(value)
    vars(opened).update((name, with_tensors(make, inner)) for name, inner in held.items())
    return opened


class BatchLog:
    """Times of the batches that this process fetched, and workers that it forked.

    Those of workers come through a queue: ``collect`` takes them over.
    """

    def __init__(self) -> None:
        self.batches: list[BatchTime] = []
        self.queue = multiprocessing.get_context("fork").SimpleQueue()

    def note(self, batch: BatchTime) -> None:
        """Add a batch, in this process or in a worker."""
        if get_worker_info() is None:
            self.batches.append(batch)
        else:
            self.queue.put(batch)

    def collect(self) -> None:
        """Take over what workers noted."""
        while not self.queue.empty():
            self.batches.append(self.queue.get())


@contextmanager
def timed_batches(note: Callable[[BatchTime], None]) -> Iterator[None]:
    """Call ``note`` for each batch that DataLoaders fetch inside, in the process that fetches it.

    Workers that are forked inside the context are timed too (``BatchLog`` brings their times back).
    """
    stages, files = _Stages(), OpenedFiles()

    def timed_fetch(fetch: Callable[..., Any]) -> Callable[..., Any]:
        def run(fetcher: Any, index: Any) -> Any:
            """Fetch the samples at an index, and note how long that took, by stage."""
            stages.us.clear()
            if not getattr(fetcher, "timed", False):
                fetcher.collate_fn = stages.timed("collate", fetcher.collate_fn)
                fetcher.timed = True
            clock = Clock()
            files.begin(clock.waited)
            batch = stages.timed("dataset", fetch)(fetcher, index)
            opened = files.end()
            wall_us, cpu_us = clock.read()
            parts = {"waiting": max(0.0, wall_us - cpu_us), **stages.us}
            done_us = time.process_time_ns() * 1e-3
            note(
                BatchTime(
                    wall_us=wall_us,
                    cpu_us=cpu_us,
                    stages_us=parts,
                    process_us=done_us,
                    files=opened,
                )
            )
            return batch

        return run

    with ExitStack() as stack:
        stack.enter_context(files.noting())
        for kind in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
            stack.enter_context(patch.object(kind, "fetch", timed_fetch(kind.fetch)))
        for owner, name in _decoders():
            decode = _noting_paths(files, getattr(owner, name))
            timed = stages.timed("decode", decode)
            stack.enter_context(patch.object(owner, name, timed))
        original_init = dataloader._BaseDataLoaderIter.__init__

        def init(self: Any, loader: Any) -> None:
            for holder, name in _transforms(loader.dataset):
                timed = stages.timed("transform", getattr(holder, name))
                stack.enter_context(patch.object(holder, name, timed))
            original_init(self, loader)

        stack.enter_context(patch.object(dataloader._BaseDataLoaderIter, "__init__", init))
        yield


def _noting_paths(files: OpenedFiles, decode: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder that notes the path which it is given: it opens the file outside of Python."""

    @functools.wraps(decode)
    def run(*args: Any, **options: Any) -> Any:
        files.note(args[0] if args else None)
        return decode(*args, **options)

    return run


def _decoders() -> Iterator[tuple[Any, str]]:
    """Functions and methods of imported libraries that decode images."""
    for imported, (module, paths) in DECODERS.items():
        for path in paths if imported in sys.modules else ():
            *owners, name = path.split(".")
            owner: Any = importlib.import_module(module)
            owner = functools.reduce(getattr, owners, owner)
            if hasattr(owner, name):
                yield owner, name


def _transforms(dataset: Any) -> Iterator[tuple[Any, str]]:
    """Transforms that a dataset, or one inside it, holds as attributes and that are not timed."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        held = getattr(holder, "__dict__", {})
        for name in TRANSFORMS:
            transform = held.get(name)
            if callable(transform) and not hasattr(transform, "__wrapped__"):
                yield holder, name
        for inner in (held[name] for name in INNER if name in held):
            waiting += list(inner) if isinstance(inner, list | tuple) else [inner]
