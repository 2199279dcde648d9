"""Plans of a fleet: what is refused with nothing started, how points are dealt; examples."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from typed_commands import typed

from itercast.capture.base.files import write_atomic
from itercast.capture.base.yaml_text import load_yaml
from itercast.extras.fleet.chunks import HOST, START_S, TOGETHER, deal, simulate
from itercast.extras.fleet.driver import task_options
from itercast.extras.fleet.plan import load_plan

PLAN = """
root: {folder}/rows
points: captured.json
prices: prices.yaml
chunk: 6s
machines:
  h100:
    gpu: h100-sxm-80gb
    count: 4
    minutes: 1
    families: [gemm, norm, host, collective]
    gpus_per_node: 2
    cores: 16
    accelerator: H100
  boxes:
    gpu: cpu
    minutes: 0.2
    cores: 2
    families: [norm]
    resources: {{box: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_atomic(tmp_path / "captured.json", b'{"models": 40, "norm": []}')
    write_atomic(tmp_path / "prices.yaml", b"h100-sxm-80gb: 3.6\ncpu: 0.1\n")
    write_atomic(tmp_path / "plan.yaml", PLAN.format(folder=tmp_path).encode())
    return tmp_path


def test_chunks_are_the_same_each_time(folder: Path) -> None:
    """60 s: 5 % of them host times, 10 % collectives, the rest in chunks of about 6 s."""
    norms = [{"op": "rms_norm", "rows": 8, "cols": n} for n in range(20)]
    points = json.dumps({"models": 40, "norm": norms}).encode()
    write_atomic(folder / "captured.json", points)
    plan = load_plan(folder / "plan.yaml")
    chunks = deal(plan)
    assert [c.name for c in chunks] == [c.name for c in deal(plan)]
    assert len({c.name for c in chunks}) == len(chunks)
    h100 = [c for c in chunks if c.machines == "h100"]
    seconds = {kind: sum(c.seconds for c in h100 if c.kind == kind) for kind in ("host", "ops")}
    assert sum(c.seconds for c in h100) == pytest.approx(60)
    assert seconds["host"] == pytest.approx(3) and seconds["ops"] == pytest.approx(51)
    ops = [c for c in h100 if c.kind == "ops"]
    captured = [p["cols"] for c in ops for p in c.points.get("norm", ())]
    assert sorted(captured) == list(range(20))  # a GPU's chunk has its part of them
    assert {c.share for c in h100} == {(0, 1)} and len({c.seed for c in ops}) == len(ops) == 8
    boxes = [c for c in chunks if c.machines == "boxes"]
    assert [(c.seconds, c.share, c.seed) for c in boxes] == [(6, (0, 2), 0), (6, (1, 2), 0)]
    assert all(len(c.points["norm"]) == 20 for c in boxes)  # all, of which its share measures half


def test_what_a_chunk_takes_of_a_node(folder: Path) -> None:
    plan = load_plan(folder / "plan.yaml")
    h100, boxes = plan.machines
    by_kind = {c.kind: task_options(h100, c) for c in deal(plan) if c.machines == "h100"}
    assert {k: (o["num_gpus"], o["num_cpus"]) for k, o in by_kind.items()} == {
        "ops": (1, 1),
        HOST: (1, 16),  # alone on the cores of its node
        TOGETHER: (2, 1),
    }
    assert by_kind["ops"]["accelerator_type"] == "H100"
    box = next(c for c in deal(plan) if c.machines == "boxes")
    assert task_options(boxes, box) == {
        "num_cpus": 2,
        "num_gpus": 0,
        "resources": {"box": 1.0},
        "max_retries": 0,
    }


def test_the_simulated_cost_by_hand(folder: Path) -> None:
    """Two chunks of 6 s one after the other: 14 s with their starts, 0.0039 h at 0.1 an hour."""
    plan = load_plan(folder / "plan.yaml")
    boxes = simulate(plan, deal(plan))[1]
    assert boxes.wall_s == pytest.approx(12 + 2 * START_S)
    assert boxes.gpu_hours == pytest.approx(boxes.wall_s / 3600)
    assert boxes.price == pytest.approx(0.1 * boxes.gpu_hours)
    done = typed("fleet", str(folder / "plan.yaml"), "--dry-run")
    assert "nothing was started" in done.output
    assert not (folder / "rows").exists()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("gpu: h100-sxm-80gb -> gpu: h900", "unknown gpu 'h900'"),
        ("minutes: 1 -> minutes: 0", "minutes 0; allowed are more than 0"),
        ("minutes: 1 -> minutes: .nan", "minutes is a number of at least 0, got nan"),
        ("minutes: 1 -> minutes: ten", "minutes is a number of at least 0, got 'ten'"),
        ("count: 4 -> count: 0", "count 0; allowed are 1 to"),
        ("count: 4 -> gpus: 4", "unknown keys ['gpus']"),
        ("chunk: 6s -> shell: rm", "unknown keys ['shell']"),
        ("chunk: 6s -> chunk: soon", "'soon': expected a duration"),
        (
            "gpu: cpu -> gpu: !!python/object/apply:os.system [id]",
            "could not determine a construct",
        ),
        ("families: [norm] -> families: [norms]", "unknown family 'norms'"),
        ("families: [norm] -> iterations: [gpt9]", "unknown case 'gpt9'"),
        ("points: captured.json -> points: gone.json", "'gone.json': no such file"),
        ("root: {folder}/rows -> root: ftp://x/y", "allowed are paths and file, s3"),
        ("root: {folder}/rows -> root: s3://key:secret@x/y", "credentials belong to the env"),
        ("root: {folder}/rows -> root: /proc/none", "cannot be written"),
    ],
)
def test_a_wrong_plan_is_one_line(folder: Path, wrong: str, told: str) -> None:
    """Exit code 2, and nothing was started: no rows, no MLflow, no secret printed."""
    old, new = wrong.split(" -> ")
    assert old in PLAN
    text = PLAN.replace(old, new).format(folder=folder)
    write_atomic(folder / "plan.yaml", text.encode())
    done = typed("fleet", str(folder / "plan.yaml"), rc=2)
    assert told in done.output and len(done.output.strip().splitlines()) == 1
    assert "secret" not in done.output and not (folder / "rows").exists()


def test_folders_are_no_plans_and_lead_somewhere(folder: Path) -> None:
    (folder / "rows").symlink_to(folder / "rows")
    for plan, told in ((folder / "plan.yaml", "rows"), (folder, "a folder; a plan is a YAML file")):
        done = typed("fleet", str(plan), rc=2)
        assert told in done.output
        assert len(done.output.strip().splitlines()) == 1


def test_the_cost_of_32_gpus_needs_no_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 hours of measuring: a million points would take minutes."""
    text = PLAN.format(folder=folder).replace("minutes: 1\n", "minutes: 960\n")
    write_atomic(folder / "plan.yaml", text.replace("points: captured.json", "").encode())
    monkeypatch.setenv("ITERCAST_CACHE", str(folder / "cache"))
    typed("fleet", str(folder / "plan.yaml"), "--dry-run")
    assert not (folder / "cache").exists()


def test_without_ray_one_line_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    done = typed("fleet", str(folder / "plan.yaml"), rc=2)
    assert done.output.strip() == "itercast: this needs Ray: pip install 'itercast[fleet]'"


FOLDER = Path(__file__).parents[3] / "examples/fleet"
H100 = load_plan(FOLDER / "gpus.yaml").machines[0]


def test_files_of_clusters_ask_for_the_gpus_of_their_plan() -> None:
    """32 H100, eight a node: Slurm with Ray's own command, a job of KubeRay, a task of SkyPilot."""
    assert (H100.count, H100.gpus_per_node, H100.accelerator) == (32, 8, "H100")
    assert load_plan(FOLDER / "laptop.yaml").machines[0].device == "cpu"
    sbatch = (FOLDER / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"#SBATCH --([\w-]+)=(\S+)", sbatch))
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == H100.count
    job = load_yaml((FOLDER / "kuberay.yaml").read_text())["spec"]
    workers = job["rayClusterSpec"]["workerGroupSpecs"][0]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == H100.gpus_per_node and workers["replicas"] * gpus == H100.count
    assert container["resources"]["limits"]["cpu"] >= H100.cores
    task = load_yaml((FOLDER / "skypilot.yaml").read_text())
    kind, _, gpus = task["resources"]["accelerators"].partition(":")
    assert (kind, task["num_nodes"] * int(gpus)) == (H100.accelerator, H100.count)
    for script in (sbatch, task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert all("itercast fleet" in text for text in (sbatch, job["entrypoint"], task["run"]))
    ray = pytest.importorskip("ray.scripts.symmetric_run", reason="pip install 'itercast[fleet]'")
    words = re.search(r"symmetric-run (.*?)--\s*itercast fleet gpus.yaml", sbatch, re.S)
    assert words is not None
    given = words[1].replace("\\\n", "").replace("$SLURM_JOB_NUM_NODES", "4").replace('"', "")
    assert ray.curate_and_validate_ray_start_args(given.split()) == []
