"""Captures at many sizes: those that are derived equal those that are made."""

from __future__ import annotations

import pytest
from plan_case import capture_at, experts_at

from itercast.compose.graph.sizes import CaptureAt, CapturesBySize
from itercast.microbench.opcall import OpCall, StepCapture, TensorSpec

SIZES = [(b, s) for b in (1, 2, 4, 8) for s in (16, 32, 64, 128)]


def counted(capture: CaptureAt) -> tuple[CapturesBySize, list[tuple[int, int]]]:
    """The captures of a model, and the sizes at which it was run."""
    made: list[tuple[int, int]] = []

    def at(batch: int, seq: int) -> StepCapture:
        made.append((batch, seq))
        return capture(batch, seq)

    captures = CapturesBySize(at)
    captures.announce(SIZES)
    return captures, made


@pytest.mark.parametrize("capture", [capture_at, experts_at])
def test_sixteen_sizes_are_derived_from_six(capture: CaptureAt) -> None:
    """Of one sample three are captured, and three of 2 to 8 samples; all equal real captures."""
    captures, made = counted(capture)
    assert [captures.at(size) for size in SIZES] == [capture(*size) for size in SIZES]
    assert len(made) == 6
    assert {(1, 16), (1, 128), (2, 16), (8, 128), (8, 16)} <= set(made)


def blocks_of(rows: int) -> CaptureAt:
    """A step of one call, which reads batch x ceil(length / ``rows``) blocks."""

    def at(batch: int, seq: int) -> StepCapture:
        t = TensorSpec(shape=(batch, -(-seq // rows), seq + 1), dtype="fp32", storage=0)
        return StepCapture(calls=(OpCall(op="aten.exp.default", args=(t,), outputs=(t,)),))

    return at


def test_a_length_with_a_label_more_is_derived() -> None:
    """(4, 64 / 16, 64 + 1), from steps at 2 x 16, 8 x 128 and 8 x 16."""
    captures, made = counted(blocks_of(16))
    assert captures.at((4, 64)).calls[0].args[0].shape == (4, 4, 65)
    assert sorted(made) == [(2, 16), (8, 16), (8, 128)]


def test_a_step_that_is_not_a_product_of_its_size_is_captured() -> None:
    """ceil(16 / 24) = 1 and ceil(128 / 24) = 6 blocks, but 6 / 1 is not 128 / 16."""
    captures, made = counted(blocks_of(24))
    assert captures.at((4, 64)).calls[0].args[0].shape == (4, 3, 65)
    assert (4, 64) in made


def test_a_size_that_the_model_refuses_stops_no_other() -> None:
    """Without captures at 8 x 128 others are captured rather than derived."""

    def at(batch: int, seq: int) -> StepCapture:
        if batch * seq == 8 * 128:
            raise ValueError("too long")
        return blocks_of(16)(batch, seq)

    captures, made = counted(at)
    assert captures.at((4, 64)).calls[0].args[0].shape == (4, 4, 65)
    assert (4, 64) in made
    with pytest.raises(ValueError, match="too long"):
        captures.at((8, 128))
