"""Steps as a CUDA graph or torch.compile runs them, counted by hand."""

from collections import Counter
from dataclasses import replace

import pytest
from plan_case import call, tensor

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import (
    as_launched,
    engine_on,
    launches,
    with_engine,
    with_gates_again,
)
from itercast.compose.graph.lifetimes import input_bytes
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.fused import Fused


def step() -> StepCapture:
    """relu and mul after a product, an add after another; the backward reads what relu gave."""
    x, w = tensor(0, 4, 8), tensor(1, 8, 8)
    a, b, c, d, e = (tensor(n, 4, 8) for n in range(2, 7))
    calls = (
        call("mm.default", [x, w], a),
        call("relu.default", [a], b),
        call("mul.Tensor", [b, b], c),
        call("mm.default", [c, w], d),
        call("add.Tensor", [d, x], e),
        call("threshold_backward.default", [e, b], tensor(7, 4, 8), "backward"),
        call("mm.default", [tensor(7, 4, 8), w], tensor(8, 4, 8), "backward"),
    )
    weight = ParamSpec(name="w", shape=(8, 8), dtype="fp32", storage=1, ready_after=6)
    host = {"module_call": 3, "view_op": 5, "accumulate_grad": 1, "adamw_step": 1}
    return StepCapture(calls=calls, parameters=(weight,), host=host)


def test_frameworks_with_kernels_of_their_own_run_these_unless_compiled() -> None:
    stacks = ("megatron-core", "nemo", "transformer-engine", "deepspeed", "torch-2.11")
    assert [engine_on(s, "eager") for s in stacks] == ["fused"] * 3 + ["eager"] * 2
    assert engine_on("megatron-core", "compile") == "compile"


def test_pointwise_neighbours_become_one_kernel() -> None:
    """relu and mul read a once (128 B) and write c; the backward makes relu's b of a again."""
    found = as_launched(with_engine(step(), "compile"))
    ops = [c.op for c in found.calls]
    assert ops == [
        "aten.mm.default",
        "itercast.fused",
        "aten.mm.default",
        "itercast.fused",  # the add
        "itercast.fused",  # another phase: the backward's
        "aten.mm.default",
    ]
    family, params = find_family(found.calls[1])
    assert family is not None and family.name == "fused"
    assert params == Fused(ops=2, numel=32, read_bytes=128, written_bytes=128)
    assert family.bytes_moved(params) == 256
    assert [t.storage for t in found.calls[4].args] == [6, 2]  # e and a
    framework = as_launched(with_engine(step(), "fused+graph")).calls[1]  # its b is kept
    assert find_family(framework)[1] == replace(params, written_bytes=256)
    assert find_family(found.calls[3])[1] == Fused(
        ops=1, numel=32, read_bytes=256, written_bytes=128
    )
    assert found.parameters[0].ready_after == 5
    # forward and backward are a compiled function each
    assert dict(found.host) == {"accumulate_grad": 1, "adamw_step": 1, "compiled_call": 2}
    assert launches(found) == 6


def kernel(*calls: OpCall) -> Fused:
    """The one kernel that torch.compile makes of these calls."""
    (found,) = as_launched(with_engine(StepCapture(calls=calls), "compile")).calls
    _, params = find_family(found)
    assert isinstance(params, Fused)
    return params


def test_a_row_is_read_again_where_its_outputs_await_all_of_it() -> None:
    """Of 4 rows of 32 B: x - x.mean() and a softmax read 128 B twice; a sum alone and relu once."""
    x, y, rows = tensor(0, 4, 8), tensor(1, 4, 8), tensor(2, 4, 1)
    mean = OpCall(op="aten.mean.dim", args=(x, (1,), True), outputs=(rows,))
    found = kernel(mean, call("sub.Tensor", [x, rows], y))
    assert (found.read_bytes, found.again_bytes, found.row_bytes) == (128, 128, 32)
    softmax = OpCall(op="aten._softmax.default", args=(x, 1, False), outputs=(y,))
    assert (kernel(softmax).again_bytes, kernel(softmax).row_bytes) == (128, 32)
    across = replace(softmax, args=(x, 0, False))  # 8 columns of 16 B
    assert (kernel(across).again_bytes, kernel(across).row_bytes) == (128, 16)
    norm = OpCall(
        op="aten.native_layer_norm.default",
        args=(x, (8,), tensor(3, 8), tensor(4, 8), 1e-5),
        outputs=(y, rows, tensor(5, 4, 1)),
    )
    assert (kernel(norm).again_bytes, kernel(norm).row_bytes) == (128, 32)
    root = call("rsqrt.default", [rows], tensor(6, 4, 1))  # a number per row, between the two
    scaled = call("mul.Tensor", [x, tensor(6, 4, 1)], y)
    assert kernel(mean, root, scaled).again_bytes == 128
    inputs = [y, x, (8,), rows, tensor(5, 4, 1), tensor(3, 8)]
    grads = call("native_layer_norm_backward.default", inputs, tensor(9, 4, 8))
    assert (kernel(grads).again_bytes, kernel(grads).row_bytes) == (256, 64)  # gradient and input
    softmax_grads = call("_softmax_backward_data.default", [y, x, 1], tensor(9, 4, 8))
    assert kernel(softmax_grads).again_bytes == 256
    once = (kernel(mean), kernel(mean, root), kernel(call("relu.default", [x], y)))
    assert {(k.again_bytes, k.row_bytes) for k in once} == {(0, 0)}
    beside = kernel(mean, call("relu.default", [x], y))  # the mean is for others
    assert beside.again_bytes == 0


def kernels(*calls: OpCall) -> list[tuple[int, int, int]]:
    """Number of ops, bytes read and bytes written of each kernel that torch.compile makes."""
    found = as_launched(with_engine(StepCapture(calls=calls), "compile")).calls
    read = [sum(t.nbytes for t in c.args) for c in found]
    written = [sum(t.nbytes for t in c.outputs) for c in found]
    return list(zip((c.kwargs["ops"] for c in found), read, written, strict=True))


def test_a_rotary_embedding_is_one_kernel() -> None:
    """x * cos + cat(-right, left) * sin: x, cos, sin read (128 B each), the result written."""
    x, cos, sin = (tensor(n, 4, 8) for n in range(3))
    half, turned = tensor(3, 4, 4), tensor(4, 4, 8)
    calls = (
        call("mul.Tensor", [x, cos], tensor(5, 4, 8)),
        call("neg.default", [tensor(0, 4, 4)], half),  # the right half of x
        OpCall(op="aten.cat.default", args=((half, tensor(0, 4, 4)), -1), outputs=(turned,)),
        call("mul.Tensor", [turned, sin], tensor(6, 4, 8)),
        call("add.Tensor", [tensor(5, 4, 8), tensor(6, 4, 8)], tensor(7, 4, 8)),
    )
    assert kernels(*calls) == [(5, 3 * 128, 128)]


def test_a_norm_of_single_ops_is_one_kernel() -> None:
    """x * rsqrt(mean(x ** 2)) over rows: 128 B each way. Over columns x is read by two kernels."""
    x, square, y = tensor(0, 4, 8), tensor(1, 4, 8), tensor(5, 4, 8)

    def norm(dim: int, *shape: int) -> list[OpCall]:
        mean, root = tensor(2, *shape), tensor(3, *shape)
        return [
            call("pow.Tensor_Scalar", [x], square),
            OpCall(op="aten.mean.dim", args=(square, (dim,), True), outputs=(mean,)),
            call("rsqrt.default", [mean], root),
            call("mul.Tensor", [x, root], y),
        ]

    assert kernels(*norm(1, 4, 1)) == [(4, 128, 128)]
    assert kernels(*norm(0, 1, 8)) == [(3, 128, 32), (1, 128 + 32, 128)]


def test_weights_gradients_of_a_norm_read_both_tensors_again() -> None:
    """Rows: gradient, input (128 B each), mean, root (16 each), weight (32) to dx; then columns."""
    y, x, w = tensor(0, 4, 8), tensor(1, 4, 8), tensor(4, 8)
    mean, root = tensor(2, 4, 1), tensor(3, 4, 1)
    grads = OpCall(
        op="aten.native_layer_norm_backward.default",
        args=(y, x, (8,), mean, root, w),
        outputs=(tensor(5, 4, 8), tensor(6, 8), tensor(7, 8)),
        phase="backward",
    )
    assert kernels(grads) == [(1, 2 * 128 + 2 * 16 + 32, 128), (1, 2 * 128 + 2 * 16 + 32, 2 * 32)]


def test_tensors_of_another_size_begin_another_kernel() -> None:
    small = call("relu.default", [tensor(0, 4)], tensor(1, 4))
    large = call("relu.default", [tensor(2, 8)], tensor(3, 8))
    found = as_launched(with_engine(StepCapture(calls=(small, small, large)), "compile"))
    assert [c.kwargs["ops"] for c in found.calls] == [2, 1]


def test_an_adam_that_is_captured_divides_each_tensor_by_a_number_of_its_own() -> None:
    """8 calls over counters, then two lists of divisions instead of numbers."""
    eager = capture("mlp-s", optimizer="adamw")
    graphs = [as_launched(with_engine(eager, engine)) for engine in ("graph", "compile+graph")]
    for found in graphs:
        names = Counter(c.op.split(".", 1)[1] for c in found.calls if c.phase == "optimizer")
        assert names["_foreach_div_.List"] == 2 and names["_foreach_pow.ScalarAndTensor"] == 2
        assert "_foreach_div_.ScalarList" not in names
        counters = [c for c in found.calls if c.phase == "optimizer" and _is_counters(c)]
        assert len(counters) == 1 + 8  # the first adds a step
        corrected = [c for c in found.calls if c.op == "aten._foreach_div_.List"]
        assert all(len(c.args[0]) == len(c.args[1]) for c in corrected)
        assert {t.shape for c in corrected for t in c.args[1]} == {()}
    assert as_launched(with_engine(eager, "eager+graph")).calls[1:] == eager.calls  # a batch's copy
    sgd = capture("mlp-s", optimizer="sgd")
    assert as_launched(with_engine(sgd, "graph")).calls == sgd.calls


def _is_counters(call: OpCall) -> bool:
    return {t.shape for t in call.args[0 if isinstance(call.args[0], tuple) else 1]} == {()}


def test_a_foreach_call_is_launched_in_pieces() -> None:
    """A hundred tensors: 64 of two lists fit one launch, 48 of three; a root has its results."""

    def foreach(name: str, lists: int) -> OpCall:
        return OpCall(op=f"aten.{name}", args=((tensor(0, 4),) * 100,) * lists)

    calls = (foreach("_foreach_mul_.Scalar", 1), foreach("_foreach_sqrt.default", 1))
    calls += (foreach("_foreach_lerp_.Scalar", 2), foreach("_foreach_addcmul_.Scalar", 3))
    calls += (foreach("cat.default", 1),)
    assert [launches(StepCapture(calls=(c,))) for c in calls] == [1, 2, 2, 3, 1]


@pytest.mark.parametrize(
    ("engine", "kernels", "launched", "events"),
    [
        ("eager", "eager", 7, set(step().host)),
        ("graph", "eager", 1, set()),  # no Python
        ("compile+graph", "compile", 1, {"graphed_call"}),  # one compiled function replays it
        ("eager+graph", "eager", 1, {"graphed_call"}),  # the cudagraphs backend
        ("fused", "fused+graph", 6, set(step().host)),  # a framework's kernels in an eager loop
        ("fused+graph", "fused", 1, {"graphed_call"}),
    ],
)
def test_engines_have_kernels_launches_and_events(
    engine: str, kernels: str, launched: int, events: set[str]
) -> None:
    found = with_engine(step(), engine)
    ops = [[c.op for c in as_launched(with_engine(step(), e)).calls] for e in (engine, kernels)]
    assert ops[0] == ops[1]
    assert launches(as_launched(found)) == launched
    assert {name for name, n in found.host.items() if n} == events
    assert "adamw_step" in found.host  # the optimizer is still known by its name


@pytest.mark.parametrize("engine", ["compile+graph", "eager+graph"])
def test_a_compiled_function_copies_the_batch_into_its_graph(engine: str) -> None:
    """x, which the ops read, is copied: 128 B read and written. Not w, a parameter, nor labels."""
    x, labels = tensor(0, 4, 8), tensor(99, 4)
    given = replace(step(), inputs=(x, labels))
    for other in ("eager", "graph", "compile", "fused"):  # read what the user fills
        ops = {c.op for c in as_launched(with_engine(given, other)).calls}
        assert "aten.copy_.default" not in ops
    found = as_launched(with_engine(given, engine))
    copy, *others = found.calls
    assert others == list(as_launched(with_engine(step(), engine)).calls)
    assert (copy.op, copy.outputs) == ("aten.copy_.default", (x,))
    source = copy.tensors()[1]
    assert source == replace(x, storage=source.storage) and source.storage not in range(9)
    family, params = find_family(copy)
    assert family is not None and family.bytes_moved(params) == 256
    graph = as_launched(with_engine(step(), engine)).parameters[0]
    assert found.parameters[0].ready_after == graph.ready_after + 1  # one call later
    assert launches(found) == 1


def loss_step(dtype: str = "fp32", *, cut: bool = False) -> StepCapture:
    """Logits of 4 tokens and 8 words, their cross entropy both ways; ``cut``: as under tp."""
    x, y, gy, dx = (replace(tensor(n, 4, 8), dtype=dtype) for n in range(4))
    one = tensor(5)
    labels = replace(tensor(4, 4), dtype="int64")
    softmax = call("_log_softmax.default", [x], y)
    forward = [replace(softmax, args=(x, 1, False))]
    back = [call("_log_softmax_backward_data.default", [gy, y], dx, "backward")]
    back = [replace(back[0], args=(gy, y, 1))]
    if cut:
        maximum, total, shifted, exp = (
            tensor(6, 4, 1),
            tensor(11, 4, 1),
            tensor(12, 4, 8),
            tensor(13, 4, 8),
        )
        forward = [call("amax.default", [x], maximum), call("sub.Tensor", [x, maximum], shifted)]
        forward += [call("exp.default", [shifted], exp), call("sum.dim_IntList", [exp], total)]
        forward += [call("sub.Tensor", [shifted, total], y)]
        back = [call(f"{op}.Tensor", [gy, y], dx, "backward") for op in ("add", "mul")]
    calls = (
        call("mm.default", [tensor(7, 4, 2), tensor(8, 2, 8)], x),
        *forward,
        call("nll_loss_forward.default", [y, labels], one),
        call("nll_loss_backward.default", [one, y, labels], gy, "backward"),
        *back,
        call("mm.default", [tensor(9, 2, 4), dx], tensor(10, 2, 8), "backward"),
    )
    weight = ParamSpec(name="w", shape=(2, 8), dtype="fp32", storage=8, ready_after=len(calls) - 1)
    return StepCapture(calls=calls, parameters=(weight,))


def names(step: StepCapture) -> list[str]:
    return [c.op.split(".")[1] for c in step.calls]


def test_megatrons_cross_entropy_passes_over_the_logits_ten_times() -> None:
    """4 x 8 in fp32 are 128 B: amax 1, sub 2, exp 2, sum 1, div 2 of them, and backward 2."""
    found = as_launched(with_engine(loss_step(), "fused"))
    chain = ["amax", "sub", "exp", "sum", "div"]
    assert names(found) == ["mm", *chain, "nll_loss_forward", "mul", "mm"]
    passes = [[t.nbytes for t in (*c.tensors(), *c.outputs)].count(128) for c in found.calls[1:6]]
    assert passes == [1, 2, 2, 1, 2]
    assert [t.nbytes for t in found.calls[7].tensors()] == [128, 16]  # and one number per token
    assert found.calls[8].args[1] == found.calls[7].outputs[0]
    assert found.parameters[0].ready_after == 8
    wide = [t for c in found.calls[:8] for t in (*c.tensors(), *c.outputs) if t.nbytes == 128]
    assert {t.storage for t in wide} == {0}  # each pass overwrites the one before


def test_an_unknown_engine_is_named() -> None:
    assert with_engine(step(), "eager") == step()
    with pytest.raises(
        ValueError, match=r"engine 'jit': allowed are eager, graph, compile, compile\+graph, fused"
    ):
        with_engine(step(), "jit")


def test_long_chains_that_branch_are_followed_once() -> None:
    """Each of 100 products reads the one before twice: 2 ** 100 ways back to x."""
    chain = [call("mul.Tensor", [tensor(n, 4, 8)] * 2, tensor(n + 1, 4, 8)) for n in range(100)]
    grads = call("mul.Tensor", [tensor(99, 4, 8), tensor(100, 4, 8)], tensor(101, 4, 8), "backward")
    assert kernels(*chain, grads) == [(100, 128, 128), (1, 128, 128)]
    sums = call("sum.dim_IntList", [tensor(100, 4, 8), (0,)], tensor(200, 8))
    assert kernels(*chain, sums) == [(101, 128, 32)]


@pytest.mark.parametrize("engine", ["fused", "compile"])
def test_dropout_fills_its_mask_without_reading_it(engine: str) -> None:
    """x of 32 floats is read, the mask and the result are written; the step's input is x alone."""
    x, mask, out = tensor(0, 4, 8), tensor(1, 4, 8), tensor(2, 4, 8)
    calls = (
        call("empty_like.default", [x], mask),
        OpCall(op="aten.bernoulli_.float", args=(mask, 0.9), outputs=(mask,)),
        call("mul.Tensor", [x, mask], out),
        call("mul.Tensor", [tensor(3, 4, 8), mask], tensor(4, 4, 8), "backward"),
    )
    found = as_launched(with_engine(StepCapture(calls=calls), engine))
    assert [t.storage for t in found.calls[0].tensors()] == [0]
    assert input_bytes(found) == 4 * 8 * 4


def test_a_framework_s_gated_layer_keeps_three_tensors() -> None:
    """silu(a) * u: backward reads a where an eager loop reads silu(a); another product's stays."""
    a, u, gate, product, given = (tensor(n, 4, 8) for n in range(5))
    calls = (
        call("silu.default", [a], gate),
        call("mul.Tensor", [gate, u], product),
        call("mul.Tensor", [given, gate], tensor(5, 4, 8), "backward"),
        call("mul.Tensor", [given, u], tensor(6, 4, 8), "backward"),
        call("silu_backward.default", [tensor(6, 4, 8), a], tensor(7, 4, 8), "backward"),
    )
    found = with_gates_again(StepCapture(calls=calls)).calls
    assert found[2].args == (given, a)
    assert (*found[:2], *found[3:]) == (*calls[:2], *calls[3:])
    kept = {t.storage for c in found[2:] for t in c.tensors()} & {0, 1, 2, 3}
    assert kept == {0, 1}  # and the product, which the next layer's weight gradient reads
