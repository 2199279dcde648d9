"""Odd command lines: one clear line and exit code 2, or a right answer; nothing is left behind."""

import json
import os
import re
import shlex
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from plan_case import GPU as toy
from typed_commands import typed
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.learners.bundle import SHIPPED_CPU, Bundle

ROOT = Path(__file__).parents[2]
LISTED: Any = yaml.safe_load(Path(__file__).with_name("odd_inputs.yaml").read_text())
PROGRESS = re.compile(r" \(\d+ s\)$")  # how far it is, where work takes seconds
GPU = ROOT / "microbench/hardware/a10.yaml"
PRODUCT = {
    **{"family": "gemm", "gpu": "a10", "op": "mm", "dtype": "bf16", "layout": "nn"},
    **{"m": 64.0, "n": 64.0, "k": 64.0, "batch": 1, "time_us": 9.0, "status": "ok"},
    **{"stack": "torch-2.11.0+cu130", "timer": "device"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the command lines name."""
    made = tmp_path_factory.mktemp("odd")
    for name, values in LISTED["files"].items():
        (made / name).write_text(json.dumps(values))
    for name, text in LISTED["texts"].items():
        (made / name).write_text(text)
    for name, change in LISTED["gpus"].items():
        (made / name).write_text(yaml.safe_dump({**yaml.safe_load(GPU.read_text()), **change}))
    (made / "locked").write_text("a file, where a folder is needed")
    (made / "binary.py").write_bytes(bytes(9))
    (made / "data").mkdir()
    (made / "dir.py").mkdir()
    _write_rows(made)
    _write_bundles(made)
    return made


def _write_rows(made: Path) -> None:
    """A row of a product, changed rows, and datasets that no training can read."""
    rows = pd.DataFrame([PRODUCT])
    rows.to_parquet(made / "rows.parquet")
    rows.head(0).to_parquet(made / "norows.parquet")
    rows.assign(m=np.nan).to_parquet(made / "nan.parquet")
    rows.assign(gpu="h900").to_parquet(made / "unknown.parquet")
    rows.assign(family="gem").to_parquet(made / "family.parquet")
    (made / "unnamed/gemm/a10/mine").mkdir(parents=True)
    rows.to_parquet(made / "unnamed/gemm/a10/mine/mine.parquet")
    source = min(ROOT.glob("datasets/reduction/*/itercast/part-*.parquet"))
    part = made / "nandata" / source.relative_to(ROOT / "datasets")
    part.parent.mkdir(parents=True)
    some = pd.read_parquet(source).head(60).reset_index(drop=True)
    some.loc[3:5, "time_us"] = np.nan
    some.to_parquet(part)


def _write_bundles(made: Path) -> None:
    """One that ships, without one of its files, with a file that was cut; one without families."""
    Bundle(models={}, gpus={toy.name: toy}).save(made / "bundle")
    (made / "shipped").symlink_to(SHIPPED_CPU)
    for name in ("missing", "spoiled"):
        shutil.copytree(SHIPPED_CPU, made / name)
    (made / "missing/gemm.ubj.gz").unlink()
    spoiled = made / "spoiled/gemm.ubj.gz"
    spoiled.write_bytes(spoiled.read_bytes()[:-5])


def test_there_are_enough() -> None:
    assert len(LISTED["refused"]) + len(LISTED["answered"]) >= 200


@pytest.mark.parametrize(("command", "words"), LISTED["refused"])
def test_it_is_refused_in_one_line(
    command: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = {p for p in folder.rglob("*") if "__pycache__" not in p.parts}
    done = typed(*shlex.split(command), rc=2)
    told = [line for line in done.stderr.splitlines() if not PROGRESS.search(line)]
    assert len(told) == 1 and words in told[0] and not done.stdout
    assert {p for p in folder.rglob("*") if "__pycache__" not in p.parts} == before


@pytest.mark.parametrize("command", LISTED["answered"])
def test_it_is_answered(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = typed(*shlex.split(command))
    assert "iteration" in done.stdout


def test_a_model_without_its_images_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its capture comes from the cache."""
    monkeypatch.chdir(folder)
    words = shlex.split("predict --hf-config vlm.json --batch 2 --seq 8 --json")
    for _ in range(2):
        found = json.loads(CliRunner().invoke(app, words).stdout)
        assert any("without images, on tokens alone" in note for note in found["notes"])


def test_a_timeline_goes_to_whoever_reads_a_fifo(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays a FIFO, as a device stays one."""
    monkeypatch.chdir(folder)
    fifo, read = tmp_path / "fifo", list[bytes]()
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()), daemon=True)
    reader.start()
    command = f"predict gpt-s --gpu toy-gpu --bundle bundle --trace {fifo}"
    typed(*shlex.split(command))
    reader.join(60)
    assert json.loads(read[0])["traceEvents"] and fifo.is_fifo()
