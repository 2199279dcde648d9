"""`itercast calibrate --host`: a few measured rows make a host file that `predict` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.microbench.hardware.host import load_host

run = CliRunner()
MODEL = ("gpt-s", "--gpu", "h100-sxm-80gb", "--dtype", "bf16", "--batch", "1")


def predicted(host: str) -> dict[str, Any]:
    done = run.invoke(app, ["predict", *MODEL, "--host", host, "--json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """An iteration as slow as on the host of DGX A100."""
    facts = {"family": "iteration", "status": "ok", "case": "gpt-s", "batch": 1, "seq": 64}
    how = {"gpu": "h100-sxm-80gb", "optimizer": "adamw", "dtype": "bf16"}
    time_us = predicted("dgx-a100")["iteration_us"]
    path = tmp_path / "rows.parquet"
    pd.DataFrame([{**facts, **how, "time_us": time_us}]).to_parquet(path)
    return path


def test_the_host_of_measured_iterations_is_written_and_used(tmp_path: Path, rows: Path) -> None:
    mine = tmp_path / "mine.yaml"
    done = run.invoke(app, ["calibrate", str(rows), "--host", str(mine)], catch_exceptions=False)
    assert done.exit_code == 0
    assert load_host(str(mine)).slowdown == pytest.approx(load_host("dgx-a100").slowdown, rel=0.05)
    found, usual = predicted(str(mine)), predicted("usual")
    assert found["host"] == "mine"
    assert usual["host"] == "usual"
    assert found["iteration_us"] == pytest.approx(predicted("dgx-a100")["iteration_us"], rel=0.05)
    assert found["iteration_us"] > usual["iteration_us"]
    assert found["assumed_frac"] < usual["assumed_frac"]  # a named host is known


def test_what_cannot_be_a_host_is_one_line(tmp_path: Path, rows: Path) -> None:
    products = tmp_path / "products.parquet"
    pd.DataFrame([{"family": "gemm", "gpu": "a10", "op": "mm", "time_us": 9.0}]).to_parquet(
        products
    )
    host = str(tmp_path / "mine.yaml")
    for words, message in (
        ([str(rows)], "writes a bundle (--out), a host file (--host), or both"),
        ([str(rows), "--host", str(tmp_path / "usual.yaml")], "allowed is NAME.yaml"),
        ([str(products), "--host", host], "from rows of family host or iteration"),
    ):
        done = run.invoke(app, ["calibrate", *words])
        assert done.exit_code == 2
        assert message in done.output
