"""Measures a DataLoader in a process of its own, which may die or hang.

``python -m itercast.extras.input.measure ORDER RESULT`` measures what the JSON text ORDER
names, adds a byte to the file RESULT.alive for every batch, and writes an input lane.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, log10
from pathlib import Path, PurePath
from typing import Any
from unittest.mock import patch

from torch.utils.data import DataLoader, dataloader

from itercast.capture.base.cores import cores, cpu_model
from itercast.capture.base.user_errors import one_line_error
from itercast.capture.input.files import FileGroup, Opened
from itercast.capture.input.lane import InputLane, write_lane
from itercast.capture.input.timers import (
    BatchLog,
    BatchTime,
    Clock,
    LoaderError,
    batch_size,
    own_times,
    timed_batches,
    worker_times,
)

MIN_BATCHES, MAX_BATCHES = 3, 400  # of one way to load
WARM_UP = 1  # batches that are not counted, where more than twice as many were made
PREFETCH = 2  # torch's default
Alive = Callable[[], None]  # called for every batch
Measure = Callable[[str, float, Alive], InputLane]  # from a name and seconds
UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Run:
    """Batches loaded in one way, and the time of the consumer and of the sampler in each, in us."""

    batches: tuple[BatchTime, ...]
    took_us: tuple[float, ...]
    sampler_us: float
    samples: int
    nbytes: int


def attribute(name: str) -> Any:
    """What ``module:name`` names."""
    module, colon, inside = name.partition(":")
    if not (module and colon and inside):
        raise LoaderError("expected module:name")
    sys.path[:0] = [] if (here := str(Path.cwd())) in sys.path else [here]
    return getattr(importlib.import_module(module), inside)


def load(name: str) -> DataLoader[Any]:
    """The DataLoader ``module:loader``, or the one that a function of that name returns."""
    named = attribute(name)
    loader = named() if not isinstance(named, DataLoader) and callable(named) else named
    if not isinstance(loader, DataLoader):
        raise LoaderError(f"is a {type(loader).__name__}, allowed is a torch DataLoader")
    return loader


def with_workers(loader: DataLoader[Any], workers: int) -> DataLoader[Any]:
    """A copy of the loader with so many forked workers, none of them started."""
    copied = copy.copy(loader)
    values = {"num_workers": workers, "persistent_workers": False, "_iterator": None, "timeout": 0}
    values["prefetch_factor"] = (loader.prefetch_factor or PREFETCH) if workers else None
    values["_DataLoader__multiprocessing_context"] = None
    for name, value in values.items():
        object.__setattr__(copied, name, value)
    return copied


def measure_lane(name: str, seconds: float, alive: Alive = lambda: None) -> InputLane:
    """Measure a loader without workers, with one, and with one per core; a third each."""
    loader, count = load(name), cores()
    alone = run_loader(with_workers(loader, 0), seconds / 3, alive)
    with_one = run_loader(with_workers(loader, 1), seconds / 3, alive)
    worker, receive_us = worker_times(with_one.batches), _mean(with_one.took_us)
    crowd = min(count, max(2, loader.num_workers))
    crowding = 1.0
    if crowd > 1 and worker.mean_cpu_us:
        with_crowd = run_loader(with_workers(loader, crowd), seconds / 3, alive)
        crowded_us, alone_us = (
            _mean([b.cpu_us for b in run.batches]) for run in (with_crowd, with_one)
        )
        crowding = max(1.0, crowded_us / max(1e-3, alone_us))
    return InputLane(
        loader=name,
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or PREFETCH,
        batch_samples=alone.samples,
        batch_bytes=alone.nbytes,
        cores=count,
        alone=own_times(alone.batches, alone.sampler_us),
        worker=worker,
        receive_us=receive_us,
        crowd=crowd,
        crowding=crowding,
        stages_us=stages(alone, with_one, receive_us),
        files=file_groups([b.files for b in alone.batches], _part(loader, alone)),
        cpu=cpu_model(),
    )


def _part(loader: DataLoader[Any], run: Run) -> float:
    """Which part of an epoch a run took; 0 where the dataset does not say how long it is."""
    samples = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0  # type: ignore[arg-type]
    return len(run.batches) * run.samples / samples if samples else 0.0


def _mean(values: Any) -> float:
    return sum(values) / len(values) if values else 0.0


def stages(alone: Run, with_one: Run, receive_us: float) -> dict[str, float]:
    """Mean time in us of a batch by stage, in the order in which a batch passes the stages."""
    mean: dict[str, float] = {"sampler": alone.sampler_us}
    for name in ("waiting", "dataset", "decode", "transform", "collate"):
        mean[name] = _mean([b.stages_us.get(name, 0.0) for b in alone.batches])
    mean["send"] = worker_times(with_one.batches).mean_us - _mean(
        [b.wall_us for b in with_one.batches]
    )
    mean["receive"] = receive_us
    return {name: us for name, us in mean.items() if us > 0}


def run_loader(loader: DataLoader[Any], seconds: float, alive: Alive) -> Run:
    """Take batches for a while, as fast as they come, over several epochs if they are short."""
    log, took_us, size = BatchLog(), list[float](), (0, 0)
    end = time.monotonic() + seconds

    def wanted() -> bool:
        early = time.monotonic() < end or len(took_us) < MIN_BATCHES
        return early and len(took_us) < MAX_BATCHES

    with timed_batches(log.note), _timed_sampler() as sampler:
        while wanted():
            before, batches = len(took_us), iter(loader)
            while wanted():
                clock = Clock()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                took_us.append(clock.read()[1])
                size = size if any(size) else batch_size(batch, loader)
                del batch
                log.collect()
                alive()
            del batches
            if len(took_us) == before:
                break
    if not log.batches:
        raise LoaderError("yields no batch")
    skip = WARM_UP if len(took_us) > 2 * WARM_UP else 0
    sampler_us = sum(sampler) / max(1, len(sampler))
    return Run(tuple(log.batches[skip:]), tuple(took_us[skip:]), sampler_us, *size)


@contextmanager
def _timed_sampler() -> Iterator[list[float]]:
    """CPU times of the sampler's calls inside, which the training process makes."""
    took_us: list[float] = []
    index = dataloader._BaseDataLoaderIter._next_index

    def timed(self: Any) -> Any:
        clock = Clock()
        value = index(self)
        took_us.append(clock.read()[1])
        return value

    with patch.object(dataloader._BaseDataLoaderIter, "_next_index", timed):
        yield took_us


def _said(exc: BaseException) -> str:
    """An error in one line; of a worker's traceback the last line."""
    lines = [line.strip() for line in str(exc).strip().splitlines() if line.strip()]
    if lines and lines[0].startswith("Caught ") and len(lines) > 1:
        return f"{lines[-1]} (in a worker)"
    return one_line_error(exc)


def main(order: str, result: str, what: str = "loader", measure: Measure = measure_lane) -> int:
    """Measure the loader that an order names and write its lane to ``result``; returns 0.

    Returns 2 after one line on stderr where that fails; ``what``: how that line calls the loader.
    """
    settings, alive = json.loads(order), Path(f"{result}.alive")
    name = settings["loader"]

    def count_batch() -> None:
        with alive.open("ab") as file:
            file.write(b".")

    try:
        write_lane(measure(name, settings["seconds"], count_batch), Path(result))
    except LoaderError as exc:
        print(f"itercast: {what} {name!r}: {exc}", file=sys.__stderr__)
        return 2
    except (Exception, SystemExit) as exc:  # whatever the user's code raises
        print(f"itercast: {what} {name!r} fails: {_said(exc)}", file=sys.__stderr__)
        return 2
    return 0


def file_groups(batches: Iterable[Iterable[Opened]], part: float) -> tuple[FileGroup, ...]:
    """The files of measured batches, which are a ``part`` of an epoch, in groups.

    If files are opened again, they are taken to be all of the epoch's files: shards, or a short
    epoch.
    """
    waits, reads, count = dict[str, float](), 0, 0
    for batch in batches:
        count += 1
        for path, us in batch:
            waits[path], reads = waits.get(path, 0.0) + us, reads + 1
    scale = 1.0 if reads > len(waits) or not 0 < part < 1 else 1 / part
    groups: dict[str, list[tuple[int, float]]] = {}
    for path, us in waits.items():
        if size := _size(path):
            groups.setdefault(_kind(path, size), []).append((size, us))
    return tuple(
        FileGroup(
            kind=kind,
            files=round(scale * len(members)),
            nbytes=round(scale * sum(size for size, _ in members)),
            waiting_us=sum(us for _, us in members) / count,
        )
        for kind, members in sorted(groups.items())
    )


def _size(path: str) -> int:
    """Bytes of a file; 0 where it is gone or no file."""
    try:
        return os.stat(path).st_size if os.path.isfile(path) else 0
    except OSError:
        return 0


def _kind(path: str, size: int) -> str:
    """Such as ``.jpg up to 100 kB``: the ending, and the power of ten that a file does not pass."""
    digits = min(ceil(log10(size)), 14)
    return f"{PurePath(path).suffix or 'files'} up to {10 ** (digits % 3)} {UNITS[digits // 3]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
