"""Learning from rows that follow a known law, and bundles that come back as they went."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from toy_products import timed, write_rows

from itercast.extras.pages.op_sections import software_sections
from itercast.extras.priced.forecasts import write_forecasts
from itercast.learners.bundle import SAME_ON_CPUS, SCHEMA_VERSION, Bundle
from itercast.learners.features.table import shape_groups
from itercast.learners.score_file import read_file
from itercast.learners.train import train
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.matrix import gemm
from itercast.microbench.ops.step import host


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three times the roofline, more for ragged k and few rows; 3 % noise, every tenth twice."""
    rng = np.random.default_rng(0)

    def law(p: gemm.Gemm) -> float:
        return 3 * (1.5 if p.k % 16 else 1) * (1 + 8 / p.m**0.5) * rng.lognormal(0, 0.03)

    swept = enumerate(islice(gemm.FAMILY.sweep(), 600))
    taken = [(p, repeat) for i, p in swept for repeat in range(2 if i % 10 == 0 else 1)]
    rows = timed([p for p, _ in taken], law, repeat=[repeat for _, repeat in taken])
    return write_rows(tmp_path_factory.mktemp("data"), rows)


@pytest.fixture(scope="module")
def bundle(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "b"
    report = train([data], folder).families["gemm"]
    scores = {k: v["median_ape_pct"] for k, v in report.learners.items()}
    assert scores["blend"] == min(scores.values())
    assert scores["blend"] < 8
    assert 70 <= report.coverage_pct <= 92
    assert report.retest_ape_pct is not None and report.retest_ape_pct < 6
    return folder


def test_repeated_events_of_the_host_count_as_shapes() -> None:
    """Two measurements of a view, which has one shape; two of an optimizer with 3 tensors."""
    points = [host.Host(op="view_op")] * 2
    points += [host.Host(op="sgd_step", tensors=n) for n in (3, 3, 5)]
    groups = shape_groups(pd.DataFrame([asdict(p) for p in points]), host.FAMILY)
    assert len(set(groups[:2])) == 2
    assert groups[2] == groups[3] != groups[4]


def test_price_keeps_rows_and_adds_columns(bundle: Path, data: Path, tmp_path: Path) -> None:
    source = next(data.rglob("part-*.parquet"))
    write_forecasts(read_file(source), Bundle.load(bundle), tmp_path / "out.parquet")
    before, after = pd.read_parquet(source), pd.read_parquet(tmp_path / "out.parquet")
    assert len(before) == len(after)
    assert (after["predicted_us_p10"] < after["predicted_us_p90"]).all()


@pytest.mark.slow
def test_the_fastest_software_for_each_row_is_written(data: Path, tmp_path: Path) -> None:
    """Half as long under "narrow" up to 64 columns, else twice as long as under "wide"."""
    rows = pd.read_parquet(next(data.rglob("part-*.parquet"))).iloc[::4]
    factor = np.where(rows["n"] <= 64, 0.5, 2.0)
    both = [rows.assign(stack="wide"), rows.assign(stack="narrow", time_us=factor * rows.time_us)]
    held = train([write_rows(tmp_path / "two", pd.concat(both))], tmp_path / "bundle").held_out()
    known, out = Bundle.load(tmp_path / "bundle"), tmp_path / "out.parquet"
    asked = rows[(rows["n"] < 40) | (rows["n"] > 100)].drop(columns="time_us").iloc[:80]
    write_forecasts(asked, known, out, among=("wide", "narrow"))
    found = pd.read_parquet(out)
    right = found["stack"] == np.where(found["n"] < 40, "narrow", "wide")
    assert right.mean() > 0.9 and 0 < (found["n"] < 40).sum() < len(found)
    assert set(held["stack"]) == {"wide", "narrow"}
    (section,) = software_sections(held)
    assert section.table is not None and float(section.table.rows[0][2]) > 80  # top-1 %
    with pytest.raises(ValueError, match="no rows of gemm under 'cutlass'; known: narrow, wide"):
        write_forecasts(asked, known, out, among=("wide", "cutlass"))


def test_an_unseen_gpu_with_a_hardware_file_is_priced(bundle: Path, tmp_path: Path) -> None:
    """The bundle was not trained on it; a machine of no file is refused by name."""
    rows = pd.DataFrame([asdict(gemm.Gemm(m=64, n=64, k=64))]).assign(gpu="l4", family="gemm")
    rows.to_parquet(tmp_path / "rows.parquet")
    write_forecasts(
        read_file(tmp_path / "rows.parquet"), Bundle.load(bundle), tmp_path / "out.parquet"
    )
    found = pd.read_parquet(tmp_path / "out.parquet")
    expected = Bundle.load(bundle).price("gemm", rows, {"l4": load_gpu("l4")})
    assert found["predicted_us"].tolist() == expected["predicted_us"].tolist()
    rows.assign(gpu="h1000").to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"unknown gpu 'h1000'; known: h100-nvl, .*; all \d+"):
        write_forecasts(
            read_file(tmp_path / "rows.parquet"), Bundle.load(bundle), tmp_path / "out.parquet"
        )


@pytest.mark.parametrize(
    ("column", "text", "message"),
    [
        ("m", "many", "family gemm: column 'm': 'many' is no number"),
        ("dtype", "ynt64", "unknown dtype 'ynt64'; known: .*bf16"),
    ],
)
def test_a_text_that_does_not_belong_is_one_line(
    column: str, text: str, message: str, bundle: Path
) -> None:
    rows = pd.DataFrame([asdict(gemm.Gemm(m=64, n=64, k=64))]).assign(gpu="toy", **{column: text})
    with pytest.raises(ValueError, match=message):
        Bundle.load(bundle).price("gemm", rows)


def test_what_does_not_fit_is_refused_in_one_line(bundle: Path, tmp_path: Path) -> None:
    facts = json.loads((bundle / "bundle.json").read_text())
    for other in (6, SAME_ON_CPUS, 99):  # the toy is a GPU
        (tmp_path / "bundle.json").write_text(json.dumps({**facts, "schema_version": other}))
        with pytest.raises(
            ValueError, match=f"schema version {other}, this code reads {SCHEMA_VERSION}"
        ):
            Bundle.load(tmp_path)
    with pytest.raises(ValueError, match=r"x\.parquet': no such file"):
        write_forecasts(read_file(tmp_path / "x.parquet"), Bundle.load(bundle), tmp_path / "y")
    (tmp_path / "x.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"x\.parquet': not a readable Parquet file"):
        write_forecasts(read_file(tmp_path / "x.parquet"), Bundle.load(bundle), tmp_path / "y")
    rows = pd.DataFrame([asdict(gemm.Gemm(m=1, n=1, k=1))]).assign(gpu="h1000")
    with pytest.raises(ValueError, match="unknown gpu 'h1000'; the bundle knows"):
        Bundle.load(bundle).price("gemm", rows)
