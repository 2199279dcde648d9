"""The rows that are trained on: of too many a sample, without ops that failed or torn parts."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from toy_products import timed, write_rows
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.learners.train import hardware_of, train
from itercast.learners.training_rows import BYTES_PER_ROW, usable_rows
from itercast.microbench.ops.matrix import gemm

ROWS = 400


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 products in two parts, 3 times the roofline; every tenth failed."""
    root = tmp_path_factory.mktemp("rows")
    rows = timed(islice(gemm.FAMILY.sweep(), ROWS), lambda p: 3.0, repeat=0)
    rows.loc[::10, "status"] = "oom"
    for n in range(2):
        write_rows(root, rows[200 * n : 200 * n + 200], part=str(n))
    return root


def test_of_rows_that_outgrow_memory_as_many_as_fit_are_drawn(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 360 rows memory holds 50, as many of one op and dtype as of another."""
    rows = usable_rows([root], ["gemm"], 50 * BYTES_PER_ROW)["gemm"]
    assert len(rows) == 50 and (rows["status"] == "ok").all() and rows["m"].nunique() > 5
    assert [r.message for r in caplog.records] == [
        "gemm: of 360 rows memory holds 50, drawn evenly"
    ]
    counts = rows.groupby(["op", "dtype"]).size()
    assert len(counts) > 2 and counts.max() - counts.min() <= 1
    assert train([root], tmp_path, ["gemm"], memory=50 * BYTES_PER_ROW).families["gemm"].rows == 50


def test_means_are_learned_where_rows_have_them(root: Path, tmp_path: Path) -> None:
    """Half of the rows are of a part without means: their medians are learned."""
    rows = timed(islice(gemm.FAMILY.sweep(), 100), lambda p: 3.0, repeat=0)
    write_rows(tmp_path, rows.assign(time_us_mean=1.05 * rows["time_us"]))
    (found,) = usable_rows([tmp_path, root], ["gemm"]).values()
    medians = usable_rows([root], ["gemm"])["gemm"]["time_us"]
    assert found["time_us"][:100].tolist() == (1.05 * rows["time_us"]).tolist()
    assert found["time_us"][100:].tolist() == medians.tolist()


def test_what_fits_is_trained_on_whole(root: Path) -> None:
    """A byte for each row's need is enough; one less and a row is left out."""
    found = [usable_rows([root], ["gemm"], 360 * BYTES_PER_ROW - n)["gemm"] for n in (0, 1)]
    assert list(map(len, found)) == [360, 359]
    pd.testing.assert_frame_equal(found[0], usable_rows([root], ["gemm"])["gemm"])


def test_an_op_that_always_failed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All batched products failed, of others every second: the first are named, with why."""
    rows = timed(islice(gemm.FAMILY.sweep(), 200), lambda p: 3.0, repeat=0)
    batched = rows["op"] == "bmm"
    rows.loc[batched | (rows.index % 2 == 0), "status"] = "error"
    write_rows(tmp_path, rows.assign(reason="no kernel"))
    usable_rows([tmp_path], ["gemm"])
    line = f"gemm: bmm on toy was never measured, all {batched.sum()} points failed: no kernel"
    assert batched.any() and [r.message for r in caplog.records] == [line]


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


def test_a_row_that_is_not_allowed_comes_with_its_file(root: Path, tmp_path: Path) -> None:
    """Of two roots the second has it, in its second part; the first has no batch at all."""
    rows = timed(islice(gemm.FAMILY.sweep(), 40), lambda p: 3.0)
    write_rows(tmp_path, rows.head(20).drop(columns="batch"), part="a")
    bad = write_rows(tmp_path, rows.tail(20).assign(m=-1), part="b")
    words = r"part '.*/part-b.parquet': rows of family gemm: m -1: allowed is greater_than"
    with pytest.raises(ValueError, match=words):
        usable_rows([root, bad], ["gemm"])


def test_rows_of_a_machine_without_a_card_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows of 'xeon-2c': no card.yaml states its hardware"):
        hardware_of([tmp_path], pd.DataFrame({"gpu": ["xeon-2c"]}))
