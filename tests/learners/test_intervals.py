"""Intervals of op times: wider outside the envelope, wider on GPUs that were left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from itercast.learners.beyond_memory import usable_rows
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU, Bundle
from itercast.learners.family_model import prepare
from itercast.learners.intervals import log_error, quick_model_with_intervals
from itercast.learners.models.trees import default_options
from itercast.learners.train import hardware_of
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


def test_a_model_made_quickly_has_intervals_too() -> None:
    """They contain the forecast and most of the rows; those of an unseen device are wider."""
    rows = usable_rows([DATASETS], ["norm"])["norm"]
    prepared = prepare(rows, families()["norm"], hardware_of([DATASETS], rows))
    model = quick_model_with_intervals(prepared, default_options(prepared.table))
    (low, high), (unseen_low, unseen_high) = model.offsets, model.unseen_offsets
    assert low < 0 < high
    assert unseen_low < low
    assert unseen_high > high
    error = log_error(model, prepared, np.arange(len(rows)))
    assert np.mean((error > low) & (error < high)) > 0.8
    assert set(model.envelope) == set(prepared.envelope)


def test_offsets_of_rows_by_hand() -> None:
    """Seen -0.1, +0.2; unseen -0.3, +0.4; outside the envelope 2.5 times the seen ones at least."""
    unseen, inside = np.array([False, False, True, True]), np.array([True, False, True, False])
    low, high = offsets_of_rows((-0.1, 0.2), (-0.3, 0.4), unseen, inside)
    assert low == pytest.approx([-0.1, -0.1 * OUTSIDE_WIDENING, -0.3, -0.3])
    assert high == pytest.approx([0.2, 0.2 * OUTSIDE_WIDENING, 0.4, 0.2 * OUTSIDE_WIDENING])
