"""Train on millions of rows within a stated memory: its peak, the time, errors on held-out shapes.

    python tests/endurance/many_rows.py IMPORTED --rows 20000000 --memory 4GiB --family elementwise

IMPORTED is a dataset root that `itercast import` wrote. Its rows are repeated, each time with 3 %
of noise on the measured time, until there are as many as asked for; so there are no more shapes
than were measured, and errors say nothing about new ones. With `--memory all` the rows are in
memory; `itercast compare` then compares the bundles of two `--out` on the same held-out points, as
the errors that are printed are those of the sample in memory, which is even over GPUs and dtypes.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

from itercast.learners.beyond_memory import memory_bytes
from itercast.learners.held_out import save_held_out
from itercast.learners.models import trees
from itercast.learners.train import train
from itercast.microbench.store import row_count, write_part

NOISE = 0.03  # standard deviation of log time


def repeat(source: Path, family: str, wanted: int, out: Path) -> None:
    """Write the family's rows under ``source`` again and again, with noise, up to ``wanted``."""
    rng, left = np.random.default_rng(0), wanted
    parts = sorted(source.glob(f"{family}/*/*/part-*.parquet"))
    for copy in range(math.ceil(wanted / row_count([source], family))):
        for n, path in enumerate(parts):
            rows = pd.read_parquet(path).head(left)
            if len(rows):
                noisy = rows["time_us"] * rng.lognormal(0.0, NOISE, len(rows))
                gpu = path.parts[-3]
                write_part(out, family, gpu, rows.assign(time_us=noisy), f"{copy}-{n}", "repeated")
            left -= len(rows)


def peak_bytes() -> int:
    """Most memory that this process had (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def main() -> None:
    """Repeat rows, train on them, print figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("imported", type=Path)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--memory", default="4GiB", help="a size, or all")
    parser.add_argument("--family", default="gemm")
    parser.add_argument("--rounds", type=int, default=trees.OWN_ROUNDS, help="of a GPU, at most")
    parser.add_argument("--out", type=Path, help="keep the bundle, for itercast compare")
    asked = parser.parse_args()
    trees.OWN_ROUNDS = asked.rounds
    folder = Path(tempfile.mkdtemp(prefix="many-rows-"))
    try:
        repeat(asked.imported, asked.family, asked.rows, folder / "rows")
        memory = None if asked.memory == "all" else memory_bytes(asked.memory)
        begin = time.monotonic()
        out = asked.out or folder / "bundle"
        report = train([folder / "rows"], out, [asked.family], memory=memory)
        save_held_out(out, report.held_out())
        found = report.families[asked.family]
        taken_s, blend = time.monotonic() - begin, found.learners["blend"]
        print(
            f"{found.rows:,} rows, {found.in_memory:,} of them in memory: peak "
            f"{peak_bytes() / 2**30:.2f} GiB, {taken_s:.0f} s; held-out shapes: median "
            f"{blend['median_ape_pct']:.2f} %, mean {blend['mape_pct']:.2f} %"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
