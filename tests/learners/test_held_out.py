"""Forecasts of held-out rows say what explains a bad one; rows small enough to check by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from itercast.learners.family_model import learn, prepare
from itercast.learners.held_out import (
    has_held_out,
    held_out_forecasts,
    load_held_out,
    save_held_out,
)
from itercast.learners.models.trees import default_options
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families

GPU = load_gpu("h100-sxm-80gb")
HELD = (8, 30, 31)  # 8 is measured again in row 30; 31 is larger than all others


@pytest.fixture(scope="module")
def found() -> pd.DataFrame:
    """Thirty squares of 64 to 64 * 29, one of them twice, and a huge one in another layout."""
    sides = [64 * (i + 1) for i in range(30)] + [64 * 9, 2**15]
    rows = pd.DataFrame({"m": sides, "n": sides, "k": sides})
    rows = rows.assign(op="mm", dtype="bf16", batch=1, layout=["nn"] * 31 + ["nt"], gpu=GPU.name)
    rows = rows.assign(stack="torch-2.9", timer="device", status="ok", cache="warm", threads=0)
    rows["time_us"] = 5.0 + rows["m"] ** 3 * 1e-7
    rows["time_us_p20"], rows["time_us_p80"] = 0.9 * rows["time_us"], 1.3 * rows["time_us"]
    rows["repeat"] = [0] * 30 + [1, 0]
    rows.loc[30, "time_us"] *= 1.5
    family = families()["gemm"]
    prepared = prepare(rows, family, {GPU.name: GPU})
    held = np.array(HELD)
    known = np.setdiff1d(np.arange(len(rows)), held)
    learned = learn(prepared, known, default_options(prepared.table.take(known)))
    guess, offsets = learned.predict_us(held), learned.crossed.offsets
    return held_out_forecasts(learned, rows, family, known, held, guess, offsets)


def test_a_row_says_what_was_measured_and_forecast(found: pd.DataFrame) -> None:
    """Parameters that are defaults are left out; the interval holds the forecast."""
    assert found["params"].tolist()[:2] == ["m=576 n=576 k=576"] * 2
    assert "layout=nt" in found["params"][2] and "batch" not in found["params"][2]
    assert found["measured_us"][0] == pytest.approx(5 + 576**3 * 1e-7)
    assert found["bytes_moved"][0] == 3 * 576**2 * 2
    assert (found["predicted_us_p10"] < found["predicted_us"]).all()
    assert (found["predicted_us"] < found["predicted_us_p90"]).all()


def test_noise_is_stated_where_it_was_measured(found: pd.DataFrame) -> None:
    """The point measured twice differs by 50 %; samples spread by (1.3 - 0.9) of the time."""
    assert found["retest_pct"].tolist()[:2] == pytest.approx([50.0, 50.0])
    assert np.isnan(found["retest_pct"][2])
    assert found["spread_pct"][0] == pytest.approx(40.0)


def test_what_lies_beyond_the_rows_learned_from_is_named(found: pd.DataFrame) -> None:
    assert found["outside"].tolist()[:2] == ["", ""]
    assert found["outside"][2]


def test_the_nearest_neighbour_is_that_of_the_same_kind(found: pd.DataFrame) -> None:
    """576 lies between 512 and 640: log2(641 / 577) away in each of m, n, k; no other is "nt"."""
    nearest = np.sqrt(3) * min(np.log2(641 / 577), np.log2(577 / 513))
    assert found["neighbour_log2"][0] == pytest.approx(nearest, rel=1e-5)
    assert np.isinf(found["neighbour_log2"][2])


def test_they_are_kept_beside_the_bundle(found: pd.DataFrame, tmp_path: Path) -> None:
    assert load_held_out(tmp_path).empty and not has_held_out(tmp_path)
    save_held_out(tmp_path, found)
    pd.testing.assert_frame_equal(load_held_out(tmp_path), found)
    assert not has_held_out(tmp_path)  # without a bundle
    (tmp_path / "bundle.json").write_text("{}")
    assert has_held_out(tmp_path)
