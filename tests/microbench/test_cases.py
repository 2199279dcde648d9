"""Cases build, train a step, and capture what they run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from clockwork import ticking

from itercast.microbench.capture.log import capture_step
from itercast.microbench.cases.registry import case, case_names, cases_of
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.iterations.measure import PHASES, measure_iteration
from itercast.microbench.opcall import TensorSpec
from itercast.microbench.step import StepSettings

MEASURED = [n for n in case_names() if case(n).measured]
OTHERS = [c.name for c in cases_of("others")]

PUBLISHED_PARAMETERS = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # arXiv:2005.14165 rounds it to 175 B
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "llama-1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "vit-b": 86_567_656,
    "vit-large": 304_326_632,
    "resnet-50": 25_557_032,
    "dlrm-criteo": 32_709_138 * 128 + 171_392 + 2_197_505 + 1024,  # tables, bottom, top, pad
    # table and bias; biases of distances; layers: 5 w^2, 2 w h + w + h, norms
    "transformer-xl-base": 267_735 * 513 + 1024 + 16 * (1_310_720 + 2_099_712 + 2048),
    "transformer-xl-large": 267_735 * 1025 + 2048 + 18 * (5_242_880 + 8_393_728 + 4096),
    # ResNet-50 less its last stage and head; added maps; boxes and classes
    "ssd300": 25_557_032 - 14_964_736 - 2_049_000 + 3_773_696 + 9 * 13_824 * 85 + 30 * 85,
}


def described(t: TensorSpec) -> tuple[Any, ...]:
    """Shape, dtype and strides; how far apart elements lie along a dimension of one is left out.

    Kernels choose it freely: a convolution's gradient has other numbers there with one thread.
    """
    strides = tuple(step for size, step in zip(t.shape, t.stride, strict=False) if size > 1)
    return t.shape, t.dtype, strides


def sequence(name: str, fake: bool) -> list[Any]:
    """Everything that the calls of a step of a quarter of the batch say but storage numbers."""
    chosen = case(name)
    found = capture_step(
        chosen.build,
        lambda: chosen.inputs(max(2, chosen.batch // 4), chosen.seq),
        chosen.loss,
        StepSettings(),
        fake=fake,
    )
    return [
        (c.op, c.phase, [described(t) for t in (*c.tensors(), *c.outputs)]) for c in found.calls
    ]


@pytest.mark.parametrize(
    "name", [*MEASURED, *(c.name for c in cases_of("others") if "lstm" not in c.name)]
)
def test_a_measured_case_runs_and_its_capture_equals_its_run(name: str) -> None:
    assert sequence(name, fake=True) == sequence(name, fake=False)


def test_an_lstm_is_captured_as_it_runs_but_for_a_workspace() -> None:
    fake, real = ([c[:2] for c in sequence("lstm-s", fake=f)] for f in (True, False))
    assert fake == real
    assert [op for op, _ in fake].count("aten.mkldnn_rnn_layer.default") == 2


@pytest.mark.parametrize("kind", ["vit", "resnet", "gru", "dlrm", "moe", "gnn"])
def test_every_kind_of_model_is_measured_in_three_sizes(kind: str) -> None:
    assert {f"{kind}-{size}" for size in "sml"} <= set(MEASURED)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_published_architectures_have_their_published_parameters(name: str) -> None:
    import torch

    with torch.device("meta"):
        count = sum(p.numel() for p in case(name).build().parameters())
    assert count == PUBLISHED_PARAMETERS[name]
    assert not case(name).measured


def test_experts_share_the_tokens_evenly() -> None:
    chosen = case("moe-s")
    calls = capture_step(
        chosen.build, lambda: chosen.inputs(2, 32), chosen.loss, StepSettings()
    ).calls
    forward = [c for c in calls if c.op == "aten.topk.default"]
    assert [c.outputs[0].shape for c in forward] == [(4, 16), (4, 16)]  # 64 tokens, 4 experts


def test_names_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import itercast.microbench.cases.registry as r; "
    )
    done = subprocess.run([sys.executable, "-c", code + "print(len(r.case_names()))"], check=True)
    assert done.returncode == 0


def test_measured_rows_state_phases_and_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock ticks 0.1 s at the start, at each of 5 phases and at the end."""
    ticking(monkeypatch)
    times = iter([{"anchor_us": 4.0, "serial_us": 1.0}, {"anchor_us": 9.0, "serial_us": 1.0}] * 500)
    asked = iteration_of(case("mlp-s"))
    row = measure_iteration(case("mlp-s"), asked, "cpu", repetitions=6, anchor=lambda: next(times))
    assert row["samples"] >= 6
    assert row["anchor_us"] == pytest.approx(6, rel=0.2)  # sqrt(4 * 9)
    assert row["serial_us"] == 1.0
    assert [row[f"{p}_us"] for p in PHASES] == [0.1e6] * 5
    assert row["time_us"] == 6 * 0.1e6


def test_an_unknown_case_is_named() -> None:
    known = r"gpt-s, .*; all \d+: itercast list cases"
    with pytest.raises(ValueError, match=f"unknown case 'gpt-9'; known: {known}$"):
        case("gpt-9")
