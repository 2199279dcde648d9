"""Intervals of op times, and held-out forecasts that say what explains a bad one."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.learners.family_model import learn, prepare
from itercast.learners.held_out import held_out_forecasts
from itercast.learners.models.trees import default_options
from itercast.learners.training_rows import usable_rows
from itercast.learners.transfer.offsets import OUTSIDE_WIDENING, offsets_of_rows
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families

DATASETS = Path(__file__).parents[2] / "datasets"


def test_a_shape_outside_the_envelope_is_less_certain() -> None:
    """As large in each dimension as no row: OUTSIDE_WIDENING times the width, in log time."""
    model = Bundle.load(SHIPPED_CPU).models["gemm"]
    row = usable_rows([DATASETS], ["gemm"])["gemm"].head(1)
    far = row.assign(m=10**5, n=10**5, k=10**5)
    (low, high), gpus = model.offsets, model.source_gpus.gpus
    for rows, inside in ((row, True), (far, False)):
        found = model.predict(rows, families()["gemm"], gpus)
        widening = 1.0 if inside else OUTSIDE_WIDENING
        assert found.inside.tolist() == [inside]
        assert np.log(found.p10_us / found.time_us) == pytest.approx(widening * low)
        assert np.log(found.p90_us / found.time_us) == pytest.approx(widening * high)


def test_a_gpu_without_rows_is_less_certain() -> None:
    """The same products on an A100, which was measured, and on an L40S, which was not."""
    model, family = Bundle.load(SHIPPED).models["gemm"], families()["gemm"]
    rows = usable_rows([DATASETS], ["gemm"])["gemm"].head(1)
    rows = rows.assign(m=4096, n=4096, k=4096, dtype="bf16", op="mm", stack="", threads=0)
    widths = {}
    for name in ("a100-sxm-80gb", "l40s"):
        gpus = {**model.source_gpus.gpus, name: load_gpu(name)}
        found = model.predict(rows.assign(gpu=name), family, gpus)
        assert (found.p10_us < found.time_us).all()
        assert (found.time_us < found.p90_us).all()
        widths[name] = float(np.log(found.p90_us / found.p10_us)[0])
    assert widths["l40s"] > widths["a100-sxm-80gb"]


def test_offsets_of_rows_by_hand() -> None:
    """Seen -0.1, +0.2; unseen -0.3, +0.4; outside the envelope 2.5 times the seen ones at least."""
    unseen, inside = np.array([False, False, True, True]), np.array([True, False, True, False])
    low, high = offsets_of_rows((-0.1, 0.2), (-0.3, 0.4), unseen, inside)
    assert low == pytest.approx([-0.1, -0.1 * OUTSIDE_WIDENING, -0.3, -0.3])
    assert high == pytest.approx([0.2, 0.2 * OUTSIDE_WIDENING, 0.4, 0.2 * OUTSIDE_WIDENING])


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
