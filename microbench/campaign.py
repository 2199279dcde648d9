"""All that is measured on a GPU box, as one command: `make campaign BUDGET=8m OUT=datasets`.

One run takes its budget and a minute more for starting and writing. What it leaves is whole, and
the next run, on the same box or another of the same kind, goes on where it stopped.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from microbench.collect import card_facts, collect, known_families, phases, spent_s
from microbench.collect_iterations import collect_iterations
from microbench.gpu_iterations import gpu_iterations
from microbench.zoo import points_file

log = logging.getLogger("itercast.campaign")
OPS_SHARE = 0.5  # of a run's budget; iterations take what they need of the rest, ops what is left
FUSED_SHARE = 0.15  # of what is left then: a point takes seconds to compile
LEAST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a run: seconds it may take at most, given those left; returns new rows."""

    name: str
    seconds: Callable[[float], float]
    measure: Callable[[float], int]


def stages(out: Path, device: str, seed: int, wanted: Path | None = None) -> Iterator[Stage]:
    """Ops, compiled kernels, a round of iterations and a second for the noise, then ops again."""

    def ops(*names: str) -> Callable[[float], int]:
        return lambda seconds: collect(
            out,
            device,
            names or None,
            swept_s(out, device, names) + seconds,
            seed,
            wanted=None if names else wanted,
        )

    def rounds(repeat: int) -> Callable[[float], int]:
        return lambda seconds: collect_iterations(
            out, device, gpu_iterations(), repeat, budget_s=seconds
        )

    yield Stage(name="ops", seconds=lambda left_s: OPS_SHARE * left_s, measure=ops())
    yield Stage(name="fused", seconds=lambda left_s: FUSED_SHARE * left_s, measure=ops("fused"))
    yield Stage(name="iterations", seconds=lambda left_s: left_s, measure=rounds(0))
    yield Stage(name="iterations again", seconds=lambda left_s: left_s, measure=rounds(1))
    yield Stage(name="more ops", seconds=lambda left_s: left_s, measure=ops())


def swept_s(out: Path, device: str, names: Sequence[str]) -> float:
    """What earlier sweeps under ``out`` spent: the budget of ``collect`` is the root's."""
    gpu = card_facts(out, device)["hardware"]["name"]
    return sum(spent_s(out, gpu, phase) for phase in phases(device, known_families(names)))


def run(budget_s: float, plan: Iterator[Stage]) -> dict[str, int]:
    """New rows by stage; a stage with less than a few seconds left is not begun."""
    begin, rows = time.monotonic(), {}
    for stage in plan:
        left_s = budget_s - (time.monotonic() - begin)
        seconds = stage.seconds(left_s)
        if seconds < LEAST_S:
            continue
        rows[stage.name] = stage.measure(seconds)
        log.info("%s: %d new rows", stage.name, rows[stage.name])
    return rows


def seconds(text: str) -> float:
    """A duration like 90s, 8m or 1h in seconds."""
    return float(text[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[text[-1]]


def main() -> None:
    """Run a campaign, or prepare for one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=seconds, default=480.0, help="of this run: 90s, 8m, 1h")
    parser.add_argument("--out", type=Path, default=Path("datasets"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", type=Path, help="of itercast points: a second pass")
    parser.add_argument("--prepare", action="store_true", help="capture models now; needs no GPU")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if asked.prepare:
        log.info("points of captured models: %s", points_file(asked.out, "cuda", asked.seed))
        return
    run(asked.budget, stages(asked.out, asked.device, asked.seed, asked.points))


if __name__ == "__main__":
    main()
