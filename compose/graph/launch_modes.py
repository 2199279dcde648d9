"""Rewrites a step for how it is launched: eagerly, as one CUDA graph, compiled, or both.

Source of copied inputs: CUDAGraphNode in torch/_inductor/cudagraph_trees.py, described at
https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.compiled.fused_calls import kernel_call, read_by, size_of
from itercast.compose.graph.compiled.inductor import (
    COMPILED_PHASES,
    inductor_kernels,
    is_fusible,
    without_allocations,
)
from itercast.compose.graph.compiled.repeats import without_repeats
from itercast.compose.graph.compiled.torchao_casts import with_torchao_casts
from itercast.compose.graph.cross_entropy import over_logits, stepwise_cross_entropy
from itercast.compose.graph.lifetimes import last_uses
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.microbench.hardware.stack import stack_of_row
from itercast.microbench.iterations.engines import ENGINES

FUSED = "fused"  # kernels of a framework's own, which an eager loop launches one by one
FUSED_GRAPH = "fused+graph"  # the same in one CUDA graph, with a fused loss
EAGER_GRAPH = "eager+graph"  # torch.compile(backend="cudagraphs")
CAPTURED_WHOLE = ("graph", "compile+graph")  # with the optimizer, as ``collect`` measures
GRAPHED_CALLS = ("compile+graph", EAGER_GRAPH, FUSED_GRAPH)  # a function launches the graph
UNFUSED = ("eager", "graph", EAGER_GRAPH)
STILL_EAGER = ("accumulate_grad", "zero_grad", "backward")  # and the optimizer

COPY = "aten.copy_.default"
ONES = "aten.ones_like.default"  # the gradient that backward starts from, which autograd makes
GATES = ("aten.silu.default", "aten.gelu.default", "aten.sigmoid.default")
PRODUCT = "aten.mul.Tensor"
TENSORS_A_LAUNCH = assumed(__file__, "tensors_a_launch")  # by the number of lists

DIVIDED_BY_NUMBERS = "aten._foreach_div_.ScalarList"
DIVIDED = "aten._foreach_div_.List"
UPDATED_BY_NUMBERS = "aten._foreach_addcdiv_.ScalarList"
UPDATED = "aten._foreach_addcdiv_.Scalar"
POWER = "aten._foreach_pow.ScalarAndTensor"
# Both powers become lr / (beta1^t - 1) and sqrt(1 - beta2^t), by calls with a number or without.
OF_FIRST = ("sub_.Scalar", "div_.Scalar", "reciprocal_.default")
OF_SECOND = ("sub_.Scalar", "neg_.default", "sqrt_.default")

Tensors = tuple[TensorSpec, ...]


def with_engine(capture: StepCapture, engine: str) -> StepCapture:
    """Sets how the step is launched: rewrites its host events (Python, autograd) for the engine.

    - graph: the step is one CUDA graph, its Adam capturable (``as_launched``); Python runs nothing
      but its launch.
    - compile: each phase is a compiled function. The host runs its guards and wrapper in place of
      modules, views and autograd nodes; gradients are accumulated and the optimizer runs eagerly.
      ``as_launched`` fuses the ops into kernels later, after the plan has divided them over ranks.
    - compile+graph: the fused kernels are one CUDA graph, which one compiled function launches.
      It copies the batch to the addresses that the graph reads (``as_launched``).
    - eager+graph: the same of the kernels that run eagerly: torch.compile's backend "cudagraphs".
    - fused: a framework's own fused kernels, launched by an eager loop with modules and autograd;
      the loss as Megatron-LM computes it (``itercast.compose.graph.cross_entropy``).
    - fused+graph: the same kernels and a fused loss as one CUDA graph.
    """
    engines = (*ENGINES, FUSED, FUSED_GRAPH, EAGER_GRAPH)
    if engine not in engines:
        raise ValueError(f"engine {engine!r}: allowed are {', '.join(engines)}")
    host = dict(capture.host)
    if "compile" in engine:
        phases = {c.phase for c in capture.calls if c.op != ONES} & set(COMPILED_PHASES)
        host = {
            name: n for name, n in host.items() if name in STILL_EAGER or name.endswith("_step")
        }
        host["compiled_call"] = len(phases)
    if "graph" in engine:
        host = dict.fromkeys(host, 0)
    if engine in GRAPHED_CALLS:
        host["graphed_call"] = 1
    return replace(capture, host=host, engine=engine)


def engine_on(stack: str, engine: str) -> str:
    """The engine of a step on a stack: if the stack has own kernels, these fuse eager ops."""
    if not stack_of_row(stack).own_kernels:
        return engine
    return {"eager": FUSED, "graph": FUSED_GRAPH}.get(engine, engine)


def with_capturable_adam(capture: StepCapture) -> StepCapture:
    """The step with a foreach Adam's bias corrections on the device; other steps as they are.

    ``capturable=True``, which a CUDA graph needs, keeps the step counters on the device, one number
    for each tensor. Bias corrections are then lists of tensors, which the update is divided by
    twice. Source: ``_multi_tensor_adam`` in torch/optim/adam.py. No foreach kernel takes a list of
    tensors and one of single numbers (``can_use_fast_route`` in
    aten/src/ATen/native/ForeachUtils.h): each division is a kernel for each tensor.
    """
    if not any(c.op == UPDATED_BY_NUMBERS and c.phase == "optimizer" for c in capture.calls):
        return capture
    builder, fresh = StepBuilder(capture), fresh_storages(capture)
    first: Tensors = ()
    for i, call in enumerate(capture.calls):
        if call.phase == "optimizer" and call.op == DIVIDED_BY_NUMBERS:
            count = len(call.args[0])
            first, second = _numbers(count, fresh), _numbers(count, fresh)
            builder.calls += _corrections(call, first, second)
            call = replace(call, op=DIVIDED, args=(call.args[0], second))
        elif call.phase == "optimizer" and call.op == UPDATED_BY_NUMBERS:
            divided = replace(call, op=DIVIDED, args=(call.args[2], first), outputs=())
            builder.calls.append(divided)
            call = replace(call, op=UPDATED, args=(*call.args[:3], 1.0))
        builder.add(i, call)
    return builder.step()


def _numbers(count: int, fresh: Iterator[int]) -> Tensors:
    """A list of single numbers on the device."""
    return tuple(
        TensorSpec(shape=(), dtype="fp32", stride=(), storage=next(fresh)) for _ in range(count)
    )


def _corrections(call: OpCall, first: Tensors, second: Tensors) -> Iterator[OpCall]:
    """The calls that make Adam's first and second bias corrections of step counters, in place."""
    for corrections, names in ((first, OF_FIRST), (second, OF_SECOND)):
        yield replace(call, op=POWER, args=(0.9, corrections), outputs=corrections)
        for name in names:
            yield replace(call, op=f"aten._foreach_{name}", args=(corrections,), outputs=())


def as_launched(capture: StepCapture, *, gathered: bool = False) -> StepCapture:
    """Returns the step as its engine launches it.

    torch.compile fuses neighbouring ops, and copies the batch into the inputs of a CUDA graph; its
    products in fp8 are torchao's. ``gathered``: FSDP gathers weights, those in fp8 as they are.
    """
    if capture.engine in CAPTURED_WHOLE:
        capture = with_capturable_adam(capture)
    if capture.engine in (FUSED, FUSED_GRAPH):
        capture = with_gates_again(capture)
    if capture.engine == FUSED:
        capture = stepwise_cross_entropy(capture)
        return fused(capture, apart=over_logits(capture))
    launched = fused(capture) if capture.engine == FUSED_GRAPH else capture
    if "compile" in capture.engine:
        cast = with_torchao_casts(capture, weights=not gathered)
        launched = inductor_kernels(without_repeats(cast))
    return _with_copied_inputs(launched) if capture.engine in GRAPHED_CALLS else launched


def with_gates_again(capture: StepCapture) -> StepCapture:
    """The step whose gated layers keep no activation of the gate: backward computes it again.

    The inputs of the two factors and the product are kept: three tensors, where an eager loop keeps
    four. Source: megatron/core/fusions/fused_bias_swiglu.py, SwiGLUFunction saves its input alone.
    """
    gate_inputs = {  # storage of the activation -> what it was computed from
        c.outputs[0].storage: c.args[0]
        for c in capture.calls
        if c.op in GATES and c.phase == "forward" and c.outputs[0].shape == c.args[0].shape
    }

    def with_gate_inputs(call: OpCall) -> OpCall:
        """A product of backward that reads gates' inputs in place of their activations."""
        if call.phase != "backward" or call.op != PRODUCT:
            return call
        activations = (t for t in call.tensors() if t.storage in gate_inputs)
        return with_tensors(call, {t: gate_inputs[t.storage] for t in activations})

    return replace(capture, calls=tuple(map(with_gate_inputs, capture.calls)))


def _with_copied_inputs(capture: StepCapture) -> StepCapture:
    """The step that first copies its inputs to where a CUDA graph reads them, but no parameters.

    The graph's ops read the copies, which have the storages of the captured inputs.
    """
    read = {t.storage for call in capture.calls for t in call.tensors()}
    copied = [t for t in capture.inputs if t.storage in read]
    if not copied:
        return capture
    builder, fresh = StepBuilder(capture), fresh_storages(capture)
    for t in copied:
        copied_from = replace(t, storage=next(fresh))
        builder.calls.append(OpCall(op=COPY, args=(t, copied_from), outputs=(t,)))
    for i, call in enumerate(capture.calls):
        builder.add(i, call)
    return replace(builder.step(), inputs=())


def launches(capture: StepCapture) -> int:
    """Number of launches by the host: 1 for a CUDA graph, else one or more per call."""
    return 1 if "graph" in capture.engine else sum(map(_launches_of, capture.calls))


def _launches_of(call: OpCall) -> int:
    """Launches of a call: one; more for lists of tensors that do not fit a kernel's arguments."""
    name = call.op.split(".")[1]
    if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
        return 1
    lists = [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]
    depth = len(lists) + (not name.endswith("_"))  # a list of results where not in place
    return -(-len(lists[0]) // TENSORS_A_LAUNCH[min(depth, 5) - 1]) if lists else 1


def fused(
    capture: StepCapture, *, apart: Callable[[OpCall], bool] = lambda call: False
) -> StepCapture:
    """The step with a framework's own kernels: neighbouring ops of fusible families as one each.

    Consecutive calls whose largest tensors have the same size are one kernel. It reads the tensors
    that it does not make itself, and writes those used after it and the step's results. Calls for
    which ``apart`` is true are kernels of their own.
    """
    capture = without_allocations(capture)
    builder, last_use = StepBuilder(capture), last_uses(capture.calls)
    neighbours: list[int] = []  # consecutive calls that are one kernel

    def add_kernel() -> None:
        if neighbours:
            calls = [capture.calls[i] for i in neighbours]
            builder.calls.append(_one_kernel(calls, neighbours[-1], last_use))
            for i in neighbours:
                builder.done(i)
            neighbours.clear()

    for index, call in enumerate(capture.calls):
        if is_fusible(call) and not apart(call):
            before = capture.calls[neighbours[-1]] if neighbours else call
            if (before.phase, size_of(before)) != (call.phase, size_of(call)):
                add_kernel()
            neighbours.append(index)
            continue
        add_kernel()
        builder.add(index, call)
    add_kernel()
    return builder.step()


def _one_kernel(calls: Sequence[OpCall], last: int, last_use: dict[int, int]) -> OpCall:
    """One call that reads and writes what these consecutive calls do together.

    ``last``: index of the last of them; ``last_use``: of the last call that uses each storage.
    """
    written: dict[int, TensorSpec] = {}
    read: dict[int, TensorSpec] = {}
    for call in calls:
        for t in read_by(call):
            if t.storage not in written:
                read[t.storage] = t
        written |= {t.storage: t for t in call.outputs}
    kept = tuple(t for name, t in written.items() if last_use[name] > last)
    return kernel_call(calls, tuple(read.values()), kept or calls[-1].outputs, backward=False)
