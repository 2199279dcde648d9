"""Kill a sweep at random moments and look at what is left: `make endurance`.

After every kill each visible part file must be readable, no finished point may be lost and none may
be there twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from rich.progress import track

from itercast.microbench import store

SWEEP = (
    "import sys; from pathlib import Path; from itercast.microbench.sweep.collect import collect; "
    "collect(Path(sys.argv[1]), 'cpu', ['gemm', 'elementwise', 'norm'], 3600.0)"
)


def keys_on_disk(root: Path) -> list[str]:
    """Keys of all rows: part files first, then journals whose part is not there yet."""
    parts = list(root.glob("*/*/*/part-*.parquet"))
    keys = [key for path in parts for key in pd.read_parquet(path, columns=["key"])["key"]]
    compacted = {path.stem.removeprefix("part-") for path in parts}
    for path in (root / ".journal").glob("*.jsonl"):
        if path.stem not in compacted:  # a compaction killed half-way is repeated as a whole
            keys += [row["key"] for row in store.read_journal(path)]
    return keys


def kill_once(root: Path, after_s: float) -> None:
    """Start or resume the sweep and kill it, workers and all."""
    process = subprocess.Popen([sys.executable, "-c", SWEEP, str(root)], start_new_session=True)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> None:
    """Print what was found after each kill, summed up; exit code 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    kills = parser.parse_args().kills
    moments = random.Random(0)
    lost = twice = 0
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kill_once(root, 60.0)  # long enough to capture the points and to begin
        for _ in track(range(kills), description="kills"):
            kill_once(root, moments.uniform(2.0, 9.0))
            keys = keys_on_disk(root)
            lost += len(seen - set(keys))
            twice += len(keys) - len(set(keys))
            seen |= set(keys)
        torn = len(list(root.glob("*/*/*/part-*.tmp")))
    print(f"{kills} kills: {len(seen)} rows, {lost} lost, {twice} twice, {torn} torn files visible")
    if lost or twice or torn or not seen:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
