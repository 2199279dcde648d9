"""The plan of a fleet: which machines measure which op families and iterations, for how long."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from itercast.capture.base.close_names import unknown
from itercast.capture.base.durations import seconds
from itercast.capture.base.yaml_text import made_of, read_mapping
from itercast.capture.cases.registry import case_names
from itercast.extras.roots.urls import check_url, is_url
from itercast.microbench.hardware.names import read_prices
from itercast.microbench.hardware.spec import gpu_names
from itercast.microbench.ops import families
from itercast.microbench.sweep.captured_points import check_points
from itercast.microbench.sweep.orders import known_families

MAX_MINUTES = 7 * 24 * 60  # of measuring by the machines of one kind
MAX_COUNT = 10_000  # machines of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Machines of one kind: ``count`` GPUs (or CPUs) at once measure ``minutes`` all together.

    ``families``: op families, without a list all of them; ``iterations``: named cases. A chunk of
    points needs a GPU and a core, on a CPU ``cores``; chunks of host times need ``cores``.
    ``resources`` and ``accelerator`` are Ray's custom resources and its ``accelerator_type``.
    Collectives take ``gpus_per_node`` GPUs of each of ``nodes`` nodes. ``python``: interpreter
    of the measuring software on the machines; ``image``: container that Ray runs instead.
    """

    name: str
    gpu: str
    minutes: float
    count: int = 1
    families: tuple[str, ...] = ()
    iterations: tuple[str, ...] = ()
    cores: int = 1
    gpus_per_node: int = 1
    nodes: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerator: str = ""
    python: str = ""
    image: str = ""

    @property
    def device(self) -> str:
        """cpu or cuda."""
        return "cpu" if self.gpu == "cpu" else "cuda"

    def __post_init__(self) -> None:
        where = f"machines {self.name!r}"
        if self.gpu != "cpu" and self.gpu not in gpu_names():
            raise ValueError(f"{where}: {unknown('gpu', self.gpu, ['cpu', *gpu_names()])}")
        if not 0 < self.minutes <= MAX_MINUTES:
            allowed = f"more than 0 and at most {MAX_MINUTES}"
            raise ValueError(f"{where}: minutes {self.minutes:g}; allowed are {allowed}")
        for name in ("count", "cores", "gpus_per_node", "nodes"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                given = getattr(self, name)
                raise ValueError(f"{where}: {name} {given}; allowed are 1 to {MAX_COUNT}")
        known_families(self.families)
        for name in self.iterations:
            if name not in case_names():
                raise ValueError(f"{where}: {unknown('case', name, case_names())}")
        if self.python and self.image:
            raise ValueError(f"{where}: give python or image, not both")

    @property
    def swept(self) -> tuple[str, ...]:
        """The op families to sweep: those named, else all; none where only iterations are."""
        if self.families or not self.iterations:
            return known_families(self.families)
        return ()

    def alone(self, name: str) -> bool:
        """Whether a family's chunks run alone on their cores: host times of a GPU machine."""
        return self.device == "cuda" and families()[name].on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Machines by kind, the dataset ``root`` (folder or URL), and how long all of it may take.

    ``chunk_s``: time of a chunk of points; ``deadline_s``: wall time after which nothing runs;
    ``points``: file of captured points, which are captured here without it; ``prices``: by GPU,
    per hour.
    """

    name: str
    root: str
    machines: tuple[Machines, ...]
    seed: int = 0
    chunk_s: float = 120.0
    deadline_s: float = 86400.0
    points: Path | None = None
    prices: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """What a plan's file states."""

    root: str
    machines: Mapping[str, Any]
    seed: int = 0
    chunk: str | float = "120s"
    deadline: str | float = "24h"
    points: str = ""
    prices: str = ""


def load_plan(path: Path) -> FleetPlan:
    """Read a plan (YAML, which runs no code); ValueError names what is wrong in one line."""
    if not path.is_file():
        what = "a folder; a plan is a YAML file" if path.is_dir() else "no such file"
        raise ValueError(f"plan {str(path)!r}: {what}")
    given = made_of(_Stated, read_mapping(path, "plan"), f"plan {str(path)!r}")
    if not given.machines:
        raise ValueError("plan: machines is a mapping of names to kinds of machines")
    points = _beside(path, given.points)
    if points is not None:
        check_points(points)
    prices = _beside(path, given.prices)
    return FleetPlan(
        name=path.stem,
        # a path is whole, as tasks run in other folders
        root=check_url(given.root) if is_url(given.root) else os.path.abspath(given.root),
        machines=tuple(_machines(name, values) for name, values in given.machines.items()),
        seed=given.seed,
        chunk_s=seconds(str(given.chunk)),
        deadline_s=seconds(str(given.deadline)),
        points=points,
        prices=read_prices(prices) if prices else {},
    )


def _machines(name: str, values: Any) -> Machines:
    """One kind of machines, every value of its type."""
    where = f"machines {name!r}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or not isinstance(values, dict):
        raise ValueError(f"{where}: a lower-case name and a mapping are expected")
    return made_of(Machines, {**values, "name": name}, where)


def _beside(path: Path, name: str) -> Path | None:
    """The file of this name, from the plan's folder."""
    if not name:
        return None
    file = path.parent / name
    if not file.is_file():
        raise ValueError(f"plan: {name!r}: no such file beside the plan")
    return file
