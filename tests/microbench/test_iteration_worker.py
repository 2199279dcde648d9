"""Iterations on a machine that others use too."""

from __future__ import annotations

from typing import Any

import pytest

from microbench import iteration_worker
from microbench.cases.registry import case
from microbench.iteration_worker import Calm
from microbench.iterations import Iteration


def measured(monkeypatch: pytest.MonkeyPatch, *anchors_us: float) -> float:
    """The anchor of the row that is kept where the least one ever seen is 100 us."""
    rows: Any = iter([{"status": "ok", "anchor_us": us} for us in anchors_us])
    monkeypatch.setattr(iteration_worker, "GLANCES", 1)
    monkeypatch.setattr(iteration_worker, "measure", lambda *_, **__: next(rows))
    calm = Calm(together=False)
    calm.least_us = 100.0
    return float(calm.measure(case("mlp-s"), Iteration(case="mlp-s", batch=1))["anchor_us"])


def test_a_calm_case_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 190.0) == 190.0


def test_a_disturbed_one_again_and_three_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, 2700.0, 120.0) == 120.0
    assert measured(monkeypatch, 2700.0, 300.0, 400.0) == 300.0
