"""Flops and bytes of ops of all families, counted by hand."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from itercast.extras.graphs.sparse import Sparse
from itercast.extras.images.pooling import Pooling
from itercast.extras.lookups.embedding_bag import EmbeddingBag
from itercast.extras.published.experts import Experts
from itercast.extras.recommenders.sparse_update import SparseUpdate
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.matrix import conv_rate
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.ops.matrix.conv import Conv
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.matrix.recurrent import Recurrent
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.ops.memory.random import RandomOp
from itercast.microbench.ops.memory.reduction import Reduction
from itercast.microbench.ops.step.optimizer import OptimizerOp

FAMILY_OF = {f.params: f for f in families().values()}

# two products of 2 b h q k d; Q and O have 2*4*3*8 elements each, K and V 2*2*6*8 each
HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 3, "kv_len": 6, "head_dim": 8}
ATTENTION = Attention(op="forward", causal=False, **HEADS)
PRODUCT = 2 * 2 * 4 * 3 * 6 * 8

# 5x7 to 3x4; each output sums 2 channels * 9 taps
WINDOW = {"kernel_h": 3, "kernel_w": 3, "stride": 2, "padding_h": 1, "padding_w": 1}
IMAGES = {"batch": 2, "in_channels": 4, "out_channels": 6, "h": 5, "w": 7}
CONV = Conv(op="forward", groups=2, bias=True, **IMAGES, **WINDOW)
CONV_FLOPS = 2 * 2 * 6 * (3 * 4) * (2 * 9)
X, W, Y = 2 * 4 * 5 * 7, 6 * 2 * 9, 2 * 6 * 3 * 4
CONV_BACK = replace(CONV, op="backward")
UP = Conv(
    op="forward",
    transposed=True,
    **{"batch": 1, "in_channels": 4, "out_channels": 2, "h": 3, "w": 3},
    **{"kernel_h": 2, "kernel_w": 2, "stride": 2},
)

LAYER, BATCH = partial(Norm, rows=3, cols=8), partial(Norm, rows=2, cols=9, channels=4)
ROWS = partial(Reduction, outer=3, size=8)
BAGS = EmbeddingBag(op="forward", rows=10, dim=4, bags=2, lookups=6)  # bags of three rows of ten
INDEX = partial(IndexOp, outer=2, size=3, inner=4, source=5)  # 2 x 3 of 5 slots, runs of 4
N, FULL = 24, 40
PLANES = {"batch": 2, "channels": 3, "h": 8, "w": 8, "out_h": 4, "out_w": 4}
POOL = Pooling(
    **{"op": "max_pool2d_with_indices", "kernel_h": 3, "kernel_w": 3, "stride_h": 2, "stride_w": 2},
    **PLANES,
)
DROPOUT = RandomOp(op="native_dropout", size=100)
# 15 cells, four gates of 8, of inputs and state
LSTM = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)
LSTM_FLOPS = 2 * 15 * 32 * (6 + 8) + 25 * 15 * 8
LSTM_BYTES = 4 * (15 * (6 + 2 * 8 + 32) + 32 * (6 + 8 + 2))
# 6 lookups of 4 columns in a table of 10 rows, which touch 3 rows 1, 2 and 3 times
STREAM: dict[str, Any] = {"rows": 10, "dim": 4, "lookups": 6, "unique": 3}
STREAM |= {"reuse": "0.3333 0.3333 0.3333"}
UPDATE = SparseUpdate(op="sgd", **STREAM)
# 5 values in 3 x 4, times 4 x 2: values, columns and row pointers; 4 rows read, 3 written
SPARSE = Sparse(rows=3, cols=4, nnz=5, width=2)
DENSE_BYTES = 5 * 4 + 4 * 2 * 4 + 3 * 2 * 4
# 4 tokens of 8 numbers, each to 2 of 4 experts of width 16: 8 pairs, each three products of 8 x 16
EXPERTS = Experts(op="layer", tokens=4, hidden=8, inner=16, experts=4, topk=2, local=4)
USED = 4 * (1 - 0.5**4)  # each expert gets a token with a chance of 15 / 16

COUNTED: list[tuple[Any, float | None, float | None]] = [
    (Gemm(m=2, n=3, k=4), 2 * 2 * 3 * 4, (8 + 12 + 6) * 4),
    (Gemm(op="grouped_mm", m=8, n=16, k=32, batch=3), 2 * 3 * 8 * 16 * 32, None),
    (ATTENTION, 2 * PRODUCT, (2 * 192 + 2 * 192) * 4),
    (replace(ATTENTION, op="backward"), 5 * PRODUCT, None),
    (replace(ATTENTION, causal=True), PRODUCT / 2, None),  # 0.5 * 3/6 of two products
    (replace(ATTENTION, masked=True), None, 768 * 4 + 2 * 3 * 6),
    (CONV, CONV_FLOPS, (X + W + Y + 6) * 4),
    (CONV_BACK, 2 * CONV_FLOPS, (Y + (W + X) + (X + W + 6)) * 4),
    (replace(CONV_BACK, need_input_grad=False), CONV_FLOPS, (Y + X + W + 6) * 4),
    (UP, 2 * 9 * 4 * 2 * 4, (4 * 9 + 4 * 2 * 4 + 2 * 36) * 4),  # of input pixels; 3x3 to 6x6
    (LAYER(op="layer"), 8 * 24, (2 * 24 + 2 * 8) * 4),  # x, y, scale, shift
    (LAYER(op="rms_backward"), None, (3 * 24 + 2 * 8) * 4),  # x, dy, dx, scale, its gradient
    (BATCH(op="batch_backward"), 12 * 72, (3 * 72 + 3 * 4) * 4),
    (ROWS(op="_softmax"), 5 * 24, 2 * 24 * 4),
    (ROWS(op="_softmax_backward_data"), None, 3 * 24 * 4),
    (ROWS(op="sum", inner=2), None, (48 + 6) * 4),
    (ROWS(op="max"), None, (24 + 3) * 4 + 3 * 8),  # and int64 indices
    (ROWS(op="nll_loss_forward"), None, 3 * (8 + 4)),  # target, element
    (ROWS(op="nll_loss_backward"), None, 3 * 8 + 24 * 4),
    (Reduction(op="mse_loss", outer=1, size=8), None, (2 * 8 + 1) * 4),
    (BAGS, 6 * 4, (6 + 2) * 4 * 4 + 8 * (6 + 2)),
    (replace(BAGS, op="backward"), None, (2 + 10 + 2 * 6) * 4 * 4 + 8 * (6 + 2)),
    (replace(BAGS, op="sparse_backward", rows=10**6), 0, (2 + 6) * 16 + 8 * (6 + 2)),  # no table
    (replace(BAGS, tables=3), 6 * 4, (6 + 2) * 4 * 4 + 8 * (6 + 2)),  # one call is on one table
    (POOL, 6 * 16 * 9, 6 * ((64 + 16) * 4 + 16 * 8)),  # and int64 indices
    (replace(POOL, op="max_pool2d_with_indices_backward"), 6 * 16, None),
    (replace(POOL, op="avg_pool2d"), None, 6 * (64 + 16) * 4),
    (Pooling(op="_adaptive_avg_pool2d", **PLANES), 6 * 16 * 4, None),
    (Pooling(op="upsample_bilinear2d", **PLANES), 6 * 16 * 8, None),
    (INDEX(op="gather"), None, 2 * N * 4 + 8 * N),
    (INDEX(op="index_select"), None, 2 * N * 4 + 8 * 3),
    (INDEX(op="scatter_add_"), None, 3 * N * 4 + 8 * N),  # values and sums read, sums written
    (INDEX(op="scatter_add"), None, 3 * N * 4 + 8 * N + 2 * FULL * 4),  # into a copy
    (INDEX(op="cat", source=3, tensors=3), None, 2 * N * 4),
    (INDEX(op="slice_backward"), None, (N + FULL) * 4),
    (INDEX(op="constant_pad_nd"), None, (N + FULL) * 4),
    (INDEX(op="slice_scatter"), None, (2 * N + 2 * FULL) * 4),
    (INDEX(op="repeat"), None, (8 + N) * 4),  # read once, written three times
    (INDEX(op="topk", k=2), None, (N + 16) * 4 + 16 * 8),
    (IndexOp(op="nonzero", outer=1, size=30, source=100, dtype="bool"), 0, 2 * 100 + 8 * 30),
    (INDEX(op="sort"), None, 2 * N * 4 + N * 8),
    (INDEX(op="unfold_backward", k=2), None, (48 + FULL) * 4),
    (IndexOp(op="sort", outer=2, size=8, inner=4), 64 * 3, None),
    (IndexOp(op="index_add_", outer=2, size=8, inner=4), 64, None),
    (IndexOp(op="topk", outer=2, size=8, inner=4, k=4), 64 + 32 * 2, None),
    (DROPOUT, None, 100 * (4 + 4 + 1)),  # x, y, mask
    (replace(DROPOUT, op="native_dropout_backward"), 100, None),
    (replace(DROPOUT, op="normal_"), 10 * 100, None),
    (replace(DROPOUT, op="bernoulli_"), None, 100 * 4),
    (replace(DROPOUT, op="multinomial", rows=3, draws=2), None, 3 * 100 * 4 + 3 * 2 * 8),
    (LSTM, LSTM_FLOPS, LSTM_BYTES),
    (replace(LSTM, op="lstm_backward"), 2 * LSTM_FLOPS, 2 * LSTM_BYTES),
    (UPDATE, 2 * 6 * 4, 3 * 6 * 4 * 4 + 6 * 8),
    (replace(UPDATE, tables=3), 2 * 6 * 4, 3 * 6 * 4 * 4 + 6 * 8),
    # nine passes over the three touched rows alone
    (replace(UPDATE, op="adagrad"), 2 * 6 * 4 + 6 * 3 * 4, (3 * 6 + 9 * 3) * 4 * 4 + 6 * 8),
    (SPARSE, 2 * 5 * 2, DENSE_BYTES + 8 * (5 + 3 + 1)),
    (replace(SPARSE, layout="coo"), None, DENSE_BYTES + 8 * 2 * 5),
    (replace(SPARSE, layout="csc"), None, DENSE_BYTES + 8 * (5 + 4 + 1)),
    # (3, 2) @ (2, 4) at 5 places, whose values are read and written
    (replace(SPARSE, op="sddmm"), 2 * 5 * 2, 2 * 5 * 4 + 8 * (5 + 3 + 1) + (3 + 4) * 2 * 4),
    # two values touch two rows at most of 100
    (Sparse(rows=100, cols=100, nnz=2, width=8), None, 2 * 4 + 8 * 103 + (2 + 100) * 8 * 4),
    (EXPERTS, 2 * 8 * 3 * 8 * 16, 4 * (USED * 8 * 16 * 3 + 8 * (8 + 8))),
    (replace(EXPERTS, op="gate_up"), 2 * 8 * 2 * 8 * 16, None),
    (replace(EXPERTS, op="down"), 2 * 8 * 8 * 16, None),
    (replace(EXPERTS, op="down_full"), 3 * 2 * 8 * 8 * 16, None),
    (replace(EXPERTS, local=2), 8 * 3 * 8 * 16, None),  # of two ranks each does half
    (replace(EXPERTS, inner=8), 8 * 3 * 8 * 16, None),
    (Elementwise(op="add", numel=128, inner=16, tensors=2, form="row"), None, 128 * 2 * 4),
    (Elementwise(op="fp8_cast", numel=100, inner=100, dtype="bf16"), None, 100 * (2 + 1)),
    (OptimizerOp(op="_foreach_add_list", tensors=2, numel=8), None, 3 * 8 * 4),
]


@pytest.mark.parametrize(("p", "flops", "nbytes"), COUNTED)
def test_flops_and_bytes_by_hand(p: Any, flops: float | None, nbytes: float | None) -> None:
    family = FAMILY_OF[type(p)]
    for formula, expected in ((family.flops, flops), (family.bytes_moved, nbytes)):
        assert expected is None or float(formula(p)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gpu", "dtype", "tflops"),
    [
        ("h100-sxm-80gb", "bf16", 132 * 1.98 * 2.048),  # units could do twice as much
        ("h100-sxm-80gb", "fp32", 132 * 1.98 * 0.128),
        ("a100-sxm-80gb", "tf32", 156),
        ("v100-sxm-16gb", "fp16", 125),
        ("mi210", "fp16", 181),
    ],
)
def test_convolutions_use_no_more_of_an_sm_than_on_an_a100(
    gpu: str, dtype: str, tflops: float
) -> None:
    one = Conv(
        op="forward", batch=1, in_channels=8, out_channels=8, h=8, w=8, kernel_h=1, kernel_w=1
    )
    known = load_gpu(gpu)
    bound = min(float(conv_rate.rate(replace(one, dtype=dtype), known)), known.full_rate(dtype))
    assert bound / 1e12 == pytest.approx(tflops, rel=0.02)


def test_one_tap_strides_and_dilation_leave_no_flop_out() -> None:
    """8 x 8 pixels, 4 channels in and 4 out: 2 * 64 * 4 * 4 * 9 FLOP, which Winograd's lessen."""
    family = families()["conv"]
    assert family.least_flops is not None
    least, of_products = family.least_flops, lambda dtype: 12.8e12

    def h100(p: Conv) -> Any:
        return least(p, load_gpu("h100-sxm-80gb"), of_products)

    def v100(p: Conv) -> Any:
        return least(p, load_gpu("v100-pcie-32gb"), of_products)

    plain = Conv(
        op="forward", batch=1, in_channels=4, out_channels=4, h=8, w=8, kernel_h=3, kernel_w=3
    )
    plain = replace(plain, padding_h=1, padding_w=1, dtype="fp32")
    assert (family.flops(plain), h100(plain)) == (18432, 0)
    dilated = replace(plain, dilation=2, padding_h=2, padding_w=2)
    assert h100(dilated) == 18432
    assert h100(replace(plain, stride=2)) == 18432 / 4
    one_tap = replace(plain, kernel_h=1, kernel_w=1, padding_h=0, padding_w=0)
    assert h100(one_tap) == 2048
    # products reach 12.8 of 14 TFLOP/s on a V100, such convolutions in fp32 0.90 of that
    assert v100(dilated) == pytest.approx(18432 / (0.90 * 12.8 / 14))
    assert v100(replace(dilated, dtype="fp16")) == 18432
    assert v100(plain) == 0
