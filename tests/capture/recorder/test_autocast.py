"""Mixed precision: what CUDA's autocast casts, counted by hand."""

from typing import Any

import pytest
import torch
from torch import nn

from itercast.api import predict
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings
from itercast.learners.bundle import SHIPPED_CPU


class Net(nn.Module):
    """Two products of one weight, a norm between them, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.weight(self.norm(self.weight(x))), -1)


def step(
    amp: bool, dtype: str = "fp16", mode: str = "train", net: Any = Net, attn: str = "sdpa"
) -> StepCapture:
    settings = StepSettings(dtype=dtype, amp=amp, mode=mode, attn=attn)
    x = lambda: {"x": torch.randn(4, 16)}  # noqa: E731
    return capture_step(net, x, lambda y, _: y.square().mean(), settings)


def called(step: StepCapture, op: str, phase: str = "forward") -> list[OpCall]:
    return [c for c in step.calls if c.op.split(".")[1] == op and c.phase == phase]


def dtypes(call: OpCall) -> list[str]:
    return [a.dtype for a in call.args if hasattr(a, "dtype")]


def test_products_in_half_norms_and_softmax_in_fp32() -> None:
    """Casts: x, weight, bias (once for both products), what the norm takes and what it gives.

    Backward casts back the gradients of the weight's two uses, the bias's, and those between.
    """
    found = step(amp=True)
    assert [dtypes(c) for c in called(found, "addmm")] == [["fp16"] * 3] * 2
    assert all(set(dtypes(c)) == {"fp32"} for c in called(found, "native_layer_norm"))
    assert dtypes(called(found, "_softmax")[0]) == ["fp32"]
    casts = [c.args[0].dtype for c in called(found, "_to_copy")]
    assert casts.count("fp32") == 4 and casts.count("fp16") == 2  # x, w, b, norm's; norm, softmax
    assert [dtypes(c)[0] for c in called(found, "mm", "backward")] == ["fp16"] * 3


class Turned(nn.Module):
    """Queries and keys turned by fp32 angles before they meet, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.weight(x).view(1, 4, 1, 16)
        turned = value * torch.ones(16)
        return nn.functional.scaled_dot_product_attention(turned, turned, value)


def test_attention_takes_half_whatever_it_is_given() -> None:
    found = step(amp=True, net=Turned)
    (forward,) = [c for c in found.calls if c.op == "itercast.sdpa"]
    (backward,) = [c for c in found.calls if c.op == "itercast.sdpa_backward"]
    assert (dtypes(forward), dtypes(backward)) == (["fp16"] * 3, ["fp16"] * 4)
    written_out = step(amp=True, net=Turned, attn="eager")
    assert [dtypes(c) for c in called(written_out, "bmm")] == [["fp16"] * 2] * 2
    assert dtypes(called(written_out, "_softmax")[0]) == ["fp32"]


def test_weights_gradients_and_the_optimizer_stay_in_fp32() -> None:
    found = step(amp=True)
    assert {p.dtype for p in found.parameters} == {"fp32"}
    assert {p.dtype for p in step(amp=False).parameters} == {"fp16"}
    updates = [c for c in found.calls if c.phase == "optimizer" and "foreach" in c.op]
    assert updates and "fp16" not in repr(updates)


def test_what_half_precision_alone_does_not_cast() -> None:
    assert not called(step(amp=False), "_to_copy")
    assert not called(step(amp=False, mode="infer"), "_to_copy")
    assert len(called(step(amp=True, mode="infer"), "_to_copy")) == 6


def test_a_plan_says_amp() -> None:
    """Norms in fp32 and casts take time; there is nothing to mix in fp32."""
    asked: dict[str, Any] = {"gpu": "a100-sxm-80gb", "batch": 8, "seq": 512, "dtype": "bf16"}
    half, mixed = predict("gpt2-small", **asked), predict("gpt2-small", plan="amp", **asked)
    assert mixed.plan == "dp=1,amp"
    assert 1.05 < mixed.iteration_us / half.iteration_us < 2
    assert mixed.memory_bytes > half.memory_bytes + 124e6 * (4 - 2) * 4 * 0.9  # Adam's two, w, dw
    with pytest.raises(ValueError, match="amp: dtype is bf16 or fp16, got 'fp32'"):
        predict("gpt2-small", gpu="a100-sxm-80gb", plan="amp", dtype="fp32")
    with pytest.raises(ValueError, match="a CPU casts other ops"):
        predict("gpt-s", gpu="cpu", plan="amp", dtype="bf16", bundle=SHIPPED_CPU)
    with pytest.raises(ValueError, match="captured with amp=True"):
        predict(step(amp=False), gpu="a100-sxm-80gb", plan="amp")
