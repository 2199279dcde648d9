"""The optimizer's calls over the parameters of one rank, from those captured.

Muon (torch.optim.Muon) has calls of its own for each matrix. Its momentum is kept as the parameter
is: where parameters are sharded (ZeRO, FSDP), a rank updates its part of all momenta. Newton-Schulz
takes whole matrices: as torchtitan's copy of Microsoft's Dion does it, matrices of equal shape are
dealt to the ranks that shard them, one each in turn; an all_to_all of bf16 updates brings a rank
the parts of its own matrix, another one takes the result back. A rank with a part of columns or
rows (tp) gathers the whole, and all these ranks do the same products. Replicas (DDP) do all
products each, as torch.optim.Muon does.
Source: https://github.com/pytorch/torchtitan/tree/main/torchtitan/experiments/dion_optimizer

A loop over parameters is what torch runs up to 1.13: its ``_single_tensor_adamw`` and
``_single_tensor_sgd`` make some calls over each parameter in place of one over all of them, which
``foreach`` does by default since 2.0. Since then ``zero_grad`` drops gradients, too; before it sets
them to zero, and the next backward adds to them. Step counters lie on the CPU: no kernel counts.
Source: torch/optim/adamw.py, sgd.py, optimizer.py at v1.13.1; release notes of v2.0.0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import prod

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec, changed
from itercast.capture.programs.program import COLLECTIVE, ON_CPU
from itercast.capture.step import update_of
from itercast.compose.graph.cache_reuse import cold_fractions
from itercast.compose.graph.product_roles import LINEAR_PRODUCTS
from itercast.compose.graph.rewrite import with_shape, with_tensors
from itercast.compose.pricing.collectives import Message
from itercast.compose.pricing.priced_op import Priceable, priceable
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.step.optimizer import (
    ADAM,
    FAMILY,
    FUSED,
    LOOP,
    SAME_AS,
    SGD,
    STEPS,
    UNSCALE,
    OptimizerOp,
    as_fused,
    of_rank,
)

# Tensors like the parameter, in its own dtype, that an optimizer keeps (``state_copies``).
STATE_COPIES = {"adamw": 2, "adamw_fused": 2, "lamb": 2, "sgd": 0, "sgd_momentum": 1, "none": 0}
STATE_COPIES["muon"] = 2  # AdamW's; of its matrices the momentum alone
NORM = "aten.linalg_vector_norm.default"  # the first of Muon's calls that needs a whole matrix
UNFUSED = {  # the calls over lists that torch's fused kernels stand for
    "_fused_adam_": ADAM,
    "_fused_adamw_": STEPS["foreach_adamw"],
    "_fused_sgd_": (SGD,),
    "_fused_sgd_momentum": ("_foreach_mul_", SGD, SGD),
}
LOOPED = ("adamw", "sgd", "sgd_momentum")  # optimizers that are no kernel of their own
OTHERS = TensorSpec(shape=(2**40,), dtype="int8", storage=-2)  # more than any cache holds
OUTER_COPIES = 2  # of DiLoCo's: the parameters since the last average, the momentum
# Its calls, copies as other calls that read a list and write one: the difference to the kept
# parameters and these copied back; after the average SGD's with Nesterov's momentum, and the copy.
# Source: torchft/local_sgd.py, torch/optim/sgd.py (_multi_tensor_sgd).
BEFORE_AVERAGE = ("_foreach_add_list", "_foreach_mul_")
AFTER_AVERAGE = ("_foreach_mul_", *3 * ("_foreach_add_list",), "_foreach_mul_")


@dataclass(frozen=True, kw_only=True)
class MatrixUpdate:
    """Muon's calls over one matrix of this ``shape`` as captured, with their numbers in the step.

    ``cold``: the share of each call's bytes that no cache holds. Those of ``products`` need all of
    the matrix, the others any part of it.
    """

    shape: tuple[int, ...]
    numbers: range
    calls: tuple[OpCall, ...]
    cold: Sequence[float]
    products: range

    def of_part(self, shape: tuple[int, ...], ranks: int) -> tuple[list[Priceable], ...]:
        """A rank's calls before the products (on its part), the products (whole), and after.

        ``shape``: of the part of the matrix, whose rows ``ranks`` ranks divide among themselves.
        """
        shape = (-(-shape[0] // ranks), *shape[1:])
        tensors = {t for c in self.calls for t in c.touched}
        parts = {t: with_shape(t, shape) for t in tensors if t.shape == self.shape != shape}
        calls = [
            priceable(call if i in self.products else with_tensors(call, parts), self.cold[i])
            for i, call in enumerate(self.calls)
        ]
        start, stop = self.products.start, self.products.stop
        return calls[:start], calls[start:stop], calls[stop:]

    def messages(self, shape: tuple[int, ...], ranks: int) -> tuple[list[Message], list[Message]]:
        """Messages before the products, which bring whole matrices, and after, which return parts.

        Each of ``ranks`` has a part of this ``shape`` of each matrix, and updates other matrices.
        """
        made = self.calls[self.products.stop - 1].outputs[0]
        held = made.nbytes * prod(shape) // prod(self.shape)
        swap = Message(kind="all_to_all", axis="shard", message_bytes=held, dtype=made.dtype)
        whole = replace(swap, kind="all_gather", axis="tp", message_bytes=made.nbytes)
        swaps = [swap] if ranks > 1 else []
        return [*swaps, whole] if held < made.nbytes else swaps, swaps


def state_copies(optimizer: str) -> int:
    """Tensors like the parameter that an optimizer keeps; a moving average is one more."""
    return STATE_COPIES[update_of(optimizer)] + optimizer.endswith("+ema")


def state_bytes(optimizer: str, trained: Iterable[ParamSpec]) -> int:
    """Bytes of what an optimizer keeps of parameters; of Muon's matrices one copy fewer."""
    return sum((state_copies(optimizer) - p.matrix) * p.nbytes for p in trained)


def matrix_updates(capture: StepCapture, cold: Sequence[float]) -> dict[int, MatrixUpdate]:
    """The updates of Muon's matrices, by storage; each begins where the one before it ends."""
    updates: dict[int, MatrixUpdate] = {}
    first = next((i for i, c in enumerate(capture.calls) if c.phase == "optimizer"), 0)
    while len(updates) < sum(p.matrix and p.ready_after >= 0 for p in capture.parameters):
        not_yet = range(first, len(capture.calls))
        last = next(i for i in not_yet if capture.calls[i].op == "aten.add_.Tensor")
        calls = capture.calls[first : last + 1]
        start = next(i for i, c in enumerate(calls) if c.op == NORM)
        end = 1 + max(i for i, c in enumerate(calls) if c.op in LINEAR_PRODUCTS)
        parameter = calls[-1].args[0]
        updates[parameter.storage] = MatrixUpdate(
            shape=parameter.shape,
            numbers=range(first, last + 1),
            calls=calls,
            cold=cold[first : last + 1],
            products=range(start, end),
        )
        first = last + 1
    return updates


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
    updates = [c for c in calls if isinstance(c.params, OptimizerOp)]
    if not updates or any(c.params.op in FUSED for c in updates):
        return list(calls)
    fused = as_fused([c.params for c in updates])
    largest = max(updates, key=lambda c: c.params.numel)
    return [replace(largest, op=f"aten.{fused.op}.default", params=fused)]


def update_bytes(calls: Iterable[Priceable]) -> float:
    """Bytes that an optimizer's calls read and write, whether one by one or fused."""
    return sum(
        float(FAMILY.bytes_moved(c.params)) if isinstance(c.params, OptimizerOp) else c.bytes_moved
        for c in calls
    )


def outer_update(calls: Sequence[str], numel: int, tensors: int, dtype: str) -> Iterator[Priceable]:
    """Calls over ``numel`` elements of a rank's parameters, like DiLoCo's outer optimizer."""
    for name in calls:
        call = OptimizerOp(op=SAME_AS.get(name, name), tensors=tensors, numel=numel, dtype=dtype)
        yield Priceable(
            op=f"aten.{name}.default",
            phase="optimizer",
            family=FAMILY,
            params=call,
            bytes_moved=float(FAMILY.bytes_moved(call)),
            cold=1.0,
        )


def one_by_one(capture: StepCapture, sizes: Sequence[int], gpu: Gpu) -> list[Priceable]:
    """The optimizer's calls over each parameter, then those that zero each gradient.

    ``sizes``: elements of each parameter.
    """
    update = [call for c in _over_parameters(capture) for call in _over_largest(c)]
    zero = [_in_place("zero_.default", update[0].args[:1])]

    @cache
    def of_size(numel: int, *, zeroed: bool) -> list[Priceable]:
        return _over(zero if zeroed else update, numel, gpu)

    return [call for zeroed in (False, True) for n in sizes for call in of_size(n, zeroed=zeroed)]


def has_lists(capture: StepCapture) -> bool:
    """Whether the optimizer's calls are over all parameters of a step, none over a single one.

    Sparse gradients make torch's SGD a loop, which is captured as such.
    """
    updates, norms = _over_parameters(capture), len(capture.parameters)  # of gradients
    single = (c.args[0] for c in capture.calls if c.phase == "optimizer")
    return bool(updates) and not any(isinstance(x, TensorSpec) and x.numel > norms for x in single)


def _over_parameters(capture: StepCapture) -> list[OpCall]:
    """The optimizer's calls over lists of parameters, not of step counters."""
    captured = (c for c in capture.calls if c.phase == "optimizer")
    return [c for c in captured if isinstance(c.args[0], tuple) and any(t.shape for t in c.args[0])]


def _over_largest(call: OpCall) -> Iterator[OpCall]:
    """The calls over the largest tensor of the lists that a foreach call takes."""
    lists = _lists(call)
    yield from _over_tensor(call, max(range(len(lists[0])), key=lambda i: lists[0][i].numel))


def _over_tensor(call: OpCall, number: int) -> Iterator[OpCall]:
    """The calls over one tensor of each list, in place of a foreach or fused call over lists."""
    lists = _lists(call)
    lists += [call.outputs] if call.outputs else lists[:1]
    *tensors, result = (a[number] for a in lists)
    kind = priceable(call).kind
    for name, count in [pair for n in UNFUSED.get(kind, [kind]) for pair in LOOP[n].items()]:
        args = tuple(tensors[:count])
        yield changed(call, op=f"aten.{name}", args=args, kwargs={}, outputs=(result,))


def _lists(call: OpCall) -> list[tuple[TensorSpec, ...]]:
    """The lists of tensors that a call takes."""
    return [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]


def with_loops(step: StepCapture) -> StepCapture:
    """The step of a script as old software runs it: in a loop over parameters, as above.

    Calls over lists, also fused ones and those of clipping, are made over each tensor, all calls
    over one before those over the next. Gradients, which backward wrote, are set to zero at the
    end; backward adds to them, unless messages send them, from copies. Calls that a script itself
    makes over lists become loops as well.
    """
    written = {t.storage for c in step.calls if c.phase == "backward" for t in c.outputs}
    sent = any(c.op == COLLECTIVE and c.phase == "backward" for c in step.calls)
    calls, gradients = list[OpCall](), dict[int, TensorSpec]()
    for tensors, together in groupby(step.calls, _looped_tensors):
        of_lists = list(together)
        if not tensors:
            calls += of_lists
            continue
        read = [t for c in of_lists for each in _lists(c) for t in each if t.storage in written]
        new = {t.storage: t for t in read if t.storage not in gradients}
        gradients |= new
        calls += [] if sent else [_in_place("add_.Tensor", 2 * (t,)) for t in new.values()]
        calls += [c for i in range(tensors) for each in of_lists for c in _over_tensor(each, i)]
    calls += [_in_place("zero_.default", (t,)) for t in gradients.values()]
    return replace(step, calls=tuple(calls))


def _looped_tensors(call: OpCall) -> int:
    """Over how many tensors old software makes a loop in place of a call; 0 where it makes none."""
    lists, scaler = _lists(call), call.op == f"aten.{UNSCALE}.default"  # over lists since 1.7
    launched_so = scaler or call.stream == ON_CPU or call.compiled or call.graphed
    if not lists or launched_so or not any(t.shape for t in lists[0]):
        return 0
    return len(lists[0]) if priceable(call).kind in {*LOOP, *UNFUSED} else 0


def _in_place(name: str, tensors: tuple[TensorSpec, ...]) -> OpCall:
    """A call that writes the first of the tensors that it reads."""
    return OpCall(op=f"aten.{name}", args=tensors, outputs=tensors[:1], phase="optimizer")


def _over(calls: Sequence[OpCall], numel: int, gpu: Gpu) -> list[Priceable]:
    """These calls over tensors of ``numel`` elements, which no cache holds before the first one."""
    far = OpCall(op="aten.clone.default", args=(OTHERS,), outputs=(OTHERS,))
    sized = [_with_numel(c, numel) for c in calls]
    cold = cold_fractions(StepCapture(calls=(far, *sized)), gpu)[1:]
    return [priceable(c, share) for c, share in zip(sized, cold, strict=True)]


def _with_numel(call: OpCall, numel: int) -> OpCall:
    """The call with its tensors resized to ``numel`` elements."""

    def sized(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        shapes = [(numel,) if t.shape else () for t in tensors]  # a norm is one number
        pairs = zip(tensors, shapes, strict=True)
        return tuple(replace(t, shape=shape, stride=(), zero_frac=0.0) for t, shape in pairs)

    return replace(call, args=sized(call.args), outputs=sized(call.outputs))
