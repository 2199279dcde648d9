"""What attention leaves for its backward where no fused kernel runs on a GPU."""

from __future__ import annotations

import pytest

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.cuda_variants import with_cuda_variants


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
    ("kv_heads", "dtype", "masked", "kept"),
    [
        (2, "fp32", False, True),
        (2, "bf16", True, True),
        (2, "bf16", False, False),
        (4, "fp32", True, False),
    ],
)
def test_grouped_queries_without_a_fused_kernel_keep_all_weights(
    kv_heads: int, dtype: str, masked: bool, kept: bool
) -> None:
    """4 heads x (8 x 8 weights + 8 x 2 numbers each of q, k and v); q, k and v are not kept."""
    forward, backward = with_cuda_variants(attention(kv_heads, dtype, masked)).calls
    assert len(forward.outputs) == 1 + kept
    assert [t.storage >= 0 for t in backward.tensors()[1:4]] == [not kept] * 3
    if kept:
        (_, weights), size = forward.outputs, {"fp32": 4, "bf16": 2}[dtype]
        assert weights.nbytes == 4 * (8 * 8 + 3 * 8 * 2) * size
        assert weights in backward.tensors()
