"""Measure how fast ``predict`` and ``price`` answer here.

`python -m itercast.extras.benchmarks.speed [BUNDLE]` runs it.
The bundle must be one trained on a CPU; the default is the CPU bundle that ships.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from rich.table import Table

from itercast.eval.tables import print_tables
from itercast.extras.processes import in_new_process
from itercast.extras.programs import run_program
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.microbench.ops import families

ROWS = 100_000
UNSEEN = "l4"


def second_plan_s(bundle: Path) -> tuple[float, float]:
    """Seconds of a repeated forecast and of a forecast under a second plan, in a warm process."""
    from itercast.compose.capture_model import capture
    from itercast.compose.predict import predict

    step = capture("gpt2-small")
    predict(step, plan="", bundle=bundle)
    times_s = []
    for plan in ("", "dp=2"):
        start = time.perf_counter()
        predict(step, plan=plan, bundle=bundle)
        times_s.append(time.perf_counter() - start)
    return times_s[0], times_s[1]


@contextmanager
def fresh_folder() -> Iterator[None]:
    """Work in an empty folder, where processes find no captures of an earlier run."""
    root = str(Path(__file__).parents[3])
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        os.environ |= {"PYTHONPATH": root, "OMP_WAIT_POLICY": "passive"}
        os.environ["ITERCAST_CACHE"] = str(Path(folder) / "cache")
        yield


def python_s(words: list[str]) -> float:
    """Run Python with these arguments; its wall-clock seconds.

    RuntimeError with the last line of its error output where it fails.
    """
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise RuntimeError(f"python {' '.join(words)}: exit code {done.returncode}: {output[-1]}")
    return time.perf_counter() - start


def sample_rows(count: int, gpu: str, bundle: Bundle) -> pd.DataFrame:
    """Rows to price, of all families of the bundle: the first points of each family's sweep."""
    swept = [f for f in families().values() if f.name in bundle.models and not f.on_host]
    per_family = ceil(count / len(swept))
    parts = [
        pd.DataFrame([asdict(p) for p in islice(f.sweep(), per_family)]).assign(family=f.name)
        for f in swept
    ]
    rows = pd.concat(parts, ignore_index=True)
    return rows.sample(count, replace=len(rows) < count, random_state=0).assign(gpu=gpu, node=gpu)


def price_rows_s(gpu: str, bundle: Path) -> float:
    """Seconds that ``itercast price`` takes for ROWS rows, the whole process."""
    sample_rows(ROWS, gpu, Bundle.load(bundle)).to_parquet("rows.parquet")
    words = ["price", "rows.parquet", "--out", "o.parquet", "--bundle", str(bundle)]
    return python_s(["-m", "itercast", *words])


def figures(bundle: Path) -> list[tuple[str, str, str]]:
    """(what, target in s, measured in s) for each figure; other load on the machine adds to all."""
    bundle = bundle.resolve()
    cpu = next(iter(Bundle.load(bundle).gpus))
    predict = ["-m", "itercast", "predict", "gpt2-small", "--gpu", "cpu", "--bundle", str(bundle)]
    with fresh_folder():
        timed = [
            ("the API imported, whole process", 0.3, python_s(["-m", "itercast.api"])),
            ("predict gpt2-small, whole process, cold", 2.5, python_s(predict)),
            ("the same from a cached op graph", 0.8, python_s(predict)),
        ]
        again_s, plan_s = in_new_process(second_plan_s, bundle)
        timed += [
            ("the same plan again in one process", 0.005, again_s),
            ("a second plan (dp=2) in one process", 0.005, plan_s),
            (f"price {ROWS:,} rows, whole process", 8.0, price_rows_s(cpu, bundle)),
            (f"the same on an unseen GPU ({UNSEEN})", 8.0, price_rows_s(UNSEEN, SHIPPED)),
        ]
    return [(what, f"{target_s:g}", f"{measured_s:.3f}") for what, target_s, measured_s in timed]


def print_table(title: str, lines: Sequence[tuple[str, str, str]]) -> None:
    """Print measured figures beside their targets, and how busy the machine is."""
    table = Table("what", "target", "measured", title=f"{title}, load {os.getloadavg()[0]:.1f}")
    for line in lines:
        table.add_row(*line)
    print_tables(table)


def main(bundle: Annotated[Path, typer.Argument(help="of a CPU")] = SHIPPED_CPU) -> None:
    """Print how fast forecasts answer."""
    print_table("speed in s", figures(bundle))


if __name__ == "__main__":
    run_program(main)
