"""The examples of fleets: plans that load, and files that ask for as many GPUs as their plan."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from itercast.microbench.fleet import demo
from itercast.microbench.fleet.chunks import deal, simulate
from itercast.microbench.fleet.plan import load_plan
from itercast.microbench.yaml_text import load_yaml

FOLDER = Path(__file__).parents[3] / "examples/fleet"
H100 = load_plan(FOLDER / "gpus.yaml").machines[0]


def test_the_plans_load() -> None:
    """32 H100, eight a node; a laptop's two cores."""
    assert (H100.count, H100.gpus_per_node, H100.accelerator) == (32, 8, "H100")
    assert load_plan(FOLDER / "laptop.yaml").machines[0].device == "cpu"


def test_the_demo_fits_its_five_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six chunks of 20 s one after the other, as both machines need cores of the same two."""
    monkeypatch.setattr(demo, "RUN", tmp_path / "run")
    plan = load_plan(demo.write_plan())
    chunks = deal(plan)
    assert sorted(c.machines for c in chunks) == ["one"] * 3 + ["two"] * 3
    assert sum(cost.wall_s for cost in simulate(plan, chunks)) < 180
    assert {c.points == {} for c in chunks} == {True}  # so that no model is captured


def test_the_sbatch_file() -> None:
    """bash reads it; Ray's own command starts the plan on four nodes of eight GPUs."""
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", path.read_text()))
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == H100.count
    ray = pytest.importorskip("ray.scripts.symmetric_run", reason="pip install 'itercast[fleet]'")
    words = re.search(r"symmetric-run (.*?)--\s*itercast fleet gpus.yaml", path.read_text(), re.S)
    assert words is not None
    given = words[1].replace("\\\n", "").replace("$SLURM_JOB_NUM_NODES", "4").replace('"', "")
    assert ray.curate_and_validate_ray_start_args(given.split()) == []


def test_the_manifest_for_kubernetes() -> None:
    job = load_yaml((FOLDER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["entrypoint"] == "itercast fleet /plan/gpus.yaml"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    workers = cluster["workerGroupSpecs"][0]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == H100.gpus_per_node and workers["replicas"] * gpus == H100.count
    assert container["resources"]["limits"]["cpu"] >= H100.cores


def test_the_skypilot_file() -> None:
    task = load_yaml((FOLDER / "skypilot.yaml").read_text())
    kind, _, gpus = task["resources"]["accelerators"].partition(":")
    assert (kind, task["num_nodes"] * int(gpus)) == (H100.accelerator, H100.count)
    subprocess.run(["bash", "-n", "-c", task["run"]], check=True)
    plan = re.search(r"itercast fleet (\S+)", task["run"])
    assert plan is not None and (FOLDER.parents[1] / plan[1]).is_file()
