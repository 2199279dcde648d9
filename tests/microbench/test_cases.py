"""Cases build, train a step, and capture what they run."""

from __future__ import annotations

from typing import Any

import pytest

from microbench.capture import capture_step
from microbench.cases.registry import case, case_names
from microbench.iterations import PHASES, measure_case
from microbench.step import StepSettings

SMALL = [n for n in case_names() if n.endswith("-s")]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_case_runs_and_its_capture_equals_its_run(name: str) -> None:
    chosen = case(name)

    def sequence(fake: bool) -> list[Any]:
        found = capture_step(
            chosen.build,
            lambda: chosen.inputs(chosen.batch, chosen.seq),
            chosen.loss,
            StepSettings(),
            fake=fake,
        )
        return [(c.op, c.phase, [t.shape for t in c.outputs]) for c in found.calls]

    assert sequence(fake=True) == sequence(fake=False)


def test_measured_rows_state_phases_and_the_anchor() -> None:
    times = iter([4.0, 9.0] * 500)
    row = measure_case(
        case("mlp-s"), StepSettings(), "cpu", repetitions=6, anchor=lambda: next(times)
    )
    assert row["samples"] >= 6
    assert row["anchor_us"] == pytest.approx(6, rel=0.2)  # sqrt(4 * 9)
    phases = sum(row[f"{p}_us"] for p in PHASES)
    assert phases == pytest.approx(row["time_us"], rel=0.3)


def test_gpt2_small_has_124_million_parameters() -> None:
    import torch

    with torch.device("meta"):
        assert sum(p.numel() for p in case("gpt2-small").build().parameters()) == 124_439_808


def test_an_unknown_case_is_named() -> None:
    with pytest.raises(ValueError, match="unknown case 'gpt9'; known: mlp-s"):
        case("gpt9")
