"""A plan run through a real Ray cluster of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from itercast.microbench import store

pytest.importorskip("ray", reason="pip install 'itercast[fleet]'")
PLAN = """
root: rows
points: captured.json
chunk: 8s
machines:
  one:
    gpu: cpu
    minutes: 0.25
    families: [norm, elementwise]
"""


def fleet(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "itercast", "fleet", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_plan_is_measured_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks: each a part per family at most, no point twice; then none is left."""
    store.write_atomic(tmp_path / "captured.json", b'{"models": 40, "norm": []}')
    store.write_atomic(tmp_path / "plan.yaml", PLAN.encode())
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    done = fleet(tmp_path, "plan.yaml", "--address", "local")
    assert done.returncode == 0, done.stderr
    assert "2 chunks done" in done.stdout
    rows = store.read_rows([tmp_path / "rows"], "elementwise")
    assert len(rows) and rows["key"].is_unique
    card = next((tmp_path / "rows").glob("elementwise/*/itercast/card.yaml")).read_text()
    assert f"ok: {len(rows)}" in card
    again = fleet(tmp_path, "plan.yaml", "--address", "local")
    assert again.returncode == 0 and "0 of 2 chunks are left" in again.stderr
    assert "plan at rows" in fleet(tmp_path, "status", "plan.yaml").stdout
