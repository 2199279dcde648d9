"""Compares two bundles: which forecasts which op family better, beyond the noise."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.eval.compare import compare_all, measured_rows
from itercast.eval.results import ITERATIONS, RETEST, summary
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import (
    Speed,
    at_reference_us,
    retest_ape_pct,
    undisturbed,
)
from itercast.learners.features.table import shape_places
from itercast.learners.held_out import load_held_out, log_errors, median_retest_pct, shapes_of
from itercast.learners.models.noise import medians
from itercast.learners.seen_shapes import seen
from itercast.learners.train import digest_of, hardware_of
from itercast.learners.training_rows import usable_rows
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families

log = logging.getLogger(__name__)
ONE, OTHER = "one", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Median absolute errors in % of two bundles on the same measured points of a GPU.

    ``difference_pct``: interval of the second error minus the first, given the noise; None where
    points are of too few shapes to say.
    ``better``: 1 or 2, or 0 where the difference is within the noise.
    """

    family: str
    gpu: str
    points: int
    retest_pct: float | None
    errors_pct: tuple[float, float]
    difference_pct: tuple[float, float] | None
    better: int


def compare_bundles(first: Path, second: Path, roots: Sequence[Path]) -> list[Comparison]:
    """Compare on the rows of dataset roots, else on the points that both trainings held out.

    ValueError where nothing can be compared.
    """
    bundles = Bundle.load(first), Bundle.load(second)
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"data {str(root)!r}: no such folder")
    comparisons = list(_on_rows(*bundles, roots) if roots else _held_out(first, second))
    for root in roots:
        if (root / "iteration").is_dir():
            comparisons += _iterations(first, second, root)
    if not comparisons:
        where = ", ".join(map(str, roots)) or "the points that both trainings held out"
        raise ValueError(
            f"bundles {str(first)!r} and {str(second)!r}: nothing to compare in {where}"
        )
    return comparisons


def _held_out(first_bundle: Path, second_bundle: Path) -> Iterator[Comparison]:
    """Compare on points that both bundles' trainings held out, with the forecasts kept there."""
    tables = [load_held_out(folder) for folder in (first_bundle, second_bundle)]
    for folder, table in zip((first_bundle, second_bundle), tables, strict=True):
        if table.empty:
            text = "keeps no held-out rows; name measured rows with --data"
            raise ValueError(f"bundle {str(folder)!r} {text}")
    for (family, gpu), first in tables[0].groupby(["family", "gpu"]):
        second = tables[1][(tables[1]["family"] == family) & (tables[1]["gpu"] == gpu)]
        errors = log_errors(first).to_frame(ONE).join(log_errors(second).rename(OTHER), how="inner")
        retest_pct = median_retest_pct(first, second)
        yield from _compared(str(family), str(gpu), errors, shapes_of(errors), retest_pct)


def _on_rows(first: Bundle, second: Bundle, roots: Sequence[Path]) -> Iterator[Comparison]:
    """Compare on measured rows, of families that both bundles have, without shapes of training."""
    shared = sorted({*first.models} & {*second.models})
    names = [name for name in shared if any((root / name).is_dir() for root in roots)]
    for name, rows in (usable_rows(roots, names) if names else {}).items():
        rows = _unseen(
            name, undisturbed(undisturbed(rows, first.anchors), second.anchors), first, second
        )
        gpus, family = hardware_of(roots, rows), families()[name]
        for gpu, part in rows.groupby("gpu"):
            part = part.reset_index(drop=True)
            sides = {ONE: first, OTHER: second}
            errors = pd.DataFrame({s: log_ratios(name, part, b, gpus) for s, b in sides.items()})
            speed = Speed(anchors=first.anchors, sensitivity=first.models[name].sensitivity)
            retest = retest_ape_pct(part, family, speed)
            yield from _compared(name, str(gpu), errors, shape_places(part, family), retest)


def _unseen(name: str, rows: pd.DataFrame, *bundles: Bundle) -> pd.DataFrame:
    """The rows of a family whose shapes neither bundle was trained on; a log line on the others.

    A bundle may keep no shapes: then a digest still says whether it was trained on these very rows.
    """
    trained_on = np.zeros(len(rows), dtype=bool)
    for facts in (bundle.models[name].facts for bundle in bundles):
        trained_on |= seen(facts.get("shapes", ""), rows, families()[name])
        trained_on |= facts.get("digest") == digest_of(rows)
    if trained_on.any():
        message = "%s: %d of %d rows are left out, of shapes that a bundle was trained on"
        log.warning(message, name, trained_on.sum(), len(rows))
    return rows[~trained_on].reset_index(drop=True)


def log_ratios(
    name: str, rows: pd.DataFrame, bundle: Bundle, gpus: Mapping[str, Gpu] | None = None
) -> pd.Series[float]:
    """log(measured / forecast) of a family's rows, at the speed of the machine at training."""
    speed = Speed(anchors=bundle.anchors, sensitivity=bundle.models[name].sensitivity)
    ratios: pd.Series[float] = (
        at_reference_us(rows, speed) / bundle.price(name, rows, gpus)["predicted_us"]
    )
    return ratios.map(np.log)


def _iterations(first: Path, second: Path, root: Path) -> Iterator[Comparison]:
    """Compare on iterations that both bundles forecast, by GPU; one model is one shape."""
    for gpu, part in measured_rows(root, None).groupby("gpu"):
        results = {
            side: compare_all(part, folder) for side, folder in ((ONE, first), (OTHER, second))
        }
        log_ratios = {
            side: {(r.model, r.plan): np.log(r.measured_us / r.predicted_us) for r in of_side}
            for side, of_side in results.items()
        }
        errors = pd.DataFrame(log_ratios).dropna()
        models = pd.factorize(errors.index.get_level_values(0))[0]
        floor = summary(results[ONE]).get(RETEST) if results[ONE] else None
        yield from _compared(ITERATIONS, str(gpu), errors, models, floor)


def _compared(
    family: str, gpu: str, errors: pd.DataFrame, shape: np.ndarray, retest_pct: float | None
) -> Iterator[Comparison]:
    """Compares both bundles on log(measured / forecast); yields nothing without points.

    ``errors``: a column for each bundle; ``shape``: a number of each row's shape, as errors of one
    shape are alike.
    """
    if errors.empty:
        return
    both_medians = medians({n: errors[n].to_numpy() for n in (ONE, OTHER)}, shape, retest_pct)
    better = 1 if both_medians.better(ONE, OTHER) else 2 if both_medians.better(OTHER, ONE) else 0
    yield Comparison(
        family=family,
        gpu=gpu,
        points=len(errors),
        retest_pct=retest_pct,
        errors_pct=(both_medians.pct[ONE], both_medians.pct[OTHER]),
        difference_pct=both_medians.interval_pct(ONE, OTHER),
        better=better,
    )
