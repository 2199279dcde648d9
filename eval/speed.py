"""Measure how fast ``predict`` and ``price`` answer here: `python -m itercast.eval.speed [BUNDLE]`.

The bundle must be one trained on a CPU; the default is the CPU bundle that ships.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

from itercast.eval.progress import run_or_say
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


def timed_s(words: list[str], folder: str) -> tuple[float, str]:
    """Run Python with these arguments in ``folder``; its wall-clock seconds and its output.

    RuntimeError with the last line of its error output where it fails.
    """
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_WAIT_POLICY": "passive"}
    environment["ITERCAST_CACHE"] = str(Path(folder) / "cache")
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing said"]
        what = " ".join(word for word in words if "\n" not in word)
        raise RuntimeError(f"python {what}: exit code {done.returncode}: {said[-1]}")
    return time.perf_counter() - start, done.stdout


def sample_rows(count: int, gpu: str, bundle: Bundle) -> pd.DataFrame:
    """Rows to price, of all families of the bundle: the first points of each family's sweep."""
    swept = [f for f in families().values() if f.name in bundle.models and not f.on_host]
    share = -(-count // len(swept))
    parts = [
        pd.DataFrame([asdict(p) for p in islice(f.sweep(), share)]).assign(family=f.name)
        for f in swept
    ]
    rows = pd.concat(parts, ignore_index=True)
    return rows.sample(count, replace=len(rows) < count, random_state=0).assign(gpu=gpu, node=gpu)


def price_rows_s(gpu: str, bundle: Path, folder: str) -> float:
    """Seconds that ``itercast price`` takes for ROWS rows, the whole process."""
    sample_rows(ROWS, gpu, Bundle.load(bundle)).to_parquet(Path(folder) / "rows.parquet")
    words = ["-m", "itercast", "price", "rows.parquet", "--out", "o.parquet"]
    return timed_s([*words, "--bundle", str(bundle.resolve())], folder)[0]


def figures(bundle: Path) -> list[tuple[str, float, float]]:
    """(what, target in s, measured in s) for each figure; other load on the machine adds to all."""
    where = str(bundle.resolve())
    predict = ["-m", "itercast", "predict", "gpt2-small", "--gpu", "cpu", "--bundle", where]
    with tempfile.TemporaryDirectory() as folder:
        import_s, _ = timed_s(["-m", "itercast.api"], folder)
        cold_s, _ = timed_s(predict, folder)
        cached_s, _ = timed_s(predict, folder)
        _, printed = timed_s(["-m", "itercast.eval.speed", where, "--second-plan"], folder)
        again_s, plan_s = (float(line) for line in printed.split())
        own = next(iter(Bundle.load(bundle).gpus))
        price_s, unseen_s = (
            price_rows_s(gpu, which, folder) for gpu, which in ((own, bundle), (UNSEEN, SHIPPED))
        )
    return [
        ("the API imported, whole process", 0.3, import_s),
        ("predict gpt2-small, whole process, cold", 2.5, cold_s),
        ("the same from a cached op graph", 0.8, cached_s),
        ("the same plan again in one process", 0.005, again_s),
        ("a second plan (dp=2) in one process", 0.005, plan_s),
        (f"price {ROWS:,} rows, whole process", 8.0, price_s),
        (f"the same on an unseen GPU ({UNSEEN})", 8.0, unseen_s),
    ]


def main(bundle: Path) -> None:
    """Print a table of measured times beside their targets."""
    table = Table("what", "target s", "measured s", title=f"speed, load {os.getloadavg()[0]:.1f}")
    for what, target_s, measured_s in figures(bundle):
        table.add_row(what, f"{target_s:g}", f"{measured_s:.3f}")
    Console().print(table)


if __name__ == "__main__":
    if sys.argv[2:] == ["--second-plan"]:  # the fresh process that ``figures`` starts
        print(*second_plan_s(Path(sys.argv[1])), sep="\n")
    else:
        run_or_say(lambda: main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED_CPU))
