"""The plan of a fleet: which machines measure which op families and iterations, for how long."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from itercast.microbench.cases.registry import case_names
from itercast.microbench.durations import seconds
from itercast.microbench.fleet.urls import check_url, is_url
from itercast.microbench.hardware.spec import gpu_names
from itercast.microbench.ops import families
from itercast.microbench.sweep.captured_points import check_points
from itercast.microbench.sweep.orders import known_families
from itercast.microbench.yaml_text import load_yaml

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
            known = "cpu and those of `itercast list gpus`"
            raise ValueError(f"{where}: unknown gpu {self.gpu!r}; allowed are {known}")
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
                raise ValueError(f"{where}: unknown case {name!r}; see `itercast list cases`")
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


def load_plan(path: Path) -> FleetPlan:
    """Read a plan (YAML, which runs no code); ValueError names what is wrong in one line."""
    if not path.is_file():
        what = "a folder; a plan is a YAML file" if path.is_dir() else "no such file"
        raise ValueError(f"plan {str(path)!r}: {what}")
    given = _mapping(path, "plan")
    known = {"root", "machines", "seed", "chunk", "deadline", "points", "prices"}
    _refuse_others("plan", given, known)
    for name in ("root", "machines"):
        if name not in given:
            raise ValueError(f"plan {str(path)!r}: {name} is missing")
    if not isinstance(given["machines"], dict) or not given["machines"]:
        raise ValueError("plan: machines is a mapping of names to kinds of machines")
    return FleetPlan(
        name=path.stem,
        root=_root(_typed("plan", "root", given["root"], str)),
        machines=tuple(_machines(name, values) for name, values in given["machines"].items()),
        seed=_typed("plan", "seed", given.get("seed", 0), int),
        chunk_s=seconds(str(given.get("chunk", "120s"))),
        deadline_s=seconds(str(given.get("deadline", "24h"))),
        points=_points(_beside(path, given.get("points"))),
        prices=_prices(_beside(path, given.get("prices"))),
    )


def _mapping(path: Path, what: str) -> dict[str, Any]:
    try:
        given = load_yaml(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"{what} {str(path)!r}: {' '.join(str(exc).split())[:200]}") from exc
    if not isinstance(given, dict):
        raise ValueError(f"{what} {str(path)!r}: a mapping is expected")
    return given


def _refuse_others(where: str, given: Mapping[Any, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {key!r}; allowed are {', '.join(sorted(known))}"
            )


def _typed(where: str, name: str, value: Any, kind: Any) -> Any:
    """The value if it has this type; whole numbers count as float, booleans as no number."""
    fits = isinstance(value, (int, float) if kind is float else kind)
    if not fits or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: {name} {value!r} is not of type {kind.__name__}")
    return kind(value)


def _machines(name: Any, values: Any) -> Machines:
    """One kind of machines, every value of its type."""
    where = f"machines {name!r}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", str(name)) or not isinstance(values, dict):
        raise ValueError(f"{where}: a lower-case name and a mapping are expected")
    known = {f.name: f for f in fields(Machines) if f.name != "name"}
    _refuse_others(where, values, set(known))
    for key, f in known.items():
        if key not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{where}: {key} is missing")
    kinds = {"int": int, "float": float, "str": str}
    found: dict[str, Any] = {}
    for key, value in values.items():
        kind = str(known[key].type)
        if kind in kinds:
            found[key] = _typed(where, key, value, kinds[kind])
        elif key == "resources":
            items = _typed(where, key, value, dict).items()
            found[key] = {str(k): _typed(where, str(k), v, float) for k, v in items}
        else:
            found[key] = tuple(_typed(where, key, v, str) for v in _typed(where, key, value, list))
    return Machines(name=str(name), **found)


def _beside(path: Path, name: Any) -> Path | None:
    """The file of this name, from the plan's folder."""
    if name is None:
        return None
    found = path.parent / str(_typed("plan", "a file", name, str))
    if not found.is_file():
        raise ValueError(f"plan: {str(name)!r}: no such file beside the plan")
    return found


def _root(text: str) -> str:
    """A root of a known kind; a path is whole, as tasks run in other folders."""
    return check_url(text) if is_url(text) else os.path.abspath(text)


def _points(path: Path | None) -> Path | None:
    """A file of captured points, that it is one."""
    if path is not None:
        check_points(path)
    return path


def _prices(path: Path | None) -> dict[str, float]:
    """Prices per hour by GPU name, of a YAML file."""
    given = _mapping(path, "prices") if path else {}
    prices = {str(k): _typed("prices", str(k), v, float) for k, v in given.items()}
    for name, price in prices.items():
        if not 0 <= price < float("inf"):
            raise ValueError(f"prices: {name} {price:g}; a price per hour is expected")
    return prices
