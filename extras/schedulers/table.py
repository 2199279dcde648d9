"""Throughput of a model on many GPUs, numbers of GPUs and batches: the table of a scheduler.

Every cell is a forecast by ``itercast.compose.predict``. Two forms that schedulers read:

- Gavel (arXiv:2008.09213): JSON of iterations/s by GPU and by ``('JOB TYPE', GPUS)``, under "null"
  where the job has its GPUs to itself; 0 where it does not fit.
- Sia (SOSP 2023): for each GPU and model a ``placements.csv`` of the time of a step and of its
  synchronisation in s, by replicas on each node (44: two nodes with 4) and samples per replica.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast
from itercast.compose.predict import predict
from itercast.compose.prices import SECONDS_PER_HOUR, prices_of
from itercast.compose.target import find_target
from itercast.microbench.hardware.node import USUAL_GPUS_PER_NODE, Node, load_node
from itercast.microbench.store import Facts, Row

OTHER_DEGREES = re.compile(r"(?:^|,)\s*(?:tp|pp|cp)\s*=\s*(\d+)")
STATES_DP = re.compile(r"(?:^|,)\s*dp\s*=")
MAX_DIGIT = 9  # replicas on a node, which Sia writes as one digit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One model on a number of one kind of GPU; ``reason``: why there is no forecast.

    ``batch`` is that of a replica: as asked, else the model's own, None without a forecast.
    ``usd_per_hour``: price of one GPU; None where none is given.
    """

    gpu: str
    gpus: int
    gpus_per_node: int
    batch: int | None
    plan: str
    forecast: Forecast | None = None
    reason: str = ""
    usd_per_hour: float | None = None

    @property
    def status(self) -> str:
        """One of ok, oom and unsupported."""
        if self.forecast is None:
            return "unsupported"
        return "ok" if self.forecast.fits else "oom"

    @property
    def samples(self) -> float:
        """Samples of an iteration over all replicas; 0 without a forecast."""
        found = self.forecast
        return found.samples_per_s * found.iteration_us * 1e-6 if found else 0.0

    @property
    def usd_per_sample(self) -> float | None:
        """Price of the GPUs for the time of a sample."""
        if self.forecast is None or self.usd_per_hour is None:
            return None
        seconds_of_gpus = self.gpus / self.forecast.samples_per_s
        return self.usd_per_hour * seconds_of_gpus / SECONDS_PER_HOUR

    def row(self) -> Row:
        """The cell as a row of a table; None where there is no number."""
        found = self.forecast
        numbers = {
            name: getattr(found, name) if found else None
            for name in (
                *("iteration_us", "samples_per_s", "tokens_per_s", "memory_bytes"),
                *("memory_room_bytes", "memory_verdict", "unmodelled_frac", "assumed_frac"),
                "network",
            )
        }
        joule = found.energy_j / self.samples if found and found.energy_j else None
        facts = {"gpu": self.gpu, "gpus": self.gpus, "batch": self.batch, "plan": self.plan}
        facts |= {"status": self.status, "reason": self.reason, **numbers}
        return {**facts, "energy_j_per_sample": joule, "usd_per_sample": self.usd_per_sample}


def spread(pattern: str, gpus: int) -> str:
    """A plan of so many GPUs: the pattern, with as many replicas as its other degrees leave.

    ValueError where these do not divide the number of GPUs, or a rule forbids the plan.
    """
    if STATES_DP.search(pattern):
        raise ValueError(f"plan {pattern!r}: dp follows from --gpus, state other degrees only")
    degree = math.prod(int(n) for n in OTHER_DEGREES.findall(pattern))
    if degree < 1 or gpus % degree:
        raise ValueError(f"plan {pattern!r}: {gpus} GPUs do not divide by {degree}")
    return str(ParallelPlan.parse(",".join(filter(None, (f"dp={gpus // degree}", pattern)))))


def throughput_table(
    model: Any,
    gpus: Sequence[str],
    counts: Sequence[int],
    batches: Sequence[int | None],
    *,
    pattern: str = "",
    nodes: Sequence[str] = (),
    prices: Path | None = None,
    on_cell: Callable[[Cell], None] = lambda cell: None,
    **asked: Any,
) -> list[Cell]:
    """The cells of all combinations; ValueError where no cell can be forecast.

    ``nodes``: names or files, each is used for the GPU that it holds. ``asked``: the other
    arguments of ``predict``.
    """
    bundle = asked.get("bundle")
    names = {gpu: find_target(gpu, "", bundle).gpu.name for gpu in gpus}
    where = _nodes(nodes, list(names.values()))
    usd = prices_of(prices, list(names.values())) if prices else {}
    cells = list[Cell]()
    for gpu, name in names.items():
        node_name, node = where.get(name, ("", None))
        per_node = node.gpus_per_node if node else USUAL_GPUS_PER_NODE
        for count in counts:
            for batch in batches:
                parts = (pattern, f"node={node_name}" if node_name else "")
                facts = {"gpu": name, "gpus": count, "gpus_per_node": per_node, "batch": batch}
                facts["usd_per_hour"] = usd.get(name)
                cells.append(_cell(model, gpu, ",".join(filter(None, parts)), facts, asked))
                on_cell(cells[-1])
    if all(cell.forecast is None for cell in cells):
        raise ValueError(cells[0].reason)
    return cells


def _nodes(nodes: Sequence[str], gpus: Sequence[str]) -> dict[str, tuple[str, Node]]:
    """The name and the node of each GPU among those; ValueError for a node that holds no such."""
    where = dict[str, tuple[str, Node]]()
    for name in nodes:
        node = load_node(name)
        if not (held := [gpu for gpu in node.gpus if gpu in gpus]):
            raise ValueError(f"node {name!r} holds none of {', '.join(gpus)}")
        where |= {gpu: (name, node) for gpu in held if gpu == node.gpu or gpu not in where}
    return where


def _cell(model: Any, gpu: str, pattern: str, facts: Row, asked: Facts) -> Cell:
    try:
        plan = spread(pattern, facts["gpus"])
        found = predict(model, gpu=gpu, plan=plan, batch=facts["batch"], **asked)
    except ValueError as exc:
        return Cell(plan=pattern, reason=str(exc), **facts)
    samples = found.samples_per_s * found.iteration_us * 1e-6
    replica = facts["batch"] or round(samples / ParallelPlan.parse(plan).dp)
    return Cell(plan=plan, forecast=found, **{**facts, "batch": replica})


def gavel_table(name: str, cells: Sequence[Cell]) -> dict[str, dict[str, dict[str, float]]]:
    """Iterations/s by GPU and by job type and number of GPUs; 0 where it does not fit."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for cell in cells:
        found = cell.forecast
        if found is None or cell.batch is None:
            continue
        key = str((f"{name} (batch size {cell.batch})", cell.gpus))
        rate = 1e6 / found.iteration_us if found.fits else 0.0
        table.setdefault(cell.gpu, {})[key] = {"null": rate}
    return table


def sia_rows(cells: Sequence[Cell]) -> Iterator[tuple[str, str, Row]]:
    """Yields GPU, name of Sia's file and its row, of cells that fit and are data parallel alone.

    ``scalability.csv`` has them by number of nodes and replicas, ``placements.csv`` by placement.
    """
    for cell in cells:
        found = cell.forecast
        plain = ParallelPlan.parse(cell.plan).dp == cell.gpus
        if found is None or not (found.fits and plain):
            continue
        nodes = math.ceil(cell.gpus / cell.gpus_per_node)
        base, more = divmod(cell.gpus, nodes)
        replicas = sorted([base] * (nodes - more) + [base + 1] * more)
        times = {
            "local_bsz": cell.batch,
            "step_time": found.iteration_us * 1e-6,
            "sync_time": found.exposed_comm_us * 1e-6,
        }
        yield cell.gpu, "scalability.csv", {"num_nodes": nodes, "num_replicas": cell.gpus, **times}
        if replicas[-1] <= MAX_DIGIT:
            yield cell.gpu, "placements.csv", {"placement": "".join(map(str, replicas)), **times}
