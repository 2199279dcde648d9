"""Every script in examples/ runs as it stands, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTS = {
    "choose_plan": "plans considered",
    "compare_gpus": "h100-sxm-80gb",
    "forecast_own_model": "samples/s",
    "price_ops": "of the peak",
    "train_and_compare": "xgboost",
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTS)


@pytest.mark.parametrize("name", sorted(PRINTS))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    """In a folder of its own, so that no local bundle is found."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert PRINTS[name] in done.stdout
