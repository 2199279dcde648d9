"""Rewrites a step for how it is launched: eagerly, as one CUDA graph, compiled, or both.

Source of copied inputs: CUDAGraphNode in torch/_inductor/cudagraph_trees.py, described at
https://docs.pytorch.org/docs/stable/torch.compiler_cudagraph_trees.html
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from itercast.compose.graph.cross_entropy import over_logits, stepwise_cross_entropy
from itercast.compose.graph.lifetimes import last_uses
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages
from itercast.microbench.assumptions import assumed
from itercast.microbench.iterations.engines import ENGINES
from itercast.microbench.opcall import OpCall, StepCapture, TensorSpec
from itercast.microbench.ops import find_family
from itercast.microbench.ops.memory.fused import CALL

FUSED = "fused"  # kernels of a framework's own, which an eager loop launches one by one
EAGER_GRAPH = "eager+graph"  # torch.compile(backend="cudagraphs")
GRAPHED_CALLS = ("compile+graph", EAGER_GRAPH)  # a compiled function launches the graph
COMPILED_PHASES = ("forward", "loss", "backward")
STILL_EAGER = ("accumulate_grad", "zero_grad", "backward")  # and the optimizer

COPY = "aten.copy_.default"
TENSORS_A_LAUNCH = assumed(__file__, "tensors_a_launch")  # by the number of lists


def with_engine(capture: StepCapture, engine: str) -> StepCapture:
    """Sets how the step is launched: rewrites its host events (Python, autograd) for the engine.

    - graph: the step is one CUDA graph; Python runs nothing but its launch.
    - compile: each phase is a compiled function. The host runs its guards and wrapper in place of
      modules, views and autograd nodes; gradients are accumulated and the optimizer runs eagerly.
      ``as_launched`` fuses the ops into kernels later, after the plan has divided them over ranks.
    - compile+graph: the fused kernels are one CUDA graph, which one compiled function launches.
      It copies the batch to the addresses that the graph reads (``as_launched``).
    - eager+graph: the same of the kernels that run eagerly: torch.compile's backend "cudagraphs".
    - fused: kernels as those of torch.compile, launched by an eager loop with modules and autograd;
      the loss as Megatron-LM computes it (``itercast.compose.graph.cross_entropy``).
    """
    known = (*ENGINES, FUSED, EAGER_GRAPH)
    if engine not in known:
        raise ValueError(f"engine {engine!r}: allowed are {', '.join(known)}")
    host = dict(capture.host)
    if "compile" in engine:
        phases = {call.phase for call in capture.calls} & set(COMPILED_PHASES)
        host = {
            name: n for name, n in host.items() if name in STILL_EAGER or name.endswith("_step")
        }
        host["compiled_call"] = len(phases)
    if "graph" in engine:
        host = dict.fromkeys(host, 0)
    if engine in GRAPHED_CALLS:
        host["graphed_call"] = 1
    return replace(capture, host=host, engine=engine)


def as_launched(capture: StepCapture) -> StepCapture:
    """Returns the step as its engine launches it.

    torch.compile fuses neighbouring ops, and copies the batch into the inputs of a CUDA graph.
    """
    if capture.engine == FUSED:
        capture = stepwise_cross_entropy(capture)
        return fused(capture, apart=over_logits(capture))
    launched = fused(capture) if "compile" in capture.engine else capture
    return _with_copied_inputs(launched) if capture.engine in GRAPHED_CALLS else launched


def _with_copied_inputs(capture: StepCapture) -> StepCapture:
    """The step after copies of those inputs that its ops read; parameters stay where they are.

    The ops read the copies, whose storages are those of the captured inputs.
    """
    read = {t.storage for call in capture.calls for t in call.tensors()}
    copied = [t for t in capture.inputs if t.storage in read]
    if not copied:
        return capture
    made, fresh = StepBuilder(capture), fresh_storages(capture)
    for t in copied:
        given = replace(t, storage=next(fresh))
        made.calls.append(OpCall(op=COPY, args=(t, given), outputs=(t,)))
    for i, call in enumerate(capture.calls):
        made.add(i, call)
    return replace(made.step(), inputs=())


def launches(capture: StepCapture) -> int:
    """Number of launches by the host: 1 for a CUDA graph, else one or more per call."""
    return 1 if "graph" in capture.engine else sum(map(_kernels, capture.calls))


def _kernels(call: OpCall) -> int:
    """Launches of a call: one, or for lists of tensors as many as a kernel's arguments need."""
    name = call.op.split(".")[1]
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]
    depth = len(lists) + (not name.endswith("_"))  # a list of results where not in place
    return -(-len(lists[0]) // TENSORS_A_LAUNCH[min(depth, 5) - 1]) if lists else 1


def fused(
    capture: StepCapture, *, apart: Callable[[OpCall], bool] = lambda call: False
) -> StepCapture:
    """The step with neighbouring ops of fusible families as one kernel each.

    Ops of a captured program are fused within one call of a compiled function.

    Consecutive calls whose largest tensors have the same size are one kernel. It reads the tensors
    that it does not make itself, and writes those used after it and the step's results. Ignores
    that inductor recomputes some results instead of saving them, and fuses into products. Calls for
    which ``apart`` is true are kernels of their own.
    """
    made, run, last_use = StepBuilder(capture), list[int](), last_uses(capture.calls)

    def flush() -> None:
        if run:
            made.calls.append(_kernel([capture.calls[i] for i in run], run[-1], last_use))
            for i in run:
                made.done(i)
            run.clear()

    for index, call in enumerate(capture.calls):
        if _is_fusible(call) and not apart(call):
            if run and not _same_kernel(capture.calls[run[-1]], call):
                flush()
            run.append(index)
            continue
        flush()
        made.add(index, call)
    flush()
    return made.step()


def _is_fusible(call: OpCall) -> bool:
    if call.phase not in COMPILED_PHASES:
        return False
    family, _ = find_family(call)
    return family is not None and family.fusible


def _size(call: OpCall) -> int:
    return max((t.numel for t in (*call.tensors(), *call.outputs)), default=0)


def _same_kernel(before: OpCall, call: OpCall) -> bool:
    """Whether two consecutive calls go over as many elements, where one function launches both."""
    where = [(c.phase, c.stream, c.compiled) for c in (before, call)]
    return where[0] == where[1] and _size(before) == _size(call)


def _kernel(calls: Sequence[OpCall], last: int, last_use: dict[int, int]) -> OpCall:
    """One call that reads and writes what these consecutive calls do together."""
    made: dict[int, TensorSpec] = {}
    read: dict[int, TensorSpec] = {}
    for call in calls:
        for t in call.tensors():
            if t.storage not in made:
                read[t.storage] = t
        made |= {t.storage: t for t in call.outputs}
    kept = [t for name, t in made.items() if last_use[name] > last]
    first = calls[0]
    return OpCall(
        op=CALL,
        args=tuple(read.values()),
        kwargs={
            "ops": len(calls),
            "numel": max(_size(c) for c in calls),
            **_read_again(calls, list(read.values())),
        },
        outputs=tuple(kept) or calls[-1].outputs,
        phase=first.phase,
        module=first.module,
        stream=first.stream,
        compiled=first.compiled,
        graphed=first.graphed,
    )


def _read_again(calls: Sequence[OpCall], inputs: Sequence[TensorSpec]) -> dict[str, int]:
    """What a kernel of these calls reads of its full-size inputs a second time, and of one row.

    A norm, a softmax, and a reduction whose result a later call uses need all of a row before they
    write any of it. inductor's loops over a row then run again (torch/_inductor/codegen/triton.py;
    its softmax finds maximum and sum in one loop from torch 2.8 on). Ignores backward passes.
    """
    size = max(map(_size, calls))
    full_bytes = sum(t.nbytes for t in inputs if t.numel == size)
    rows = [n for i, c in enumerate(calls) if (n := _rows_awaited(c, calls[i + 1 :]))]
    return {
        "again_bytes": len(rows) * full_bytes,
        "row_bytes": full_bytes // min(rows) if rows else 0,
    }


def _rows_awaited(call: OpCall, later: Sequence[OpCall]) -> int:
    """Number of rows that a call normalises, or reduces for a later call; 0 for others."""
    family, _ = find_family(call)
    name, result = call.op.split(".")[1], call.outputs[0]
    if family is None or "backward" in name:
        return 0
    if name in ("_softmax", "_log_softmax"):
        return int(result.numel // max(1, result.shape[call.args[1]]))
    if family.name == "norm":  # outputs: result, mean, ...
        return call.outputs[1].numel if len(call.outputs) > 1 else 0
    used = any(result.storage == t.storage for c in later for t in c.tensors())
    reduces = family.name == "reduction" and result.numel < _size(call)
    return result.numel if reduces and used else 0
