"""A step cut for a rank, before anything is priced: what all prices of it share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from compose.graph.cache_reuse import cold_fractions
from compose.graph.cuda_variants import as_on_gpu
from compose.graph.identity_cache import remembered
from compose.graph.layers import Layer, split_layers
from compose.graph.lifetimes import update_bytes
from compose.graph.rewrite import COLLECTIVE
from compose.parallel.cp import context_parallel
from compose.parallel.ep import expert_parallel
from compose.parallel.plan import ParallelPlan
from compose.parallel.tp import tensor_parallel
from compose.pricing.collectives import Message
from compose.pricing.gradient_buckets import buffers
from compose.pricing.price_book import Priceable, priceable
from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, StepCapture, TensorSpec

MATMUL_FAMILIES = {"gemm", "conv", "attention"}


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What of a plan changes the ops of a rank; the plan itself is there for messages only."""

    plan: ParallelPlan = field(compare=False)
    degrees: tuple[object, ...]

    @classmethod
    def of(cls, plan: ParallelPlan) -> Cut:
        """The plan's cut."""
        return cls(plan=plan, degrees=(plan.tp, plan.sp, plan.cp, plan.ep, plan.imbalance))


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A rank's ops of one micro-batch and their layers.

    ``wanted`` by number of the call, ``messages`` likewise for its collectives; ``matmul_s`` are
    seconds at peak. ``step_bytes`` is what all calls touch, ``buffers`` are running statistics by
    dtype, ``update_bytes`` what lives within the optimizer only, ``tied_bytes`` weights of the
    first layer that the last one uses too.
    """

    capture: StepCapture
    layers: tuple[Layer, ...]
    wanted: dict[int, Priceable]
    messages: dict[int, Message]
    matmul_s: tuple[float, ...]
    optimizer: tuple[Priceable, ...]
    step_bytes: float
    buffers: dict[str, list[TensorSpec]]
    update_bytes: int
    tied_bytes: int


def frame(capture: StepCapture, plan: ParallelPlan, gpu: Gpu) -> Frame:
    """The rewrites that change what a rank computes, in the order in which they nest."""
    if plan.amp and gpu.kind == "cpu":
        raise ValueError(f"plan {str(plan)!r}: amp is a GPU's autocast; a CPU casts other ops")
    return _frame(capture, Cut.of(plan), gpu)


@remembered
def _frame(capture: StepCapture, cut: Cut, gpu: Gpu) -> Frame:
    capture = context_parallel(expert_parallel(capture, cut.plan), cut.plan)
    capture = tensor_parallel(capture, cut.plan, summed=gpu.kind != "cpu")
    if "fp8" not in gpu.peak_flops_per_s and any(map(_in_fp8, capture.calls)):
        raise ValueError(f"gpu {gpu.name!r}: no units for dtype 'fp8'")
    capture = capture if gpu.kind == "cpu" else as_on_gpu(capture)
    cold, calls = cold_fractions(capture, gpu), capture.calls
    layers = tuple(split_layers(capture))
    messages = {i: _message(c) for i, c in enumerate(calls) if c.op == COLLECTIVE}
    wanted = {i: priceable(c, cold[i]) for i, c in enumerate(calls) if i not in messages}
    return Frame(
        capture=capture,
        layers=layers,
        wanted=wanted,
        messages=messages,
        matmul_s=tuple(_matmul_s(wanted.get(i), gpu) for i in range(len(calls))),
        optimizer=tuple(w for i, w in wanted.items() if calls[i].phase == "optimizer"),
        step_bytes=sum(w.bytes_moved for w in wanted.values()),
        buffers=buffers(calls),
        update_bytes=update_bytes(capture),
        tied_bytes=_tied_bytes(capture, layers),
    )


def _matmul_s(w: Priceable | None, gpu: Gpu) -> float:
    if w is None or w.family is None or w.family.name not in MATMUL_FAMILIES:
        return 0.0
    return float(w.family.flops(w.params)) / gpu.peak(w.params.dtype)


def _message(call: OpCall) -> Message:
    t, facts = call.args[0], call.kwargs
    return Message(
        kind=facts["kind"],
        axis=facts["axis"],
        message_bytes=round(t.nbytes * facts["scale"]),
        dtype=t.dtype,
        phase="comm",
    )


def _tied_bytes(capture: StepCapture, layers: Sequence[Layer]) -> int:
    if len(layers) < 2:
        return 0
    a, b = layers[-1].forward
    used = {t.storage for call in capture.calls[a:b] for t in call.tensors()}
    return sum(p.nbytes for p in layers[0].parameters if p.storage in used)


def _in_fp8(call: OpCall) -> bool:
    return any(t.dtype == "fp8" for t in call.tensors())
