"""Two unlike machines on this one, measured as a fleet: ``make fleet-demo``.

Two Ray nodes, of one core and of two, measure their chunks; one is killed on the way and comes
back. Then op models are trained on the rows of each and of both, and compared; all is in MLflow.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from itercast.extras.fleet.driver import with_ray

RUN = Path("runs/fleet-demo").absolute()
CORES = {"one": 1, "two": 2}
FAMILIES = "[gemm, norm, elementwise]"
PLAN = f"""
root: {RUN}/rows
points: points.json
chunk: 20s
deadline: 8m
machines:
  one: {{gpu: cpu, cores: 1, minutes: 1, families: {FAMILIES}, resources: {{one: 1}}}}
  two: {{gpu: cpu, cores: 2, minutes: 1, families: {FAMILIES}, resources: {{two: 1}}}}
"""


def itercast(*words: object) -> None:
    """Run an itercast command to its end."""
    print("itercast", *words, flush=True)
    subprocess.run([sys.executable, "-m", "itercast", *map(str, words)], check=True)


def write_plan() -> Path:
    """Write the plan and its captured points: none, so that no model is captured."""
    RUN.mkdir(parents=True)
    (RUN / "points.json").write_text('{"models": 40}')
    plan = RUN / "plan.yaml"
    plan.write_text(PLAN)
    return plan


def measure(plan: Path) -> None:
    """Run the plan on a cluster of two nodes, of which one is killed while it measures."""
    with_ray()
    from ray.cluster_utils import Cluster

    def node(name: str) -> Any:
        own = {"ITERCAST_CACHE": str(RUN / name), "RAY_worker_niceness": "0"}
        return cluster.add_node(num_cpus=CORES[name], resources={name: 1}, env_vars=own)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        node("one")
        two = node("two")
        words = ["fleet", str(plan), "--address", cluster.address]
        with subprocess.Popen([sys.executable, "-m", "itercast", *words]) as fleet:
            while fleet.poll() is None and not list((RUN / "two").glob("*/*/*/.journal/*.jsonl")):
                time.sleep(0.5)
            print("the machine of two cores is killed; it comes back", flush=True)
            cluster.remove_node(two, allow_graceful=False)
            node("two")
        if fleet.returncode:
            raise SystemExit(fleet.returncode)
    finally:
        cluster.shutdown()


def main() -> None:
    """Measure, train on each machine's rows and on all, and compare."""
    shutil.rmtree(RUN, ignore_errors=True)
    os.environ.setdefault("ITERCAST_CACHE", str(RUN / "cache"))
    plan = write_plan()
    measure(plan)
    itercast("fleet", "status", plan)
    for name, cores in CORES.items():  # hardware of a CPU is named after its cores
        for folder in (RUN / "rows").glob(f"*/*-{cores}c"):
            shutil.copytree(folder, RUN / "apart" / name / folder.relative_to(RUN / "rows"))
        itercast("train", "--data", RUN / "apart" / name, "--out", RUN / f"bundle-{name}")
    itercast("train", "--data", RUN / "rows", "--out", RUN / "bundle-both")
    for name in CORES:
        itercast("compare", RUN / f"bundle-{name}", RUN / "bundle-both")


if __name__ == "__main__":
    main()
