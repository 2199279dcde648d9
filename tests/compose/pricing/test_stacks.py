"""Prices by software (attention kernels) and by power limit (sustained products)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from plan_case import Fixed
from unseen_ops import learned

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.attention_kernels import with_attention_kernel
from itercast.compose.pricing.power_limit import sustained_flops_per_s
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, PricedOp, priceable
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops.matrix.attention import FAMILY as ATTENTION
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.ops.matrix.gemm import FAMILY as GEMM
from itercast.microbench.ops.matrix.gemm import Gemm

HOPPER = Gpu(
    name="toy-hopper",
    architecture="hopper",
    sm_count=100,
    peak_flops_per_s={"fp32": 1e14, "bf16": 1e15},
    hbm_bytes_per_s=2e12,
)
# 2 products * 2 * 8 heads * 1000 * 1000 * 128 = 4.096e9 FLOP, 4.096 us at 1e15 FLOP/s; 4 tensors of
# 8 * 1000 * 128 in 2 bytes are 8.192e6 bytes, 4.096 us at 2e12 bytes/s: half of it is compute
CALL = Attention(
    op="forward",
    batch=1,
    heads=8,
    kv_heads=8,
    q_len=1000,
    kv_len=1000,
    head_dim=128,
    causal=False,
    dtype="bf16",
)


class Rows(Fixed):
    """Attention's forward pass and products take 10 us, measured with some software."""

    def __init__(self, stack: str, gpu: Gpu = HOPPER, *ops: str) -> None:
        facts: dict[str, Any] = {"dtype": "bf16", "gpu": gpu, "stack": stack}
        self.models: Mapping[str, Any] = {
            "attention": learned(*(ops or ("forward",)), **facts),
            "gemm": learned("mm", **facts),
        }


def priced(p: Any, rows: Rows, stack: str, gpu: Gpu = HOPPER, kernel: str = "") -> PricedOp:
    """The price of an attention call or product under a stack."""
    family = ATTENTION if isinstance(p, Attention) else GEMM
    facts: dict[str, Any] = {"family": family, "params": p, "bytes_moved": 0.0, "cold": 0.0}
    wanted = Priceable(op="x", phase="forward", kernel=kernel, **facts)
    return PriceBook(rows, gpu, 0, stack=stack).price([wanted])[0]


CPU = replace(HOPPER, kind="cpu")
KERNEL_TIMES: list[tuple[Rows, str, str, Gpu, Attention, float]] = [
    # rows of flash 3; cuDNN as fast; flash 2 is 2.0 times as long on the half that is compute
    (Rows("vllm-0.24.0"), "vllm", "", HOPPER, CALL, 10),
    (Rows("vllm-0.24.0"), "torch-2.11", "", HOPPER, CALL, 10),
    (Rows("vllm-0.24.0"), "torch-2.2", "", HOPPER, CALL, 10 * (1 + 0.5 * (2.0 - 1))),
    # rows of an older kernel are shortened
    (Rows("torch-2.5.1"), "torch-2.11", "", HOPPER, CALL, 10 / 1.5),
    (Rows("torch-2.5.1"), "torch-2.2", "", HOPPER, CALL, 10),
    # a stated kernel counts before the stack; triton: 1.8 times flash 2
    (Rows("vllm-0.24.0"), "torch-2.11", "triton", HOPPER, CALL, 10 * (1 + 0.5 * (1.8 * 2 - 1))),
    # 16 bits on GPUs only
    (Rows("vllm-0.24.0"), "torch-2.2", "", HOPPER, replace(CALL, dtype="fp32"), 10),
    (Rows("torch-2.11.0", CPU), "torch-2.2", "", CPU, CALL, 10),
]


@pytest.mark.parametrize(("rows", "stack", "kernel", "gpu", "call", "us"), KERNEL_TIMES)
def test_attention_takes_as_long_as_its_kernel(
    rows: Rows, stack: str, kernel: str, gpu: Gpu, call: Attention, us: float
) -> None:
    found = priced(call, rows, stack, gpu, kernel)
    assert found.duration_us == pytest.approx(us)
    assumed = (("attention_kernels.over_flash_2", 1.0),)
    assert found.assumed == (assumed if us > 10 or us < 10 else ())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("width", "stack", "us"),
    [
        (128, "torch-2.2", 10.0),
        # compute, a half, takes flash 2 2.0 times as long as the newest, memory-efficient 4.0 times
        (64, "torch-2.2", 10 * (1 + 0.5 * (4.0 - 1)) / 1.5),
        (64, "deepspeed", 10.0),  # models pad values for the package flash-attn
        (64, "torch-2.11", 10 / 1.5),  # cuDNN takes such values
    ],
)
def test_flash_attention_of_torch_takes_values_as_wide_as_queries(
    width: int, stack: str, us: float, backward: bool
) -> None:
    q, v = (
        TensorSpec(shape=(1, 8, 1000, n), dtype="bf16", storage=i)
        for i, n in enumerate((128, width))
    )
    name = "itercast.sdpa" + "_backward" * backward
    asked = priceable(OpCall(op=name, args=(v, q, q, v)[not backward :], outputs=(v,)), cold=0.0)
    book = PriceBook(Rows("torch-2.5.1"), HOPPER, 0, stack=stack)
    assert book.price([replace(asked, params=CALL)])[0].duration_us == pytest.approx(us)


def test_a_published_kernel_is_taken_by_its_first_word() -> None:
    x = TensorSpec(shape=(1, 8, 1000, 128), dtype="bf16", storage=1)
    step = StepCapture(calls=(OpCall(op="itercast.sdpa", args=(x, x, x), outputs=(x,)),))
    for stated, kernel in (("triton flash (default)", "triton"), ("cuDNN/TE fused", "cudnn")):
        assert with_attention_kernel(step, stated).calls[0].kwargs == {"kernel": kernel}
    assert with_attention_kernel(step, "SDPA flash") is step
    assert with_attention_kernel(step, "") is step


def test_the_sustained_rate_follows_the_power_limit() -> None:
    """From the H100 PCIe: 493e12 FLOP/s in bf16 with 114 SMs at 350 W."""
    h100 = load_gpu("h100-sxm-80gb")
    rate = 493e12 * (132 / 114) ** (2 / 3) * (700 / 350) ** (1 / 3)
    assert sustained_flops_per_s(h100, "bf16") == pytest.approx(rate)  # 685e12
    assert sustained_flops_per_s(h100, "fp8") == pytest.approx(rate * 1978.9 / 989.4)
    at_500_w = sustained_flops_per_s(replace(h100, power_w=500.0), "bf16")
    assert at_500_w == pytest.approx(rate * (500 / 700) ** (1 / 3))
    a100 = load_gpu("a100-sxm-80gb")  # from the A100 PCIe at 250 W: 251e12, published are 265e12
    assert sustained_flops_per_s(a100, "bf16") == pytest.approx(215e12 * 1.6 ** (1 / 3), rel=1e-3)


def test_small_products_are_not_throttled_and_large_ones_take_their_flops_at_the_rate() -> None:
    h100 = load_gpu("h100-sxm-80gb")
    rows = Rows("torch-2.11.0", h100)
    small, large = Gemm(m=64, n=64, k=64, dtype="bf16"), Gemm(m=8192, n=8192, k=8192, dtype="bf16")
    assert priced(small, rows, "torch-2.11", h100).duration_us == pytest.approx(10)
    us = priced(large, rows, "torch-2.11", h100).duration_us
    assert us == pytest.approx(2 * 8192**3 / sustained_flops_per_s(h100, "bf16") * 1e6)
    assert us < priced(large, rows, "torch-2.11", replace(h100, power_w=500.0)).duration_us
