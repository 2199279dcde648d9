"""Casts to fp8 of a compiled step, as torchao's Float8Linear makes them around each product.

The scale of a tensor is known after its largest number: it is read for that, and again to be cast.
Autograd keeps inputs in half precision; for the gradient of a weight its input and the output's
gradient are cast transposed, as kernels want numbers side by side that are summed. Scales are of
whole tensors. Source: torchao/float8/float8_linear.py in https://github.com/pytorch/ao.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.graph.rewrite import StepBuilder, fresh_storages, with_tensors
from itercast.microbench.ops.matrix.gemm import GROUPED

FP8, WIDE = "fp8", "bf16"
CAST, LARGEST = "aten.clone.default", "aten.amax.default"  # what stands for a cast and its scale


def with_torchao_casts(capture: StepCapture, *, weights: bool) -> StepCapture:
    """The step with torchao's casts, in place of one cast that writes both layouts.

    ``weights``: each rank casts its weights, in forward and in backward. Else FSDP gathers them in
    fp8 (``enable_fsdp_float8_all_gather``), and a rank's casts of its shards are not counted.
    """
    casts = _Casts(capture, weights)
    for i, call in enumerate(capture.calls):
        if call.op == CAST and casts.readers[call.outputs[0].storage]:
            casts.replace_cast(i, call)
            continue
        copies = {t: replace(t, storage=casts.copy(t, call)) for t in _narrow(call)}
        casts.builder.add(i, with_tensors(call, copies))
    return casts.builder.step()


def _narrow(call: OpCall) -> list[TensorSpec]:
    """The factors in fp8 of a matrix product."""
    is_product = call.op == GROUPED or call.op in LINEAR_PRODUCTS
    return [t for t in call.tensors() if t.dtype == FP8] if is_product else []


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor in half precision, and the scale that it is cast with."""

    wide: TensorSpec
    scale: TensorSpec


class _Casts:
    """Rewrites a step with fp8 casts; remembers the source and the fp8 copies of each storage."""

    def __init__(self, capture: StepCapture, weights: bool) -> None:
        self.weights = weights
        self.builder, self.fresh = StepBuilder(capture), fresh_storages(capture)
        self.readers = Counter(t.storage for c in capture.calls for t in _narrow(c))
        self.sources: dict[int, _Source] = {}
        self.copies: dict[tuple[int, bool], int] = {}  # by storage, and whether in backward

    def replace_cast(self, i: int, call: OpCall) -> None:
        """Replace call i, a cast, by the search for its scale and a cast as torchao makes it.

        A gradient that two products read (of inputs and of weights) is written in two layouts.
        """
        storage, backward = call.outputs[0].storage, call.phase == "backward"
        self._scale(storage, call.args[0], call)
        copies = [storage]
        if backward and self.readers[storage] > 1:
            copies.append(next(self.fresh))
        self._cast(storage, call, copies)
        self.builder.done(i)

    def copy(self, t: TensorSpec, user: OpCall) -> int:
        """Storage of the fp8 copy of ``t`` that ``user`` reads, made at first use."""
        key = (t.storage, user.phase == "backward")
        if key not in self.copies:
            if t.storage not in self.sources:
                if not self.weights:
                    return t.storage
                self._scale(t.storage, replace(t, dtype=WIDE), user)
            self._cast(t.storage, user, [next(self.fresh)])
        return self.copies[key]

    def _scale(self, storage: int, wide: TensorSpec, user: OpCall) -> None:
        """Add the search for the largest number of ``wide``, the source of ``storage``."""
        scale = TensorSpec(shape=(), dtype="fp32", storage=next(self.fresh))
        self.sources[storage] = _Source(wide, scale)
        self._call(user, LARGEST, (wide, (), False), (scale,))

    def _cast(self, storage: int, user: OpCall, copies: list[int]) -> None:
        """Add the cast of the source of ``storage``; ``copies``: new storages that it writes."""
        source = self.sources[storage]
        outputs = (replace(source.wide, dtype=FP8, storage=copy) for copy in copies)
        self._call(user, CAST, (source.wide, source.scale), tuple(outputs))
        self.copies[storage, user.phase == "backward"] = copies[0]

    def _call(self, user: OpCall, op: str, args: Any, outputs: tuple[TensorSpec, ...]) -> None:
        call = replace(user, op=op, args=args, kwargs={}, outputs=outputs, within=0)
        self.builder.calls.append(call)
