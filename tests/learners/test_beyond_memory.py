"""Families with more rows than memory holds: a sample, splits by shape, trees of all rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy_products import TOY, timed, write_rows
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.learners import beyond_memory
from itercast.learners.beyond_memory import (
    BYTES_PER_ROW,
    scratch_folder,
    usable_rows,
)
from itercast.learners.bundle import Bundle
from itercast.learners.family_model import Beyond, prepare
from itercast.learners.features.machine_speed import Speed
from itercast.learners.features.table import shape_places
from itercast.learners.models.training_table import frozen_split
from itercast.learners.train import TEST_SHARE, train
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.store import row_batches

ROWS = 400
MEMORY = 200 * BYTES_PER_ROW  # of which a quarter holds 50 rows


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 products in two parts, 3 times the roofline; every tenth failed."""
    root = tmp_path_factory.mktemp("rows")
    rows = timed(islice(gemm.sweep(), ROWS), lambda p: 3.0, repeat=0)
    rows.loc[::10, "status"] = "oom"
    for n in range(2):
        write_rows(root, rows[200 * n : 200 * n + 200], part=str(n))
    return root


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Batches of 64 rows: four of each part."""
    monkeypatch.setattr(row_batches, "__defaults__", (64,))
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))


def all_rows(root: Path, folder: Path) -> tuple[Beyond, pd.DataFrame, np.ndarray]:
    """The encoded rows, the sample in memory, and the places of its known rows."""
    sample = usable_rows([root], ["gemm"], MEMORY)["gemm"]
    places = shape_places(sample, gemm.FAMILY)
    known, _ = frozen_split(places, TEST_SHARE, sample["op"].to_numpy().astype(str))
    prepared = prepare(sample, gemm.FAMILY, {"toy": TOY})
    every = beyond_memory.AllRows(
        roots=[root], family=gemm.FAMILY, anchors={}, memory=MEMORY, folder=folder
    )
    speed = Speed(anchors={}, sensitivity=(0.0, 0.0))
    return every.encoded(prepared, speed, TEST_SHARE, places[known]), sample, places[known]


def test_held_out_shapes_are_those_of_all_rows_in_memory(root: Path, tmp_path: Path) -> None:
    """The same 360 rows and the same split, though memory holds 50; failed rows are left out."""
    beyond, sample, _ = all_rows(root, tmp_path)
    assert len(sample) == 50
    rows = usable_rows([root], ["gemm"])["gemm"]
    known, held = frozen_split(
        shape_places(rows, gemm.FAMILY), TEST_SHARE, rows["op"].to_numpy().astype(str)
    )
    assert (beyond.known.count, beyond.every.count) == (len(known), len(rows)) == (len(known), 360)
    assert len(held) > 10
    whole = prepare(rows, gemm.FAMILY, {"toy": TOY})
    assert beyond.envelope == whole.envelope
    for pieces, wanted in ((beyond.known, known), (beyond.every, np.arange(360))):
        ratio = np.concatenate([load()[1] for load in pieces.batches()])
        mine = whole.table.log_ratio[wanted].astype(np.float32)
        np.testing.assert_allclose(np.sort(ratio), np.sort(mine), atol=1e-6)


def test_trees_of_all_rows_price_what_the_sample_never_saw(root: Path, tmp_path: Path) -> None:
    """Rows of the report are all; in memory was an eighth. All ops and shapes are in the range."""
    report = train([root], tmp_path / "bundle", ["gemm"], memory=MEMORY).families["gemm"]
    assert (report.rows, report.in_memory) == (360, 50)
    rows = usable_rows([root], ["gemm"])["gemm"]
    assert Bundle.load(tmp_path / "bundle").price("gemm", rows)["in_envelope"].all()
    assert not list((tmp_path / "cache" / "training").iterdir())


def test_what_fits_is_trained_in_memory_as_ever(root: Path, tmp_path: Path) -> None:
    """A byte for each row's need is enough; one less and the rows come from disk."""
    found = [
        train([root], tmp_path / str(memory), ["gemm"], memory=memory).families["gemm"].in_memory
        for memory in (ROWS * BYTES_PER_ROW, ROWS * BYTES_PER_ROW - 1)
    ]
    assert found == [360, 99]  # a quarter of the memory, for 99.99 rows
    train([root], tmp_path / "all", ["gemm"])
    bundles = [tmp_path / name for name in (str(ROWS * BYTES_PER_ROW), "all")]
    assert len({json.dumps(json.loads((b / "bundle.json").read_text())) for b in bundles}) == 1


def test_an_op_that_always_failed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All batched products failed, of others every second: the first are named, with why."""
    rows = timed(islice(gemm.sweep(), 200), lambda p: 3.0, repeat=0)
    batched = rows["op"] == "bmm"
    rows.loc[batched | (rows.index % 2 == 0), "status"] = "error"
    write_rows(tmp_path, rows.assign(reason="no kernel"))
    usable_rows([tmp_path], ["gemm"])
    line = f"gemm: bmm on toy was never measured, all {batched.sum()} points failed: no kernel"
    assert batched.any() and [r.message for r in caplog.records] == [line]


def test_folders_of_killed_trainings_are_removed(tmp_path: Path) -> None:
    """One without a living owner goes; one whose training goes on stays."""
    killed = tmp_path / "cache" / "training" / "killed"
    killed.mkdir(parents=True)
    (killed / "lock").touch()
    with scratch_folder() as first, scratch_folder() as second:
        assert first.is_dir() and second.is_dir()
        assert not killed.exists()


def torn(root: Path, copy: Path) -> Iterator[Path]:
    """Copies of a root: cut off in the middle, without its footer, no Parquet at all."""
    part = next(root.glob("gemm/toy/*/part-0.parquet"))
    data = part.read_bytes()
    for n, bad in enumerate((data[: len(data) // 2], data[:-8], b"PAR1", b"", b"\0" * 100)):
        path = copy / str(n) / part.relative_to(root)
        path.parent.mkdir(parents=True)
        path.write_bytes(bad)
        yield copy / str(n)
    inside = bytearray(data)
    inside[40:240] = bytes(200)  # a page of values, with a whole footer
    path = copy / "inside" / part.relative_to(root)
    path.parent.mkdir(parents=True)
    path.write_bytes(inside)
    yield copy / "inside"


def test_a_torn_part_is_one_line(root: Path, tmp_path: Path) -> None:
    """Its name and what is wrong; exit code 2, and no bundle."""
    for bad in torn(root, tmp_path / "bad"):
        out = tmp_path / "bundle"
        said = CliRunner().invoke(
            app, ["train", "--data", str(root), "--data", str(bad), "--out", str(out)]
        )
        assert said.exit_code == 2, said.output
        *_, line = said.output.strip().splitlines()
        assert line.startswith("itercast: part ") and "' is damaged or no Parquet: " in line
        assert not out.exists()
    with pytest.raises(ValueError, match="is damaged or no Parquet"):
        list(row_batches([bad], "gemm"))
