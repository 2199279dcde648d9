"""The rank graph: the op calls of one rank of a plan, and their layers, before pricing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.cuda_variants import with_cuda_variants
from itercast.compose.graph.identity_cache import cached_by_identity
from itercast.compose.graph.launch_modes import as_launched
from itercast.compose.graph.layers import Layer, split_layers
from itercast.compose.graph.lifetimes import update_bytes
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.parallel.cp import context_parallel
from itercast.compose.parallel.ep import expert_parallel
from itercast.compose.parallel.plan import ParallelPlan
from itercast.compose.parallel.tp import tensor_parallel
from itercast.compose.pricing.collectives import Message
from itercast.compose.pricing.gradient_buckets import buffers
from itercast.compose.pricing.price_book import Priceable, priceable
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The parts of a plan that change a rank's op calls; two cuts are equal where ``degrees`` are.

    The plan itself is kept for error messages.
    """

    plan: ParallelPlan = field(compare=False)
    degrees: tuple[object, ...]

    @classmethod
    def of(cls, plan: ParallelPlan) -> Cut:
        """Takes from a plan the parts that change a rank's op calls."""
        degrees = (plan.tp, plan.sp, plan.cp, plan.ep, plan.expert_tp, plan.imbalance)
        return cls(plan=plan, degrees=degrees)


@dataclass(frozen=True, kw_only=True)
class RankGraph:
    """A rank's op calls of one micro-batch and their layers.

    ``wanted`` are the ops to price and ``messages`` the collectives, by number of the call;
    ``matmul_s``: seconds of each call's matrix products at peak. ``step_bytes``: bytes that all
    calls touch; ``buffers``: running statistics by dtype; ``update_bytes``: temporary bytes of the
    optimizer's step; ``tied``: weights of the first layer that the last one uses too.
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
    tied: tuple[ParamSpec, ...]


def rank_graph(capture: StepCapture, plan: ParallelPlan, gpu: Gpu) -> RankGraph:
    """Rewrite a captured micro-batch for a rank of the plan: expert, context, tensor parallel."""
    if plan.amp and gpu.kind == "cpu":
        raise ValueError(f"plan {str(plan)!r}: amp is a GPU's autocast; a CPU casts other ops")
    return _rank_graph(capture, Cut.of(plan), gpu)


@cached_by_identity
def _rank_graph(capture: StepCapture, cut: Cut, gpu: Gpu) -> RankGraph:
    capture = context_parallel(expert_parallel(capture, cut.plan), cut.plan)
    capture = as_launched(tensor_parallel(capture, cut.plan, summed=gpu.kind != "cpu"))
    if "fp8" not in gpu.peak_flops_per_s and any(map(_in_fp8, capture.calls)):
        raise ValueError(
            f"gpu {gpu.name!r}: no units for dtype 'fp8'; it has {sorted(gpu.peak_flops_per_s)}"
        )
    capture = capture if gpu.kind == "cpu" else with_cuda_variants(capture)
    cold, calls = cold_fractions(capture, gpu), capture.calls
    layers = tuple(split_layers(capture))
    messages = {i: _message(c) for i, c in enumerate(calls) if c.op == COLLECTIVE}
    wanted = {i: priceable(c, cold[i]) for i, c in enumerate(calls) if i not in messages}
    return RankGraph(
        capture=capture,
        layers=layers,
        wanted=wanted,
        messages=messages,
        matmul_s=tuple(_matmul_s(wanted.get(i), gpu) for i in range(len(calls))),
        optimizer=tuple(w for i, w in wanted.items() if calls[i].phase == "optimizer"),
        step_bytes=sum(w.bytes_moved for w in wanted.values()),
        buffers=buffers(calls),
        update_bytes=update_bytes(capture),
        tied=_tied(capture, layers),
    )


def _matmul_s(w: Priceable | None, gpu: Gpu) -> float:
    if w is None or w.family is None or not w.family.matmul:
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


def _tied(capture: StepCapture, layers: Sequence[Layer]) -> tuple[ParamSpec, ...]:
    if len(layers) < 2:
        return ()
    a, b = layers[-1].forward
    used = {t.storage for call in capture.calls[a:b] for t in call.tensors()}
    return tuple(p for p in layers[0].parameters if p.storage in used)


def _in_fp8(call: OpCall) -> bool:
    return any(t.dtype == "fp8" for t in call.tensors())
