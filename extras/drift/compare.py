"""Measures points of every family again, and compares times, speed and versions with a bundle's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.extras.drift.bundles import log_ratios
from itercast.extras.drift.judge import Compared, FamilyDrift, judge
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import (
    MAX_SLOWDOWN,
    Speed,
    log_slowness,
    retest_ape_pct,
    undisturbed,
)
from itercast.learners.machine import machines_of
from itercast.learners.training_rows import with_mean_times
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Point
from itercast.microbench.store import read_rows
from itercast.microbench.sweep.captured_points import write_points
from itercast.microbench.sweep.collect import measure_points
from itercast.microbench.sweep.scheduler import space

CLOCK_TOLERANCE = 0.05  # relative change of a clock that is not worth a line
NOT_MACHINE = ("commit",)  # entries of a card's versions that say nothing of the machine
GPU_SPEED = "drift_us"  # time of the same product beside every chunk of points
CANDIDATES = 400  # points drawn per family, to choose from
LONGEST_US = 5_000.0  # of a point: longer ones leave no time for others
STRATA = 8  # of sizes; points come from them in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something of the machine that differs from what the bundle records."""

    what: str
    recorded: str
    now: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was measured again on a device, and what follows.

    ``slowdown``: time of the reference tasks over that at training, None where the bundle has none.
    On a CPU families are compared at the speed of training, on a GPU as measured.
    """

    gpu: str
    rows: int
    slowdown: float | None
    families: tuple[FamilyDrift, ...]
    changes: tuple[Change, ...]

    @property
    def drifted(self) -> list[FamilyDrift]:
        """Families whose times have changed, furthest first."""
        changed = [f for f in self.families if f.drifted]
        return sorted(changed, key=lambda f: -abs(np.log(f.ratio)))

    @property
    def speed_differs(self) -> bool:
        """Whether the machine is too much faster or slower than at training to correct rows."""
        return self.slowdown is not None and abs(np.log(self.slowdown)) > np.log(MAX_SLOWDOWN)

    @property
    def fits(self) -> bool:
        """Whether no family has drifted, and the speed is one that rows can be corrected to."""
        return not self.drifted and not self.speed_differs

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        judged = sum(f.drifted is not None for f in self.families)
        if self.speed_differs:
            reason = f"reference tasks take {self.slowdown:.2g} times as long as at training"
            return f"The bundle does not fit {self.gpu}: {reason}."
        if self.drifted:
            worst = ", ".join(f"{f.family} {f.ratio:.2f}" for f in self.drifted)
            reason = f"measured times over forecasts are {worst}"
        else:
            reason = f"{judged} families agree with their forecasts"
        fits = "fits" if self.fits else "does not fit"
        return f"The bundle {fits} {self.gpu}: {reason}{self._speed}."

    @property
    def _speed(self) -> str:
        """How much slower or faster the machine is than at training, in words."""
        if self.slowdown is None:
            return ""
        pct = 100 * (self.slowdown - 1)
        return f"; the machine is {abs(pct):.0f} % {'slower' if pct > 0 else 'faster'} overall"


def measure_again(
    root: Path,
    device: str,
    bundle: Bundle,
    gpu: Gpu,
    budget_s: float,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Measure stratified points of the bundle's families into a dataset, for ``budget_s``."""
    threads = gpu.sm_count if gpu.kind == "cpu" else 0
    wanted = stratified_points(bundle, gpu, threads, seed)
    if not wanted:
        raise ValueError(f"bundle: no family of it can be measured on device {device!r}")
    path = root / "points.json"
    write_points(path, wanted)
    measure_points(root, device, path, budget_s, seed, progress)


def check_rows(root: Path, bundle: Bundle, gpu: Gpu) -> Check:
    """Compare the rows under ``root`` with the bundle's forecasts for ``gpu``.

    ValueError where no family has enough points to be judged.
    """
    tables = {name: read_rows([root], name) for name in checkable(bundle, gpu)}
    tables = {
        name: with_mean_times(rows[rows["status"] == "ok"])
        for name, rows in tables.items()
        if len(rows)
    }
    tables = {name: rows for name, rows in tables.items() if len(rows)}
    compared: dict[str, Compared] = {}
    for name, rows in tables.items():
        family = compare_family(name, rows.assign(gpu=gpu.name), bundle)
        if family is not None:
            compared[name] = family
    check = Check(
        gpu=gpu.name,
        rows=sum(map(len, tables.values())),
        slowdown=slowdown(tables, bundle, gpu.name),
        families=tuple(judge(compared)),
        changes=tuple(changes(root, tables, bundle, gpu.name)),
    )
    if not check.speed_differs and all(f.drifted is None for f in check.families):
        most = max((f.points for f in check.families), default=0)
        raise ValueError(f"no family has enough points to be judged, the most are {most}")
    return check


def compare_family(name: str, rows: pd.DataFrame, bundle: Bundle) -> Compared | None:
    """Pairs a family's measured points with their forecasts.

    All rows of one point (warm, cold, numbers of threads, measured again) count as one, by their
    mean. None where other load on the machine disturbed all of them.
    """
    rows, model, family = undisturbed(rows, bundle.anchors), bundle.models[name], families()[name]
    if not len(rows):
        return None
    speed = Speed(anchors=bundle.anchors, sensitivity=model.sensitivity)
    log_ratio = log_ratios(name, rows, bundle)
    point = [f.name for f in fields(family.params) if f.name in rows]
    return Compared(
        log_ratios=log_ratio.groupby([rows[c] for c in point], dropna=False).mean().to_numpy(),
        held_out_pct=float(model.facts["errors"]["median_ape_pct"]),
        retest_pct=retest_ape_pct(rows, family, speed),
    )


def slowdown(tables: Mapping[str, pd.DataFrame], bundle: Bundle, gpu: str) -> float | None:
    """Median time of the reference tasks beside all points over that at training.

    On a CPU the geometric mean of both anchors. None where the bundle records none.
    """
    if bundle.anchors:
        logs = [log_slowness(rows.assign(gpu=gpu), bundle.anchors) for rows in tables.values()]
        return float(np.exp(np.median(np.concatenate(logs), axis=0).mean()))
    recorded = bundle.machines[gpu].readings.get(GPU_SPEED) if gpu in bundle.machines else None
    parts = [rows[GPU_SPEED].dropna() for rows in tables.values() if GPU_SPEED in rows]
    if recorded is None or not parts:
        return None
    return float(pd.concat(parts).median() / recorded)


def changes(
    root: Path, tables: Mapping[str, pd.DataFrame], bundle: Bundle, gpu: str
) -> list[Change]:
    """What of the machine differs from the bundle's record; nothing where it has none.

    Its name, the numbers of threads, versions of software and driver, and clocks (in Hz).
    """
    changed = []
    for name, machine in machines_of([root], tables).items():
        recorded = bundle.machines.get(gpu)
        pairs = [("device", gpu, name), ("threads", *_threads(tables, bundle, gpu))]
        if recorded is not None:
            pairs += [
                (what, recorded.versions.get(what, "none"), machine.versions.get(what, "none"))
                for what in dict.fromkeys([*recorded.versions, *machine.versions])
                if what not in NOT_MACHINE
            ]
            pairs += [
                (what, f"{before:.3g}", f"{hertz:.3g}")
                for what, hertz in machine.readings.items()
                if what != GPU_SPEED and (before := recorded.readings.get(what))
                if abs(hertz / before - 1) > CLOCK_TOLERANCE
            ]
        changed += [Change(what=w, recorded=a, now=b) for w, a, b in pairs if a != b]
    return changed


def _threads(tables: Mapping[str, pd.DataFrame], bundle: Bundle, gpu: str) -> tuple[str, str]:
    """Numbers of threads that the bundle has anchor times of, and that were measured now, as text.

    The first text twice if the bundle has all that were measured.
    """
    known = sorted(n for name, n in bundle.anchors if name == gpu)
    now = sorted({int(n) for rows in tables.values() for n in rows["threads"].unique()})
    if not known or set(now) <= set(known):  # a check may measure with some of them only
        known = now
    return " ".join(map(str, known)), " ".join(map(str, now))


def checkable(bundle: Bundle, gpu: Gpu) -> list[str]:
    """Families that one process can measure on a device and the bundle has a model of."""
    return [
        name
        for name, family in families().items()
        if name in bundle.models
        and bundle.models[name].covers_kind(gpu)
        and family.ranks == 1
        and not family.on_demand
    ]


def stratified_points(bundle: Bundle, gpu: Gpu, threads: int, seed: int) -> dict[str, list[Point]]:
    """Lists points by family inside the training range, mixing short and long ones.

    Points are sorted by forecast time into eight equal parts, and each eight consecutive points of
    the list hold one of each part.
    """
    points = {}
    for name in checkable(bundle, gpu):
        drawn = list(dict.fromkeys(islice(space(name, Path(), gpu, seed), CANDIDATES)))
        rows = pd.DataFrame([asdict(p) for p in drawn])
        rows = rows.assign(gpu=gpu.name, threads=threads, cache="warm")
        priced = bundle.price(name, rows)
        forecast_us, inside = (
            priced["predicted_us"].to_numpy(),
            priced["in_envelope"].to_numpy(dtype=bool),
        )
        usable = np.flatnonzero(inside & (forecast_us <= LONGEST_US))
        if len(usable):
            points[name] = [drawn[i] for i in in_turn(forecast_us[usable], usable, seed)]
    return points


def in_turn(us: np.ndarray, index: np.ndarray, seed: int) -> Iterator[int]:
    """Yields ``index`` with short and long points mixed: one of each eighth by ``us``, in turn.

    ``us`` and ``index`` are the forecast time and the number of the same points; within an eighth
    the order is random.
    """
    rng = np.random.default_rng(seed)
    strata = [rng.permutation(part) for part in np.array_split(index[np.argsort(us)], STRATA)]
    for place in range(max(map(len, strata))):
        yield from (int(part[place]) for part in strata if place < len(part))
