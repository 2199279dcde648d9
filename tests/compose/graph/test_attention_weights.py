"""What attention leaves for its backward where no fused kernel runs on a GPU."""

from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.cuda_variants import with_cuda_variants
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.programs.scripts import emulated
from itercast.compose.target import find_target
from itercast.microbench.hardware.spec import load_gpu

GROUPED = """
import torch
qkv = torch.nn.Linear(8, 16).cuda()
optimizer = torch.optim.SGD(qkv.parameters())
for step in range(3):
    with torch.autocast("cuda", torch.{dtype}, enabled={half}):
        q, k, v = qkv(torch.randn(1, 512, 8, device="cuda")).split([8, 4, 4], -1)
    q, k, v = (t.view(1, 512, -1, 4).transpose(1, 2) for t in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    attend(q, k, v, enable_gqa=True).float().sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "gpu", "item"),
    [("float32", "a10", 4), ("bfloat16", "a10", 0), ("float16", "v100-sxm-16gb", 2)],
)
def test_a_script_s_peak_has_all_weights_of_grouped_queries(
    dtype: str, gpu: str, item: int, tmp_path: Path
) -> None:
    """Two heads of 512 x 512 weights, and the gradients of these before and after softmax."""
    half = dtype != "float32"
    path = written(tmp_path, GROUPED.format(dtype=dtype, half=half))
    program = captured(path, gpus=1, gpu=emulated(load_gpu(gpu)))
    weights, found = 2 * 512 * 512 * item, forecast_program(program, find_target(gpu))
    assert 0 < found.memory_bytes - 3 * weights < 150_000  # all else: 58,784 B in bf16


def attention(kv_heads: int, dtype: str, masked: bool) -> StepCapture:
    """One sample, four heads of two numbers, eight positions: forward and backward."""

    def tensor(storage: int, heads: int) -> TensorSpec:
        return TensorSpec(shape=(1, heads, 8, 2), dtype=dtype, storage=storage)

    q, k, v, y, dy = (tensor(i, kv_heads if i in (1, 2) else 4) for i in range(5))
    how = {"masked": masked}
    gradients = tuple(tensor(5 + i, t.shape[1]) for i, t in enumerate((q, k, v)))
    forward = OpCall(op="itercast.sdpa", args=(q, k, v), kwargs=how, outputs=(y,))
    backward = OpCall(
        op="itercast.sdpa_backward",
        args=(dy, q, k, v),
        kwargs=how,
        outputs=gradients,
        phase="backward",
    )
    return StepCapture(calls=(forward, backward))


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "masked", "gpu", "kept"),
    [
        (2, "fp32", False, "a10", True),
        (2, "bf16", True, "a10", True),
        (2, "bf16", False, "a10", False),
        (2, "fp16", False, "v100-sxm-16gb", True),  # no flash kernels
        (4, "fp32", True, "v100-sxm-16gb", False),
    ],
)
def test_grouped_queries_without_a_fused_kernel_keep_all_weights(
    kv_heads: int, dtype: str, masked: bool, gpu: str, kept: bool
) -> None:
    """4 heads x (8 x 8 weights + 8 x 2 numbers each of q, k and v); q, k and v are not kept."""
    forward, backward = with_cuda_variants(attention(kv_heads, dtype, masked), load_gpu(gpu)).calls
    assert len(forward.outputs) == 1 + kept
    assert [t.storage >= 0 for t in backward.tensors()[1:4]] == [not kept] * 3
    if kept:
        (_, weights), size = forward.outputs, 4 if dtype == "fp32" else 2
        assert weights.nbytes == 4 * (8 * 8 + 3 * 8 * 2) * size
        assert weights in backward.tensors()
