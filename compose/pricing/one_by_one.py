"""An optimizer's step as a loop over parameters, as torch runs it up to 1.13.

Its ``_single_tensor_adamw`` and ``_single_tensor_sgd`` make some calls over each parameter in place
of one over all of them: ``foreach`` is the default since 2.0. Since then ``zero_grad`` drops
gradients, too; before it sets them to zero, and the next backward adds to them. Step counters lie
on the CPU, so that no kernel counts.
Source: torch/optim/adamw.py, sgd.py, optimizer.py at v1.13.1; release notes of v2.0.0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.pricing.priced_op import Priceable, priceable
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.step.optimizer import LOOP

LOOPED = ("adamw", "sgd", "sgd_momentum")  # optimizers that are no kernel of their own
OTHERS = TensorSpec(shape=(2**40,), dtype="int8", storage=-2)  # more than any cache holds


def one_by_one(capture: StepCapture, sizes: Sequence[int], gpu: Gpu) -> list[Priceable]:
    """The optimizer's calls over each parameter, then those that zero each gradient.

    ``sizes``: elements of each parameter.
    """
    captured = (c for c in capture.calls if c.phase == "optimizer")
    over_parameters = (c for c in captured if any(t.shape for t in c.args[0]))
    update = [call for c in over_parameters for call in _over_largest(c)]
    zero = [replace(update[0], op="aten.zero_.default", args=update[0].args[:1])]

    @cache
    def of_size(numel: int, *, zeroed: bool) -> list[Priceable]:
        return _over(zero if zeroed else update, numel, gpu)

    return [call for zeroed in (False, True) for n in sizes for call in of_size(n, zeroed=zeroed)]


def _over_largest(call: OpCall) -> Iterator[OpCall]:
    """The calls over the largest tensor of the lists that a foreach call takes (``LOOP``)."""
    lists = [a for a in call.args if isinstance(a, tuple) and isinstance(a[0], TensorSpec)]
    lists += [call.outputs] if call.outputs else lists[:1]
    largest = max(range(len(lists[0])), key=lambda i: lists[0][i].numel)
    *tensors, result = (a[largest] for a in lists)
    for name, count in LOOP[priceable(call).kind].items():
        args = tuple(tensors[:count])
        yield OpCall(op=f"aten.{name}", args=args, outputs=(result,), phase=call.phase)


def _over(calls: Sequence[OpCall], numel: int, gpu: Gpu) -> list[Priceable]:
    """These calls over tensors of ``numel`` elements, which no cache holds before the first one."""
    far = OpCall(op="aten.clone.default", args=(OTHERS,), outputs=(OTHERS,))
    sized = [_with_numel(c, numel) for c in calls]
    cold = cold_fractions(StepCapture(calls=(far, *sized)), gpu)[1:]
    return [priceable(c, share) for c, share in zip(sized, cold, strict=True)]


def _with_numel(call: OpCall, numel: int) -> OpCall:
    """The call over tensors of so many elements."""

    def sized(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(replace(t, shape=(numel,), stride=(), zero_frac=0.0) for t in tensors)

    return replace(call, args=sized(call.args), outputs=sized(call.outputs))
