"""The learning curve of a sweep: error against its minutes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.capture.base.files import write_atomic
from itercast.eval.progress import progress_bar
from itercast.learners.beyond_memory import MIN_ROWS, usable_rows
from itercast.learners.family_model import Learned, Prepared, learn, prepare
from itercast.learners.features.machine_speed import learn_speed, reference_anchors, undisturbed
from itercast.learners.features.table import shape_places
from itercast.learners.held_out import held_out_forecasts
from itercast.learners.models.training_table import Array, frozen_split
from itercast.learners.models.trees import default_options
from itercast.learners.train import TEST_SHARE, errors, hardware_of
from itercast.microbench.ops import families
from itercast.microbench.ops.family import Family

SHARES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the sweep's minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Errors in % on the held-out rows of all families after a share of the sweep."""

    minutes: float
    points: int
    median_ape_pct: float
    p90_ape_pct: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFacts:
    """The learning curve of a sweep.

    ``held_out``: forecasts of the held-out rows at the curve's end
    (``itercast.learners.held_out``).
    """

    learning: Sequence[Step] = ()
    held_out: pd.DataFrame = field(default_factory=pd.DataFrame)


def sweep_facts(folder: Path, root: Path, gpu: str, compute: bool) -> SweepFacts:
    """Read the facts of this sweep from ``folder``, or ``compute`` and save them, in minutes.

    Empty where the folder has none of this sweep (by a digest of its parts) and ``compute`` is
    false. ``root`` is the dataset with the sweep of ``gpu``.
    """
    path, digest = folder / f"{gpu}.json", _digest(root, gpu)
    table = path.with_suffix(".parquet")
    facts = json.loads(path.read_text()) if path.is_file() else {}
    if facts.get("digest") != digest:
        if not compute:
            return SweepFacts()
        steps, held_out = learning_curve(root, gpu)
        write_atomic(table, held_out.to_parquet(index=False))
        facts = {"digest": digest, "learning": [asdict(step) for step in steps]}
        write_atomic(path, json.dumps(facts, indent=1).encode())
    return SweepFacts(
        learning=[Step(**step) for step in facts["learning"]],
        held_out=pd.read_parquet(table),
    )


def _digest(root: Path, gpu: str) -> str:
    """Changes whenever a part is added to the op rows of the GPU."""
    parts = [p for name in families() for p in sorted((root / name / gpu).glob("*/part-*"))]
    told = "\n".join(f"{p.relative_to(root)} {p.stat().st_size}" for p in parts)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A family's measured rows, in the random order in which a replayed sweep measures them.

    ``held``: positions of held-out rows. ``ordered``: positions of the others, in order; ``point``
    and ``end_s`` are the point of each, and the seconds of sweep until it is measured.
    """

    family: Family
    rows: pd.DataFrame
    prepared: Prepared
    held: Array
    ordered: Array
    point: Array
    end_s: Array

    def first(self, share: float) -> Array:
        """Mask of the ordered rows that are measured within a share of all seconds."""
        return np.asarray(self.end_s <= share * self.end_s[-1])

    def learned(self, share: float) -> tuple[Learned | None, Array]:
        """The model of the first ``share`` of the rows (None: under MIN_ROWS), and these rows."""
        known = np.sort(self.ordered[self.first(share)])
        if len(known) < MIN_ROWS:
            return None, known
        return learn(self.prepared, known, default_options(self.prepared.table.take(known))), known


def _pools(root: Path, gpu: str) -> Iterator[Pool]:
    """Yields the families with enough rows to train, split as in ``itercast.learners.train``."""
    usable = {name: rows[rows["gpu"] == gpu] for name, rows in usable_rows([root], None).items()}
    tables = {n: rows.reset_index(drop=True) for n, rows in usable.items() if len(rows) >= MIN_ROWS}
    anchors = reference_anchors(tables)
    for name, rows in tables.items():
        rows, family = undisturbed(rows, anchors).reset_index(drop=True), families()[name]
        hardware = hardware_of([root], rows)
        prepared = prepare(rows, family, hardware, learn_speed(rows, family, anchors))
        op = rows["op"].to_numpy().astype(str)
        known, held = frozen_split(shape_places(rows, family), TEST_SHARE, op)
        ids = point_ids(rows, prepared.table.group)
        turn = np.random.default_rng(0).permutation(ids.max() + 1)[ids[known]]
        end_s = pd.Series(rows["cost_s"].to_numpy(dtype=float)[known]).groupby(turn).sum().cumsum()
        order = np.argsort(turn, kind="stable")
        yield Pool(
            family=family,
            rows=rows,
            prepared=prepared,
            held=held,
            ordered=known[order],
            point=turn[order],
            end_s=end_s.loc[turn[order]].to_numpy(),
        )


def point_ids(rows: pd.DataFrame, group: Array) -> Array:
    """A number per point of a sweep (shape, dtype, threads); warm and cold rows share it."""
    varying = rows[[c for c in ("dtype", "threads") if c in rows]].assign(group=group)
    return varying.groupby(list(varying), dropna=False).ngroup().to_numpy()


def learning_curve(root: Path, gpu: str) -> tuple[list[Step], pd.DataFrame]:
    """Errors on held-out rows of models trained on the first SHARES of a sweep.

    A share is one of every family's seconds of measuring, with points in random order. With too
    few rows to train, the roofline is the forecast. Returns the steps of the curve, and the
    forecasts of the held-out rows by the models of the whole sweep.
    """
    pools = list(_pools(root, gpu))
    steps, last = [], list[pd.DataFrame]()
    with progress_bar() as bar:
        task = bar.add_task(f"replay the sweep of {gpu}", total=len(SHARES) * len(pools))
        for share in SHARES:
            guesses = []
            for pool in pools:
                learned, known = pool.learned(share)
                held, table = pool.held, pool.prepared.table
                guesses.append(learned.predict_us(held) if learned else table.roofline_us[held])
                if learned and share == SHARES[-1]:
                    facts = (pool.rows, pool.family, known, held)
                    offsets = learned.crossed.offsets
                    last.append(held_out_forecasts(learned, *facts, guesses[-1], offsets))
                bar.advance(task)
            steps.append(_step(pools, share, np.concatenate(guesses)))
    return steps, pd.concat(last, ignore_index=True) if last else pd.DataFrame()


def _step(pools: Sequence[Pool], share: float, predicted_us: Array) -> Step:
    """A point of the learning curve: what a share of the sweep took, and the errors after it.

    ``predicted_us``: forecasts of the held-out rows of all pools, one pool after the other.
    """
    scores = errors(predicted_us, np.concatenate([p.prepared.table.time_us[p.held] for p in pools]))
    return Step(
        minutes=sum(float(p.end_s[p.first(share)].max(initial=0.0)) for p in pools) / 60,
        points=sum(len(np.unique(p.point[p.first(share)])) for p in pools),
        median_ape_pct=scores["median_ape_pct"],
        p90_ape_pct=scores["p90_ape_pct"],
    )
