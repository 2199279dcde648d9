"""A fleet of two local nodes against plain sweeps of the same points: rates, dry run, models.

    python tests/endurance/fleet_against_one.py FOLDER --chunk 30s   # measures, on a quiet machine
    python tests/endurance/fleet_against_one.py FOLDER --models      # trains on what was measured

Measures two chunks at once as a fleet, of one core each. Then the points that this fleet has rows
of: half of them by each of two plain sweeps at once, each on a core, which is the most that two
nodes of this machine can reach; and all by one sweep on one core, in twice the time. Printed are
rows per minute of measuring, and the chunks' time against the simulated one. ``--models``: op
models of the fleet's rows and of the one sweep's, with their errors on the same held-out shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from itercast.capture.base.durations import seconds
from itercast.extras.fleet.chunks import deal, simulate
from itercast.extras.fleet.driver import results
from itercast.extras.fleet.plan import load_plan
from itercast.microbench import store
from itercast.microbench.store import Row
from itercast.microbench.sweep.captured_points import points_of_rows, write_points

FAMILIES = ("gemm", "norm", "elementwise")
PLAN = """
root: rows
points: none.json
chunk: {chunk}s
machines:
  nodes: {{gpu: cpu, count: 2, minutes: {minutes}, families: [{families}]}}
"""
ITERCAST = (sys.executable, "-m", "itercast")


def start(folder: Path, core: int | None, *words: object) -> subprocess.Popen[bytes]:
    """An itercast command in the folder, on one core or on all."""
    place = [] if core is None else ["taskset", "-c", str(core)]
    own = {"ITERCAST_CACHE": str(folder / "cache"), "MLFLOW_TRACKING_URI": "sqlite:///runs.db"}
    path = {"PYTHONPATH": os.environ.get("PYTHONPATH") or str(Path(__file__).parents[2])}
    command = [*place, *ITERCAST, *map(str, words)]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | own | path, stdout=log, stderr=log
        )


def ended(*processes: subprocess.Popen[bytes]) -> None:
    """Wait for commands; one that fails ends this one."""
    if any([process.wait() for process in processes]):
        raise SystemExit("a command failed, see the file log")


def sweep(folder: Path, core: int, name: str, points: Mapping[str, Sequence[object]], s: float):
    """A plain sweep of these points on one core, for so many seconds."""
    write_points(folder / f"{name}.json", points)
    words = ["--points", f"{name}.json", "--budget", f"{s:g}s", "--out", name]
    return start(folder, core, "collect", "--device", "cpu", *words)


def rows_of(*roots: Path) -> pd.DataFrame:
    """All rows of the families under the roots."""
    return pd.concat([store.read_rows(list(roots), name) for name in FAMILIES], ignore_index=True)


def rate(*roots: Path) -> float:
    """Rows per minute of measuring: what the rows cost by the clock."""
    rows = rows_of(*roots)
    return len(rows) / (float(rows["cost_s"].sum()) / 60)


def measure(folder: Path, chunk_s: float) -> None:
    """Run the fleet and the plain sweeps, and print rates and times."""
    folder.mkdir(parents=True)
    (folder / "none.json").write_text('{"models": 40}')
    text = PLAN.format(chunk=chunk_s, minutes=chunk_s / 30, families=", ".join(FAMILIES))
    (folder / "plan.yaml").write_text(text)
    ended(start(folder, None, "fleet", "plan.yaml", "--address", "local"))
    gpu = str(rows_of(folder / "rows")["gpu"].iloc[0])
    points = points_of_rows(folder / "rows", gpu)
    halves = [{name: some[n::2] for name, some in points.items()} for n in (0, 1)]
    ended(*(sweep(folder, n, f"half{n}", half, chunk_s) for n, half in enumerate(halves)))
    ended(sweep(folder, 0, "one", points, 2 * chunk_s))
    fleet, one = rate(folder / "rows"), rate(folder / "one")
    pair = rate(folder / "half0", folder / "half1")
    print(f"rows per minute of measuring: one sweep {one:.0f}, two at once {pair:.0f} each,")
    print(f"fleet {fleet:.0f} a node: {fleet / one:.2f} of one, {fleet / pair:.2f} of two at once")
    os.chdir(folder)  # of a relative root
    plan = load_plan(Path("plan.yaml"))
    (cost,) = simulate(plan, deal(plan))
    done: list[Row] = list(results(plan).values())
    real_s = sum(chunk["ended"] - chunk["began"] for chunk in done)
    simulated_s = 3600 * cost.gpu_hours
    told = f"{simulated_s:.0f} s simulated, {real_s:.0f} s measured"
    print(f"time of {len(done)} chunks: {told}, {100 * (simulated_s / real_s - 1):+.0f} %")


def models(folder: Path) -> None:
    """Train on the fleet's rows and on the one sweep's; print their errors on held-out shapes."""
    for name in ("rows", "one"):
        ended(start(folder, None, "train", "--data", name, "--out", f"bundle-{name}"))
    words = [*ITERCAST, "compare", "bundle-one", "bundle-rows", "--json"]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    for one in json.loads(done.stdout):
        single, merged = one["errors_pct"]
        told = f"one sweep {single:.1f} %, fleet {merged:.1f} %, {one['points']} points"
        print(f"{one['family']}: {told}, noise of the difference {one['difference_pct']}")


def main() -> None:
    """Measure, or train on what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chunk", type=seconds, default=30.0, help="time of a chunk")
    parser.add_argument("--models", action="store_true")
    asked = parser.parse_args()
    models(asked.folder) if asked.models else measure(asked.folder, asked.chunk)


if __name__ == "__main__":
    main()
