"""Measures every split of a batch over ranks of 1 and of 2 threads, and judges the one forecast.

Run as ``python tests/endurance/unlike_gpus.py [CASE,CASE... [BUNDLE]]`` on two cores (about 5
minutes): over gloo, eight parts of a batch, all splits in turn. It prints how much slower the
chosen split is than the fastest one that was measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from itercast.compose.clusters.search import predict_on_cluster
from itercast.microbench.cases.registry import case
from itercast.microbench.processes.ranks import start_ranks

CASES = "gpt-s,gpt-m,llama-s,llama-m,bert-s,bert-m,mlp-m,mlp-l,vit-s,resnet-s"
CLUSTER = """groups:
  one: {gpu: cpu, count: 1, threads: 1}
  two: {gpu: cpu, count: 1, threads: 2}
"""
PARTS = 8


def measured_us(name: str, part: int, folder: Path) -> list[float]:
    """Median time of a step by number of parts on the rank of one thread: 1, 2... 7."""
    out, seq = folder / f"{name}.json", case(name).seq
    steps = [
        [
            {"threads": 1, "rows": a * part, "seq": seq},
            {"threads": 2, "rows": (PARTS - a) * part, "seq": seq},
        ]
        for a in range(1, PARTS)
    ]
    rounds = 15 if name.endswith(("-m", "-l")) else 61
    order = {"case": name, "steps": steps, "rounds": rounds, "out": str(out)}
    if start_ranks("itercast.microbench.iterations.unlike_ranks", order, 2).wait():
        raise RuntimeError(f"{name}: the ranks failed")
    return [statistics.median(times) for times in json.loads(out.read_text())]


def main(names: str = CASES, bundle: str = "") -> None:
    """Measure and judge each case."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "cluster.yaml"
        file.write_text(CLUSTER)
        for name in names.split(","):
            part = 16 if name.startswith("mlp") else 1
            trained = Path(bundle) if bundle else None
            batch = PARTS * part // 2
            found = predict_on_cluster(name, file, "dp=2", batch=batch, bundle=trained)
            chosen = found.cluster["groups"][0]["rows"] / part
            times = measured_us(name, part, Path(scratch))
            at = min(PARTS - 1, max(1, round(chosen)))
            over = times[at - 1] / min(times) - 1
            told = " ".join(f"{us / 1e3:.1f}" for us in times)
            print(
                f"{name}: chosen {chosen:g} of {PARTS}, {100 * over:.1f} % over the best of {told}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
