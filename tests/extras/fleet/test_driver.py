"""A plan run through a real Ray cluster of this machine."""

import json
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import mlflow
import pytest

from itercast.capture.base.files import write_atomic
from itercast.microbench import store

pytest.importorskip("ray", reason="pip install 'itercast[fleet]'")
ROOT = Path(__file__).parents[3]
COMMAND = (sys.executable, "-m", "itercast", "fleet")
PLAN = """
root: rows
points: captured.json
chunk: 39s
machines:
  one:
    gpu: cpu
    count: 2
    minutes: 1.3
    families: [norm, elementwise]
    python: {folder}/venv/bin/python
"""


def make_venv(folder: Path) -> None:
    """A virtual environment with this one's packages; file ``used`` names its processes."""
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv/lib").glob("*/site-packages")
    noted = (
        f"import sys; open({str(folder / 'used')!r}, 'a').write(' '.join(sys.orig_argv) + '\\n')"
    )
    (site / "this.pth").write_text(f"{sysconfig.get_path('purelib')}\n{noted}\n")


def fleet(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def killed(folder: Path) -> set[str]:
    """Start the plan and kill the command when rows are on disk; returns their keys."""
    words, keys = [*COMMAND, "plan.yaml", "--address", "local"], set[str]()
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL) as command:
        end = time.monotonic() + 100
        while not keys and time.monotonic() < end:
            time.sleep(0.2)
            journals = list((folder / "cache/fleet/chunks").glob("*/.journal/*.jsonl"))
            keys = {row["key"] for path in journals for row in store.read_journal(path)}
        command.kill()
    return keys


@pytest.mark.slow
def test_a_plan_that_was_killed_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks: rows of before the kill are kept, no point is there twice; then none is left.

    They are measured by the software of a virtual environment that the plan names. Chunks take so
    long that none ends before the kill: first rows come after 12 s, after 20 on a slow machine.
    """
    make_venv(tmp_path)
    write_atomic(tmp_path / "captured.json", b'{"models": 40, "norm": []}')
    write_atomic(tmp_path / "plan.yaml", PLAN.format(folder=tmp_path).encode())
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    seen = killed(tmp_path)
    done = fleet(tmp_path, "plan.yaml", "--address", "local")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(1 chunk|2 chunks) done", done.stdout)
    used = (tmp_path / "used").read_text()
    assert "itercast.extras.fleet.chunk" in used and "itercast.microbench.sweep.worker" in used
    both = [store.read_rows([tmp_path / "rows"], name) for name in ("norm", "elementwise")]
    keys, rows = [key for one in both for key in one["key"]], both[1]
    assert seen and seen <= set(keys) and len(keys) == len(set(keys))
    card = next((tmp_path / "rows").glob("elementwise/*/itercast/card.yaml")).read_text()
    assert f"ok: {len(rows)}" in card
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs(["1"])
    assert {r.info.status for r in runs} == {"FINISHED", "KILLED"}  # the first command's: killed
    (parent,) = [r for r in runs if r.info.run_name == "plan" and r.info.status == "FINISHED"]
    monkeypatch.chdir(tmp_path)  # places of artifacts are relative to the store
    told = mlflow.artifacts.load_dict(f"{parent.info.artifact_uri}/chunks.json")["chunks"]
    ended = [json.loads(path.read_text()) for path in (tmp_path / "rows/.fleet").glob("*.json")]
    assert told and sum(one["rows"] for one in ended) == len(keys)
    assert {one["chunk"] for one in told} <= {one["chunk"] for one in ended}
    again = fleet(tmp_path, "plan.yaml", "--address", "local")
    assert again.returncode == 0 and "0 of 2 chunks left" in again.stderr
    assert f"rows are at {tmp_path}/rows" in fleet(tmp_path, "status", "plan.yaml").stdout
