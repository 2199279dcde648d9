"""What a reader should know about how a step was forecast, in one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator

from itercast.capture.opcall import AS_IN_16_BITS, BY_INTEGERS, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.parallel.mixed_precision import casts, wide_experts
from itercast.compose.parallel.placement import Cluster
from itercast.microbench.hardware.host import EVENT_US
from itercast.microbench.hardware.stack import has_dtensor
from itercast.microbench.ops import families, find_family

WIDE_EXPERTS = (
    "experts run in fp32 under autocast, which casts no grouped products; "
    "FSDP's mixed precision (zero=) and --stack megatron-core cast them"
)
CAST_WEIGHTS = (
    "amp with zero= is FSDP's mixed precision, which casts weights: all of the model but the loss "
    "of its logits runs in half precision; amp without zero= is autocast, under which norms, "
    "softmax and losses run in fp32"
)
DTENSOR = (
    "tp is torch's DTensor, whose Python takes a fast host about {0:.1g} ms a product, both ways; "
    "--compile and --stack megatron-core have none of it"
)
# Layers that transformers runs by kernels of other packages on GPUs, if installed, else op by op.
SLOW_PATHS = re.compile(r"Mamba\w*Mixer|GatedDeltaNet|Rwkv\w*Attention")
SLOW_PATH = (
    "{} as plain torch ops, transformers' slow path; "
    "fused kernels (mamba-ssm, flash-linear-attention) are faster and keep far less memory"
)
PRACTISED = (
    "trainings on images or sound that people report took {:.2f} times as long as their forecast, "
    "benchmarks of such networks as long (docs: Your machine)"
)


def notes(step: StepCapture, plan: ParallelPlan, stack: str) -> Iterator[str]:
    """Yields notes on a captured step under a plan."""
    yield from step.remarks
    slow = {c.module for c in step.calls if SLOW_PATHS.search(c.module)}
    if slow:
        yield SLOW_PATH.format(", ".join(sorted(slow)))
    if any(c.op in BY_INTEGERS for c in step.calls):
        yield AS_IN_16_BITS
    if plan.tp > 1 and step.engine == "eager" and has_dtensor(stack):
        yield DTENSOR.format(EVENT_US["tp_product"] / 1e3)
    cast = casts(step, plan, stack)
    if cast == "module":
        yield CAST_WEIGHTS
    if plan.amp and wide_experts(step) and not cast:
        yield WIDE_EXPERTS
    for family in families().values():
        if family.note is not None:
            found = (find_family(c) for c in step.calls if c.op in family.answers)
            yield from family.note([p for of, p in found if of is family], plan)


def without_effect(plan: ParallelPlan, cluster: Cluster) -> Iterator[str]:
    """Yields a note for each key of a plan that is forecast as if it were not there."""
    alone, experts = plan.microbatches == 1, cluster.groups["ep"]
    if plan.zero == 2 and (alone or plan.pp > 1):
        yield "zero=2 is forecast as zero=1: both scatter gradients once a step"
    if plan.cdp == 2:
        yield "cdp=2 is forecast as cdp=1: both send the same, with gradients of other steps"
    if plan.ep_overlap and alone:
        yield "ep_overlap changes nothing: one micro-batch has no other to run beside"
    if plan.ep_once and experts.size <= experts.per_node:
        yield "ep_once changes nothing: all experts of a token are on its node"
