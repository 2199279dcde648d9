"""The training iterations that are measured on one GPU: small and large, host-bound and not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.cases.registry import case
from itercast.capture.step import TIMINGS
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.store import Row

FACTS = facts_of(__file__)
FIRST: list[tuple[str, int, str, str]] = FACTS["first"]
DLRM = tuple(f"dlrm-r{number:02d}" for number in range(20))


def gpu_iterations() -> list[Iteration]:
    """Lists all iterations to measure: ``FIRST``, more eager steps, CUDA graphs, compiled steps."""
    first, last = ([_iteration(*facts) for facts in FACTS[part]] for part in ("first", "last"))
    eager = list[Iteration]()
    for turn in zip_longest(*FACTS["eager"].values()):  # the first size of each case, the second...
        sizes = {name: size for name, size in zip(FACTS["eager"], turn, strict=True) if size}
        eager += [_iteration(name, batch, dtype, "eager") for name, (batch, dtype) in sizes.items()]
    dlrm = [_iteration(name, 0, "fp32", "eager") for name in DLRM]
    dlrm = [iteration for iteration in dlrm if iteration not in first]
    mixed = [iteration for pair in zip_longest(eager, dlrm) for iteration in pair if iteration]
    return [*first, *mixed, *last]


def iterations_of(stage: str) -> list[Iteration]:
    """The iterations of a stage of the second campaign, each in all timings that it states."""
    facts = FACTS["second"][stage]
    timings = TIMINGS if facts.get("both") else TIMINGS[:1]
    iterations = [_iteration(*iteration) for iteration in facts["iterations"]]
    return [replace(iteration, timing=timing) for iteration in iterations for timing in timings]


def write_configurations(root: Path) -> None:
    """Write the configurations of Hugging Face that iterations name under the root."""
    for name, facts in FACTS["configurations"].items():
        write_atomic(root / _config(name), json.dumps(facts["config"]).encode())


def _config(name: str) -> str:
    """Path of a configuration below a root, which is the case of its iterations."""
    return f"configurations/{name}/config.json"


def _iteration(name: str, batch: int, dtype: str, engine: str, optimizer: str = "") -> Iteration:
    """An iteration of a case or configuration; a ``batch`` of 0 is the case's own."""
    usual = "sgd" if name in DLRM else "adamw"
    how: Row = {"dtype": dtype, "engine": engine, "optimizer": optimizer or usual}
    if name in FACTS["configurations"]:
        seq = FACTS["configurations"][name]["seq"]
        return Iteration(case=_config(name), batch=batch, seq=seq, **how)
    chosen = case(name)
    return Iteration(case=name, batch=batch or chosen.batch, seq=chosen.seq, **how)
