"""Whole models left out: which rows teach and judge, and what errors on them show."""

from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console
from toy_products import TOY, products, timed

from itercast.extras.benchmarks.left_out_models import folds, model_errors, model_table
from itercast.extras.campaign.archive import pack, unpack
from itercast.extras.campaign.drawn_from import (
    FILE,
    read_drawn_from,
    shape_texts,
    shapes_by_model,
)
from itercast.extras.campaign.prepare import use_prepared
from itercast.microbench.ops import families
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.store import read_rows

GEMM = families()["gemm"]


def test_rows_of_models_left_out_teach_nothing_and_those_of_two_models_judge_nothing() -> None:
    """Five models, a fold each; a and b share shape 1; shape 9, of no model, always teaches."""
    shapes = np.array(["0", "1", "1", "2", "3", "4", "5", "9"])
    of = {"a": ["0", "1"], "b": ["1", "2"], "c": ["3"], "d": ["4"], "e": ["5"]}
    found = {tuple(fold.judged.tolist()): fold.known.tolist() for fold in folds(shapes, of)}
    assert found == {
        (0,): [3, 4, 5, 6, 7],
        (3,): [0, 4, 5, 6, 7],
        (4,): [0, 1, 2, 3, 5, 6, 7],
        (5,): [0, 1, 2, 3, 4, 6, 7],
        (6,): [0, 1, 2, 3, 4, 5, 7],
    }


def test_a_model_is_judged_by_what_others_teach() -> None:
    """Its products (k = 777, in two dtypes) take five times as long: forecasts are 80 % too short.

    By the same rows in training they would be right.
    """
    calls = [replace(p, k=777) for p in islice(GEMM.sweep(), 12)]
    odd = timed([*calls, *(replace(p, dtype="tf32") for p in calls)], lambda p: 5 * 3.5)
    rows = pd.concat([products(150), odd.assign(dtype="fp32")], ignore_index=True)
    of = shapes_by_model({"gemm": {p: ["odd"] for p in calls}})["gemm"]
    assert len(of["odd"]) == len(set(calls))
    scored = model_errors(rows, GEMM, {"toy": TOY}, of)
    assert {name: score["rows"] for name, score in scored.items()} == dict.fromkeys(
        ("blend", "roofline", "nearest"), len(odd)
    )
    assert -95 < scored["blend"]["bias_pct"] < -60
    assert model_errors(rows, GEMM, {"toy": TOY}, {}) == {}
    report = {"gemm": {"learners": {"blend": {"median_ape_pct": 3.25}}, "retest_ape_pct": None}}
    written = StringIO()
    Console(width=200, file=written).print(model_table("x", {"gemm": scored}, report))
    line = next(line for line in written.getvalue().splitlines() if "gemm" in line)
    cells = [cell.strip() for cell in line.split("│")[1:-1]]
    assert cells[:2] == ["gemm", "24"]
    assert cells[-4:] == [
        "-",
        *(f"{scored[n]['median_ape_pct']:.1f}" for n in ("roofline", "nearest")),
        "3.2",
    ]


def test_a_shape_is_the_op_and_what_is_not_default(tmp_path: Path) -> None:
    rows = timed([Gemm(op="bmm", m=2, n=3, k=4, batch=5, dtype="tf32")], lambda p: 1, TOY)
    assert shape_texts(rows, GEMM).tolist() == ["bmm m=2 n=3 k=4 batch=5"]
    assert read_drawn_from(tmp_path) == {}
    for wrong in ("[]", '{"gemm": {"a": [1]}}', '{"gemn": {}}', "{"):
        (tmp_path / FILE).write_text(wrong)
        with pytest.raises(ValueError, match=rf"{FILE}': "):
            read_drawn_from(tmp_path)


def test_every_shape_that_is_listed_beside_our_rows_was_measured() -> None:
    root = Path(__file__).parents[3] / "datasets/gpu"
    for name, shapes in read_drawn_from(root).items():
        measured = set(shape_texts(read_rows([root], name), families()[name]))
        assert {shape for of_model in shapes.values() for shape in of_model} <= measured, name


def test_a_prepared_list_of_models_goes_with_the_campaigns_rows(tmp_path: Path) -> None:
    """From the folder of what was prepared to the rows, into the archive, and out of it."""
    (tmp_path / "prepared").mkdir()
    (tmp_path / "prepared" / FILE).write_text('{"gemm": {"a": ["mm m=1 n=2 k=3"]}}')
    use_prepared(tmp_path / "prepared", tmp_path / "rows", seed=0)
    pack(tmp_path / "rows", tmp_path / "box.tar.gz")
    unpack(tmp_path / "box.tar.gz", tmp_path / "home")
    assert read_drawn_from(tmp_path / "home") == {"gemm": {"a": ["mm m=1 n=2 k=3"]}}
