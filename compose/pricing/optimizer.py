"""The optimizer's calls over the parameters of one rank, from those captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from itercast.compose.pricing.priced_op import Priceable
from itercast.microbench.ops.step.optimizer import FAMILY, FUSED, OptimizerOp, as_fused, of_rank

# Tensors like the parameter, in its own dtype, that an optimizer keeps.
STATE_COPIES = {"adamw": 2, "adamw_fused": 2, "lamb": 2, "sgd": 0, "none": 0}
OUTER_COPIES = 2  # of DiLoCo's: the parameters since the last average, the momentum
# Its calls, copies as other calls that read a list and write one: the difference to the kept
# parameters and these copied back; after the average SGD's with Nesterov's momentum, and the copy.
# Source: torchft/local_sgd.py, torch/optim/sgd.py (_multi_tensor_sgd).
BEFORE_AVERAGE = ("_foreach_add_list", "_foreach_mul_")
AFTER_AVERAGE = ("_foreach_mul_", *3 * ("_foreach_add_list",), "_foreach_mul_")


def scaled_update(captured: Sequence[Priceable], numel: int, tensors: int) -> list[Priceable]:
    """Resizes the optimizer's captured calls to a rank's ``numel`` elements and ``tensors``."""
    whole = max((getattr(c.params, "numel", 0) for c in captured), default=0)
    scaled = []
    for c in captured:
        if isinstance(c.params, OptimizerOp):
            scaled.append(replace(c, params=of_rank(c.params, numel, tensors, whole)))
        else:
            share = numel / whole if whole else 1.0
            scaled.append(replace(c, bytes_moved=c.bytes_moved * share))
    return scaled


def fused_update(calls: Sequence[Priceable]) -> list[Priceable]:
    """Replaces the optimizer's calls by one fused kernel: parameters, gradients, state read once.

    Calls of an optimizer that has fused kernels stay as they are.
    """
    large = [c for c in calls if isinstance(c.params, OptimizerOp)]
    if not large or any(c.params.op in FUSED for c in large):
        return list(calls)
    fused = as_fused([c.params for c in large])
    most = max(large, key=lambda c: c.params.numel)
    return [replace(most, op=f"aten.{fused.op}.default", params=fused)]


def outer_update(calls: Sequence[str], numel: int, tensors: int, dtype: str) -> Iterator[Priceable]:
    """Calls of DiLoCo's outer optimizer over so many elements of a rank's parameters."""
    for name in calls:
        call = OptimizerOp(op=name, tensors=tensors, numel=numel, dtype=dtype)
        yield Priceable(
            op=f"aten.{name}.default",
            phase="optimizer",
            family=FAMILY,
            params=call,
            bytes_moved=float(FAMILY.bytes_moved(call)),
            cold=1.0,
        )
