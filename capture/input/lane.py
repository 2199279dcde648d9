"""InputLane: a measured DataLoader, by what its batches take, as a value and as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import made_of
from itercast.capture.input.files import FileGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Batches made one after the other by one process: time and CPU time of each."""

    wall_us: tuple[float, ...] = ()
    cpu_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        times = (*self.wall_us, *self.cpu_us)
        if len(self.wall_us) != len(self.cpu_us) or not all(0 <= us < math.inf for us in times):
            raise ValueError("wall_us and cpu_us are equally many times of at least 0")

    def scaled(self, wall: float, cpu: float) -> Batches:
        """The batches with times and CPU times multiplied by these factors."""
        wall_us = tuple(wall * us for us in self.wall_us)
        return Batches(wall_us=wall_us, cpu_us=tuple(cpu * us for us in self.cpu_us))

    @property
    def mean_us(self) -> float:
        """Mean time of a batch."""
        return sum(self.wall_us) / len(self.wall_us) if self.wall_us else 0.0

    @property
    def mean_cpu_us(self) -> float:
        """Mean CPU time of a batch."""
        return sum(self.cpu_us) / len(self.cpu_us) if self.cpu_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLane:
    """What a DataLoader does for a batch, measured on a machine with ``cores`` CPU cores.

    ``cpu``: their model, as Linux tells it; empty: as fast as those of any host.

    ``alone``: batches made in the training process (no workers), ``worker``: by one worker, with
    what sending them takes; empty where a loader was measured one way only. ``receive_us``: time of
    the training process for a batch of a worker, its sampler included. ``crowd`` workers at once
    each need ``crowding`` times the CPU time of one. ``stages_us``: mean time of a batch by stage.
    ``copied_ahead``: batches are copied to the GPU beside the step before, from pinned memory on a
    stream of their own. ``files``: what an epoch reads. ``start_us``: to start a worker, which
    each epoch does; 0 without workers, and where they stay.
    """

    loader: str
    workers: int
    prefetch: int
    batch_samples: int
    batch_bytes: int
    cores: int
    alone: Batches = field(default_factory=Batches)
    worker: Batches = field(default_factory=Batches)
    receive_us: float = 0.0
    crowd: int = 1
    crowding: float = 1.0
    stages_us: Mapping[str, float] = field(default_factory=dict)
    copied_ahead: bool = False
    files: tuple[FileGroup, ...] = ()
    cpu: str = ""
    start_us: float = 0.0

    def __post_init__(self) -> None:
        if not (self.alone.wall_us or self.worker.wall_us):
            raise ValueError("an input lane needs the times of at least one batch")
        least = {"workers": 0, "prefetch": 1, "batch_samples": 1, "batch_bytes": 0, "cores": 1}
        least |= {"receive_us": 0, "crowd": 1, "crowding": 1, "start_us": 0}
        for name, low in least.items():
            if not low <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is at least {low}, got {getattr(self, name)!r}")

    def staged(self, room_bytes: float) -> tuple[dict[str, float], InputLane]:
        """Stage files on a fast tier of ``room_bytes``, those with the longest wait per byte first.

        Returns the staged share by file group, and the lane, which no longer waits for these.
        """
        shares, saved_us = dict[str, float](), 0.0
        for group in sorted(self.files, key=lambda g: g.waiting_us / g.nbytes, reverse=True):
            share = min(1.0, room_bytes / group.nbytes)
            if share and group.waiting_us:
                shares[group.kind] = share
                room_bytes -= share * group.nbytes
                saved_us += share * group.waiting_us
        waiting_us = self.stages_us.get("waiting", 0.0)
        return shares, self.without("waiting", share=min(1.0, saved_us / max(waiting_us, 1e-9)))

    def slower(self, factor: float) -> InputLane:
        """The lane if each batch took ``factor`` times as long to make and to receive."""
        alone, worker = (b.scaled(wall=factor, cpu=factor) for b in (self.alone, self.worker))
        lane = replace(self, alone=alone, worker=worker, receive_us=factor * self.receive_us)
        return replace(lane, start_us=factor * self.start_us)

    def without(self, *stages: str, share: float = 1.0) -> InputLane:
        """The lane as it would be if batches took a share less time in these stages.

        All batches shrink by the same factor. Stage ``waiting`` takes wall time but no CPU time.
        """
        saved_us = share * sum(self.stages_us.get(name, 0.0) for name in stages)
        saved_cpu_us = saved_us
        if "waiting" in stages:
            saved_cpu_us -= share * self.stages_us.get("waiting", 0.0)

        def rest_frac(mean_us: float, less_us: float) -> float:
            return max(0.0, 1 - less_us / mean_us) if mean_us else 0.0

        alone, worker = (
            b.scaled(rest_frac(b.mean_us, saved_us), rest_frac(b.mean_cpu_us, saved_cpu_us))
            for b in (self.alone, self.worker)
        )
        return replace(self, alone=alone, worker=worker)


def write_lane(lane: InputLane, path: Path) -> None:
    """Write a lane as JSON."""
    write_atomic(path, json.dumps(asdict(lane)).encode())


def read_lane(path: Path) -> InputLane:
    """A lane as ``write_lane`` wrote it; ValueError in one line for any other file."""
    try:
        return made_of(InputLane, json.loads(path.read_text()), "input lane")
    except FileNotFoundError:
        raise ValueError(f"input lane {str(path)!r}: no such file") from None
    except (OSError, ValueError, RecursionError) as exc:
        raise ValueError(f"{path}: no input lane of `itercast input --out`: {exc}") from exc
