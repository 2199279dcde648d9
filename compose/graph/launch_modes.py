"""How a step is launched: eagerly, as one CUDA graph, or compiled into fused kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from microbench.iterations.engines import ENGINES
from microbench.opcall import OpCall, StepCapture, TensorSpec
from microbench.ops import find_family
from microbench.ops.memory.fused import CALL

FUSED_FAMILIES = ("elementwise", "norm", "reduction", "random")
COMPILED_PHASES = ("forward", "loss", "backward")
EAGER_EVENTS = ("accumulate_grad", "zero_grad", "backward", "adamw_step", "sgd_step")

# By the number of lists. Source: ATen/native/cuda/MultiTensorApply.cuh, arguments of 4 KB; torch
# built with CUDA 13 takes seven times as many.
TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)


def with_engine(capture: StepCapture, engine: str) -> StepCapture:
    """The step as an engine launches it.

    graph: all of the step is one launch and Python runs nothing else. compile: what torch.compile
    leaves of forward and backward is products and fused kernels; modules, views and autograd nodes
    cost the host nothing, gradients and the optimizer what they cost eagerly.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r}: allowed are {', '.join(ENGINES)}")
    if engine == "graph":
        return replace(capture, host=dict.fromkeys(capture.host, 0), engine=engine)
    if engine == "compile":
        host = {name: n for name, n in capture.host.items() if name in EAGER_EVENTS}
        return replace(fused(capture), host=host, engine=engine)
    return capture


def launches(capture: StepCapture) -> int:
    """How often the host launches something."""
    return 1 if capture.engine == "graph" else sum(map(_kernels, capture.calls))


def _kernels(call: OpCall) -> int:
    """Launches of a call; lists of tensors go in pieces, as many as a kernel's arguments hold."""
    name = call.op.split(".")[1]
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]
    depth = len(lists) + (not name.endswith("_"))  # what is not in place has a list of results
    return -(-len(lists[0]) // TENSORS_A_LAUNCH[min(depth, 5) - 1]) if lists else 1


def fused(capture: StepCapture) -> StepCapture:
    """Neighbouring pointwise ops, norms and reductions as one kernel each.

    Ops in a row, on tensors of one largest size, are one kernel. It reads what it has not made
    itself and writes what is used after it, the step's results among them; what inductor
    recomputes instead of saving, and what it fuses across a product, is not considered.
    """
    calls: list[OpCall] = []
    moved: dict[int, int] = {}
    run: list[int] = []
    last_use = _last_uses(capture.calls)

    def flush() -> None:
        if run:
            calls.append(_kernel([capture.calls[i] for i in run], run[-1], last_use))
            moved.update(dict.fromkeys(run, len(calls) - 1))
            run.clear()

    for index, call in enumerate(capture.calls):
        if _is_fusible(call):
            if run and not _alike(capture.calls[run[-1]], call):
                flush()
            run.append(index)
            continue
        flush()
        calls.append(call)
        moved[index] = len(calls) - 1
    flush()
    parameters = tuple(
        replace(p, ready_after=moved.get(p.ready_after, p.ready_after)) for p in capture.parameters
    )
    return replace(capture, calls=tuple(calls), parameters=parameters)


def _is_fusible(call: OpCall) -> bool:
    if call.phase not in COMPILED_PHASES:
        return False
    family, _ = find_family(call)
    return family is not None and family.name in FUSED_FAMILIES


def _size(call: OpCall) -> int:
    return max((t.numel for t in (*call.tensors(), *call.outputs)), default=0)


def _alike(before: OpCall, call: OpCall) -> bool:
    return _size(before) == _size(call) and before.phase == call.phase


def _last_uses(calls: Sequence[OpCall]) -> dict[int, int]:
    """Index of the last call that reads or writes a storage."""
    found: dict[int, int] = {}
    for index, call in enumerate(calls):
        for t in (*call.tensors(), *call.outputs):
            found[t.storage] = index
    return found


def _kernel(calls: Sequence[OpCall], last: int, last_use: dict[int, int]) -> OpCall:
    """One call that reads and writes what a run of them does together."""
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
        kwargs={"ops": len(calls), "numel": max(_size(c) for c in calls)},
        outputs=tuple(kept) or calls[-1].outputs,
        phase=first.phase,
        module=first.module,
    )
