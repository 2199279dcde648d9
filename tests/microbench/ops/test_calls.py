"""What families read out of captured calls, and how they build them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from op_calls import TOY, described, logged, spec
from torch import nn
from torch.nn import functional

from itercast.capture.opcall import OpCall
from itercast.extras.images import pooling
from itercast.microbench.ops import find_family
from itercast.microbench.ops.calls import call_of
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.matrix import attention, conv, gemm, recurrent
from itercast.microbench.ops.matrix.gemm import GROUPED, Gemm, build, flops, from_grouped
from itercast.microbench.ops.memory import norm, reduction
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.memory.random import RandomOp
from itercast.microbench.ops.step.optimizer import OptimizerOp, bytes_moved

HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 3, "kv_len": 6, "head_dim": 8}
MASKED = attention.Attention(op="backward", causal=False, masked=True, dropout=True, **HEADS)
Q, K = spec(2, 4, 3, 8), spec(2, 2, 6, 8)
HEADLESS = {"batch": 5, "heads": 1, "kv_heads": 1, "kv_len": 3}
FACTS = {"is_causal": False, "dropout_p": 0.1, "enable_gqa": True, "masked": True}
FILLED = Elementwise(op="where", numel=24, inner=12, tensors=2, form="row")
COPIED = replace(FILLED, op="masked_fill")
FP8 = (replace(spec(16, 32), dtype="fp8"), replace(spec(32, 48, stride=(1, 32)), dtype="fp8"))
SUM = partial(reduction.Reduction, op="sum", outer=1)


def call(op: str, *args: Any, outputs: tuple[Any, ...] = (), **kwargs: Any) -> OpCall:
    return OpCall(op=op, args=args, kwargs=kwargs, outputs=outputs)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (
            call("aten.addmm.default", spec(3), spec(2, 4), spec(4, 3, stride=(1, 4))),
            Gemm(op="addmm", m=2, n=3, k=4, layout="nt"),  # a transposed view
        ),
        (call("aten.mm.dtype", spec(2, 4), spec(4, 3), "torch.float32"), Gemm(m=2, n=3, k=4)),
        (
            call("aten.addbmm.default", spec(2, 3), spec(5, 2, 4), spec(5, 4, 3)),
            Gemm(op="bmm", m=2, n=3, k=4, batch=5),
        ),
        (call("aten.mv.default", spec(2, 4), spec(4)), Gemm(m=2, n=1, k=4)),
        (
            call("aten.addmv.default", spec(2), spec(2, 4, stride=(1, 2)), spec(4)),
            Gemm(op="addmm", m=2, n=1, k=4, layout="tn"),
        ),
        (call("aten.dot.default", spec(4), spec(4)), Gemm(m=1, n=1, k=4)),
        (call("aten.vdot.default", spec(4), spec(4)), Gemm(m=1, n=1, k=4)),
        (
            call("aten.addr.default", spec(2, 3), spec(2), spec(3), outputs=(spec(2, 3),)),
            Elementwise(op="addcmul", numel=6, inner=3, tensors=3, form="row"),
        ),
        (
            call("aten._scaled_mm.default", *FP8, spec(), spec(), None, None, "torch.bfloat16"),
            Gemm(op="scaled_mm", m=16, n=48, k=32, layout="nt", dtype="fp8"),
        ),
        (call("itercast.sdpa_backward", Q, Q, K, K, **FACTS), MASKED),
        (
            call("itercast.sdpa", *(spec(5, 3, 8),) * 3),
            replace(attention.Attention(op="forward", causal=False, **HEADS), **HEADLESS),
        ),
        (
            call("aten.native_layer_norm.default", spec(2, 5, 8), (8,), None, None, 1e-5),
            norm.Norm(op="layer", rows=10, cols=8),
        ),
        (call("aten.sum.dim_IntList", spec(4, 6, 3), (0, 1)), SUM(size=24, inner=3)),
        # in the order of memory
        (call("aten.sum.dim_IntList", spec(4, 6, stride=(1, 4)), (0,)), SUM(outer=6, size=4)),
        (call("aten.sum.default", spec()), SUM(size=1)),
        # a mask of 3 x 4: in place one kernel, as where; out of place a clone as well
        (call("aten.masked_fill_.Scalar", spec(2, 3, 4), spec(3, 4), 0.0), FILLED),
        (call("aten.masked_fill.Scalar", spec(2, 3, 4), spec(3, 4), 0.0), COPIED),
        (call("aten.max.default", spec(4, 6)), SUM(op="amax", size=24)),
        (
            call("aten.add.Tensor", spec(8, 16), spec(16), outputs=(spec(8, 16),)),
            Elementwise(op="add", numel=128, inner=16, tensors=2, form="row"),
        ),
        (
            call("aten._foreach_add_.List", (spec(3), spec(5)), (spec(3), spec(5))),
            OptimizerOp(op="_foreach_add_list", tensors=2, numel=8, aligned_frac=0.0),
        ),
        (  # 6 elements of 10 are in a tensor of which four are not read at once
            call("aten._foreach_mul_.Scalar", (spec(6), spec(4)), 0.9),
            OptimizerOp(op="_foreach_mul_", tensors=2, numel=10, aligned_frac=0.4),
        ),
        (
            call("aten._foreach_div_.List", (spec(8), spec(4)), (spec(8), spec(4))),
            OptimizerOp(op="_foreach_div_", tensors=2, numel=12),
        ),
        (
            call("aten._foreach_div_.List", (spec(8), spec(4)), (spec(), spec())),
            OptimizerOp(op="_foreach_div_each", tensors=2, numel=12),
        ),
    ],
)
def test_a_call_is_read(asked: OpCall, found: Any) -> None:
    assert find_family(asked)[1] == found


X, ROWS = torch.randn(7, 5, requires_grad=True), torch.tensor([[0, 1, 1]])
TAKEN = IndexOp(op="index", outer=1, size=3, inner=5, source=7)
JOINED = IndexOp(op="cat", outer=7, size=9, source=9, tensors=2)
SAMPLED = RandomOp(op="multinomial", size=9, rows=3, draws=2, replacement=True)
IMAGE = torch.randn(2, 3, 9, 8)
SIZES = {"batch": 2, "channels": 3, "h": 9, "w": 8}
MAX = partial(pooling.Pooling, op="max_pool2d_with_indices")


def window(kernel: int, stride: int, padding: int = 0) -> dict[str, int]:
    """The same along height and width."""
    named = {"kernel": kernel, "stride": stride, "padding": padding}
    return {f"{name}_{axis}": value for name, value in named.items() for axis in "hw"}


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (lambda: X[ROWS].sum().backward(), [TAKEN, replace(TAKEN, op="index_put_accumulate")]),
        (lambda: torch.cat([X[:, 1:], X], 1), [JOINED]),
        (lambda: torch.multinomial(torch.ones(3, 9), 2, True), [SAMPLED]),
        (
            lambda: functional.max_pool2d(IMAGE, 3, 2, 1),
            [MAX(out_h=5, out_w=4, **SIZES, **window(3, 2, 1))],
        ),
        (
            lambda: functional.max_pool2d(IMAGE, 2, dilation=2),
            [MAX(out_h=4, out_w=3, dilation=2, **SIZES, **window(2, 2))],
        ),
        (lambda: functional.max_pool2d(IMAGE, 2, dilation=(1, 2)), []),  # uneven: no family
    ],
)
def test_what_runs_is_read(run: Callable[[], Any], found: list[Any]) -> None:
    kinds = (IndexOp, RandomOp, pooling.Pooling)
    assert [p for p in described(run) if isinstance(p, kinds)] == found


def test_products_by_integers_are_products_in_16_bits() -> None:
    """Of 32 x 16 and 16 x 24; they were priced as passes over their memory."""
    rows, matrix = (torch.ones(*shape, dtype=torch.int8) for shape in ((32, 16), (16, 24)))
    found = Gemm(m=32, n=24, k=16, layout="nt", dtype="fp16")
    assert described(lambda: torch._int_mm(rows, matrix)) == [found]
    assert flops(found) == 2 * 32 * 24 * 16
    weights, scales = torch.ones(24, 16, dtype=torch.int8), torch.ones(24, dtype=torch.bfloat16)
    half = torch.ones(32, 16, dtype=torch.bfloat16)
    (packed,) = described(lambda: torch._weight_int8pack_mm(half, weights, scales))
    assert packed == replace(found, dtype="bf16")


def test_pools_of_rows() -> None:
    """An empty stride is the kernel; a dilated pool of one dimension comes from ``max_pool1d``."""
    sizes = {"batch": 3, "channels": 9, "h": 1, "w": 8, "out_h": 1, "out_w": 2}
    found = described(lambda: functional.avg_pool1d(IMAGE[0], 4))
    assert pooling.Pooling(op="avg_pool2d", **sizes, kernel_w=4, stride_w=4) in found
    row = spec(2, 3, 1, 8, stride=(24, 8, 8, 1))
    name = "aten.max_pool2d_with_indices.default"
    ends = (replace(row, shape=(2, 3, 1, 3)),)
    asked = call(name, row, (1, 2), (1, 2), (0, 0), (1, 3), outputs=ends)
    sizes = {"batch": 2, "channels": 3, "h": 1, "w": 8, "out_h": 1, "out_w": 3, "dilation": 3}
    assert pooling.from_call(asked) == MAX(**sizes, kernel_w=2, stride_w=2)
    spaced = MAX(out_h=4, out_w=3, dilation=2, **SIZES, **window(2, 2))
    for op in (spaced.op, f"{spaced.op}_backward"):
        pooling.build(replace(spaced, op=op), "cpu").run()


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_a_product_by_expert_is_built_as_it_is_captured(layout: str) -> None:
    """3 experts of 8 tokens each; weights' gradients are sums over tokens."""
    p = Gemm(op="grouped_mm", m=8, n=16, k=32, batch=3, layout=layout)
    (found,) = [c for c in logged(build(p, "cpu").run) if c.op == GROUPED]
    assert from_grouped(found) == p
    assert found.outputs[0].shape == ((3, 8, 16) if layout == "tn" else (24, 16))


FUSED: dict[str, tuple[Callable[..., Any], int]] = {
    "_fused_adamw_": (partial(torch.optim.AdamW, fused=True), 7),
    "_fused_adam_": (partial(torch.optim.Adam, fused=True), 7),
    "_fused_adam_amsgrad": (partial(torch.optim.AdamW, fused=True, amsgrad=True), 9),
    "_fused_sgd_": (partial(torch.optim.SGD, lr=0.1, fused=True), 3),
    "_fused_sgd_momentum": (partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), 5),
}


@pytest.mark.parametrize("op", FUSED)
def test_a_fused_step_is_read(op: str) -> None:
    """Parameters, gradients and states of two tensors, 8 numbers."""
    parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 5)]
    make, operands = FUSED[op]
    step = make(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    found = [p for p in described(step.step) if "fused" in getattr(p, "op", "")]
    assert found == [OptimizerOp(op=op, tensors=2, numel=8, aligned_frac=0.0)]
    assert bytes_moved(found[0]) == operands * 8 * 4


def convolution(*args: Any, op: str = "convolution") -> OpCall:
    return call(f"aten.{op}.default", *args)


def test_convolutions_of_rows_and_of_unequal_strides() -> None:
    """One dimension is a row. Strides 1 and 2, dilations 2 and 1 keep their outputs: of a row of 9,
    3 taps leave (9 - 3) // 2 + 1 = 4 outputs, at the height's stride 1 and dilation 2 those of a
    row of 4 + 4 = 8.
    """
    row = (spec(2, 8, 100), spec(16, 8, 3), None, (2,), (1,), (1,), False, (0,), 1)
    found: Any = conv.from_call(convolution(*row))
    assert (found.h, found.kernel_h, found.padding_h) == (1, 1, 0)
    assert (found.w, found.kernel_w, found.padding_w) == (100, 3, 1)
    assert conv.flops(found) == 2 * 2 * 16 * 50 * 8 * 3
    rest = (None, (1, 2), (0, 0), (2, 1), False, (0, 0), 1)
    tensors = (spec(1, 2, 9, 9), spec(2, 2, 3, 3))
    found = conv.from_call(convolution(*tensors, *rest))
    assert (found.h, found.w, found.stride, found.dilation) == (9, 8, 1, 2)
    assert [int(n) for n in conv.out_sizes(found)] == [1, 5, 4]
    both = (spec(1, 2, 5, 4), *tensors, (0,), *rest[1:], (True,) * 3)
    back = conv.from_call(convolution(*both, op="convolution_backward"))
    assert back == replace(found, op="backward", bias=True)
    turned = conv.from_call(convolution(*tensors, *rest[:4], True, *rest[5:]))
    assert turned == replace(found, w=9, transposed=True)


def test_a_convolution_over_volumes_keeps_its_pixels_and_runs() -> None:
    """Strides 1, 2, 2: a depth of 9 at stride 2 leaves the 5 outputs that one of 5 does at 1."""
    model, x = nn.Conv3d(4, 6, 3, stride=(1, 2, 2), padding=1), torch.randn(2, 4, 5, 8, 8)
    forward, *_, back = (
        p for p in described(lambda: model(x).sum().backward()) if isinstance(p, conv.Conv)
    )
    assert (forward.batch, forward.in_channels, forward.out_channels) == (2, 4, 6)
    assert (forward.depth, forward.kernel_d, forward.padding_d) == (9, 3, 1)
    assert conv.pixels(forward) == (2 * 9 * 64, 2 * 5 * 16)
    assert conv.flops(forward) == 2 * 2 * (5 * 4 * 4) * 6 * (4 * 27)
    assert (back.op, back.batch, back.need_input_grad) == ("backward", 2, False)
    y: Any = conv.build(forward, "cpu").run()
    assert y.shape == (2, 6, 5, 4, 4)
    conv.build(back, "cpu").run()


def test_a_transposed_convolution_over_volumes_counts_its_inputs() -> None:
    model, x = nn.ConvTranspose3d(4, 6, 2, stride=2), torch.randn(2, 4, 3, 8, 8)
    (found,) = described(lambda: model(x))
    assert conv.flops(found) == 2 * 2 * (3 * 8 * 8) * 4 * (6 * 8)


@pytest.mark.parametrize(
    ("layer", "op", "taps", "outputs"),
    [
        (nn.MaxPool3d(2), "max_pool2d_with_indices", 8, 2 * 4 * 4),
        (nn.MaxPool3d(2, dilation=3), "max_pool2d_with_indices", 8, 1 * 3 * 3),
        (nn.AvgPool3d((1, 2, 2)), "avg_pool2d", 4, 4 * 4 * 4),
        (nn.AdaptiveAvgPool3d((2, 4, 4)), "_adaptive_avg_pool2d", 8, 2 * 4 * 4),
        (nn.Upsample(scale_factor=2, mode="trilinear"), "upsample_bilinear2d", 8, 8 * 16 * 16),
    ],
)
def test_pools_of_volumes_are_pools_of_all_their_rows(
    layer: nn.Module, op: str, taps: int, outputs: int
) -> None:
    x = torch.randn(1, 3, 4, 8, 8, requires_grad=True)
    forward, back = (
        p for p in described(lambda: layer(x).sum().backward()) if isinstance(p, pooling.Pooling)
    )
    assert (forward.op, back.op) == (op, f"{op}_backward")
    assert pooling.flops(forward) == 3 * outputs * taps
    assert forward.h * forward.w == 4 * 8 * 8
    assert back.out_h * back.out_w == outputs


LAYER = recurrent.Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)


def test_lstms_are_read_layer_by_layer_and_direction() -> None:
    model, x = nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True), torch.randn(3, 5, 6)
    found = [p for p in described(lambda: model(x)[0].sum().backward()) if p is not None]
    layers = [p for p in found if isinstance(p, recurrent.Recurrent)]
    second = recurrent.Recurrent(op="lstm", steps=5, batch=3, inputs=16, hidden=8)
    assert layers[:4] == [LAYER, LAYER, second, second]
    assert [p.inputs for p in layers[4:]] == [16, 16, 6, 6]
    assert {p.op for p in layers[4:]} == {"lstm_backward"}


def test_a_gpu_runs_a_network_of_two_layers_and_directions_as_one_op() -> None:
    """Four times a GRU's 15 cells, three gates of 8; inputs of 6 and 16, a state of 8."""
    network = recurrent.Recurrent(
        op="gru", steps=5, batch=3, inputs=6, hidden=8, layers=2, directions=2
    )
    assert recurrent.flops(network) == 30 * (2 * 24 * (6 + 16 + 2 * 8) + 25 * 2 * 8)
    values, weights = 15 * (6 + 16 + 4 * (2 + 3) * 8), 2 * 24 * (6 + 16 + 2 * (8 + 2))
    assert recurrent.bytes_moved(network) == 4 * (values + weights)
    assert recurrent.saved_numel(network) == 4 * 15 * 8 * 5


@pytest.mark.parametrize("op", recurrent.GATES)
def test_the_steps_of_a_layer_are_timed_as_the_module_runs_them(op: str) -> None:
    """On a CPU, of GRUs alone, forward makes nodes for autograd, as in training."""
    layer, cell = replace(LAYER, op=op, inputs=1), op.removesuffix("_backward")
    x, h, c, grad = (torch.randn(s) for s in ((5, 3, 1), (3, 8), (3, 8), (5, 3, 8)))
    x.requires_grad_()
    made: Any = recurrent._module(layer, x, h, c, grad)()
    if op == cell:
        assert (made.shape, made.requires_grad) == ((5, 3, 8), True)
    else:
        rows = recurrent.GATES[op] * 8
        shapes = [(5, 3, 1), (rows, 1), (rows, 8), (rows,), (rows,)]
        assert [tuple(g.shape) for g in made] == shapes


def test_cpus_are_swept_for_whole_layers_of_lstms_and_for_steps_of_grus() -> None:
    found = list(islice(recurrent.FAMILY.sweep(), 40))
    assert {p.op for p in found} == {"lstm", "lstm_backward", "gru", "gru_backward"}
    assert {p.inputs == 1 for p in found if p.op.startswith("gru")} == {True}
    assert max(p.inputs for p in found if p.op.startswith("lstm")) > 1


def test_a_statistic_covers_a_row_a_channel_or_a_group() -> None:
    sizes: dict[str, Any] = {"rows": 2, "cols": 16, "channels": 8, "groups": 4}
    batch = norm.features(norm.Norm(op="batch", **{**sizes, "groups": 1}), TOY)
    group = norm.features(norm.Norm(op="group", **sizes), TOY)
    assert (batch["log_statistics"], batch["log_normalised"]) == (3, 5)  # 8 of 2*16
    assert (group["log_statistics"], group["log_normalised"]) == (3, 5)  # 2*4 of 2*16


def test_a_cpu_is_swept_in_bf16_in_every_layout() -> None:
    """The first 150 products have each layout in bf16 three times, and none of them takes long.

    Without instructions for bf16 a CPU multiplies at 1 GFLOP/s in layout nn (gradients of inputs)
    and at 15 in tn: half of a step's time cannot be told from rows of another layout.
    """
    half = [p for p in islice(gemm.FAMILY.sweep(), 150) if p.dtype == "bf16"]
    layouts = Counter(p.layout for p in half)
    assert set(layouts) == {"nn", "nt", "tn"} and min(layouts.values()) >= 3
    assert max(map(flops, half)) <= 1e9  # a second at that rate


def test_a_timed_call_tries_no_other_overload() -> None:
    """``torch.ops.aten.lerp`` takes the weight for a number: it prints the tensor into an error."""
    tensors = {name: torch.rand(3, 4) for name in "xyz"}

    def profiled(run: Callable[[], object]) -> set[str]:
        with torch.autograd.profiler.profile() as found:
            run()
        return {event.name for event in found.function_events}

    assert profiled(call_of("lerp", ["x", "y", "z"], tensors)) == {"aten::lerp"}
    assert len(profiled(lambda: torch.ops.aten.lerp(*tensors.values()))) > 1
