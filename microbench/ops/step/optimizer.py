"""Optimizer arithmetic over lists of tensors: foreach ops and fused steps of SGD, Adam, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, TensorSpec, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Tensor,
    Values,
    Workload,
    itemsize_bytes,
    repeated,
)
from itercast.microbench.ops.memory.elementwise import Elementwise
from itercast.microbench.ops.sizes import points_of, swept

FACTS = facts_of(__file__)
ONE, TWO, FUSED, ADAM = (
    tuple[str, ...](FACTS[name].split()) for name in ("one", "two", "fused", "adam")
)
ROOT, NORM, SGD = "_foreach_sqrt", "_foreach_norm", "_foreach_add_list"
LEARNING_RATE = ("default", "tensor_lr")  # overloads of torch's own fused calls, named ..._
SAME_AS: Mapping[str, str] = FACTS["same_as"] | FACTS["counted_as"]
LOOP: Mapping[str, Mapping[str, int]] = FACTS["loop"]
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"  # of torch.amp.GradScaler
OPERANDS: dict[str, int] = FACTS["operands"]
FLOPS: dict[str, int] = FACTS["flops"]
# Rows of whole steps, without and with decay of weights; no call is one.
STEPS = {"foreach_adam": ADAM, "foreach_adamw": ("_foreach_mul_", *ADAM)}
OPERANDS |= {step: sum(OPERANDS.get(c, 2) for c in calls) for step, calls in STEPS.items()}
FLOPS |= {step: 2 * len(calls) for step, calls in STEPS.items()}
EACH = "_foreach_div_each"  # no kernel takes such lists: a division for each tensor
ALIGNED = 4  # elements that a kernel reads at once
# Lists of at most so many elements per tensor hold step counters, not parameters.
STEP_COUNTERS: int = assumed(__file__, "step_counter_elements")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOp:
    """One foreach or fused call over ``tensors`` tensors of ``numel`` elements together.

    ``zero_frac``: share of zeros under a square root (rows of tables that no batch touched).
    ``aligned_frac``: share of the elements that are in tensors whose length is a multiple of 4.
    Kernels read four elements at once in those alone (``is_aligned`` and kILP in
    aten/src/ATen/native/cuda/ForeachFunctors.cuh); in 16 bits they take up to twice as long for
    others.
    """

    op: str
    tensors: int
    numel: int
    zero_frac: float = 0.0
    aligned_frac: float = 1.0
    dtype: str = "fp32"


def _drawn(tensors: int, numel: int = 0, each: int = 1, **fields: Any) -> OptimizerOp:
    """A point from sizes as the YAML file states them; ``each``: elements of a tensor at least."""
    return OptimizerOp(tensors=tensors, numel=max(tensors * each, numel), **fields)


def build(p: OptimizerOp, device: str) -> Workload:
    """Builds lists of random tensors, half of them small, as biases are (``lengths``).

    Repeated calls keep values in range.
    """

    def tensors() -> list[Tensor]:
        dtype = torch_dtype(p.dtype)
        return [repeated(torch.rand, (n,), device).add_(0.5).to(dtype) for n in lengths(p)]

    if p.op in FUSED:
        return Workload(run=_fused(p.op, tensors), through_aten=False)
    xs = tensors()
    ys = tensors() if p.op in TWO else []
    squared = p.op == "_foreach_addcmul_"  # AdamW's gradients, by themselves
    zs = ys if squared or not ys else tensors()
    for x in xs if p.zero_frac else ():  # rows of 32 zeros, as tables have
        rows = torch.rand(-(-x.numel() // 32), device=device) >= p.zero_frac
        x.mul_(rows.repeat_interleave(32)[: x.numel()])
    factors = [1.0] * p.tensors
    runs = {
        "_foreach_mul_": lambda: torch._foreach_mul_(xs, 0.9999),
        "_foreach_add_": lambda: torch._foreach_add_(xs, 1e-8),
        "_foreach_sqrt": lambda: torch._foreach_sqrt(xs),
        NORM: lambda: torch._foreach_norm(xs),
        "_foreach_neg": lambda: torch._foreach_neg(xs),
        "_foreach_div_": lambda: torch._foreach_div_(xs, factors),
        "_foreach_lerp_": lambda: torch._foreach_lerp_(xs, ys, 0.1),
        "_foreach_addcmul_": lambda: torch._foreach_addcmul_(xs, ys, zs, 1e-6),
        "_foreach_addcdiv_": lambda: torch._foreach_addcdiv_(xs, ys, zs, [-1e-6] * len(xs)),
        "_foreach_add_list": lambda: torch._foreach_add_(xs, ys, alpha=1e-8),
    }
    return Workload(run=runs[p.op], through_aten=False)


def lengths(p: OptimizerOp) -> list[int]:
    """Lengths of the tensors that ``build`` makes: about ``numel`` elements together.

    Half of the tensors are long. Some of the long ones, with ``1 - aligned_frac`` of the elements,
    have odd lengths; all other lengths are multiples of 4, unless that changes ``numel`` much.
    """
    count = max(1, (p.tensors + 1) // 2)  # of long ones
    short = max(1, min(256, p.numel // p.tensors // 2))
    long = max(1, (p.numel - short * (p.tensors - count)) // count)
    short, long = (n - n % ALIGNED if n > 16 * ALIGNED else n for n in (short, long))
    odd_count = min(count - 1, round((1 - p.aligned_frac) * count)) if long > 16 * ALIGNED else 0
    sizes = [long] * (count - odd_count) + [long + (-1) ** i for i in range(odd_count)]
    sizes += [short] * (p.tensors - count)
    sizes[0] += p.numel - sum(sizes)
    return sizes


def _fused(op: str, tensors: Callable[[], list[Tensor]]) -> Callable[[], object]:
    """A fused step with rates so small that a thousand steps hardly change the values."""
    params, grads = tensors(), tensors()
    if op.startswith("_fused_sgd"):
        momenta = tensors() if op.endswith("momentum") else []
        settings: dict[str, Any] = {
            "weight_decay": 0.0,
            "lr": 1e-6,
            "dampening": 0.1,
            "nesterov": False,
        }
        settings |= {"momentum": 0.9 if momenta else 0.0, "maximize": False, "is_first_step": False}
        return lambda: torch._fused_sgd_(params, grads, momenta, **settings)
    means, squares = tensors(), tensors()
    amsgrad = op.endswith("amsgrad")
    largest = tensors() if amsgrad else []
    steps = [torch.ones((), device=x.device) for x in params]
    rates = {"lr": 1e-6, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    call: Any = torch._fused_adamw_ if op == "_fused_adamw_" else torch._fused_adam_
    lists = (params, grads, means, squares, largest, steps)
    return lambda: call(*lists, **rates, amsgrad=amsgrad, maximize=False)


def _of_op(p: OptimizerOp, table: Mapping[str, int]) -> Values:
    """The table's value for each op, 2 for ops that it lacks."""
    ops = list(table)
    return np.select([np.equal(p.op, op) for op in ops], [table[op] for op in ops], 2)


def flops(p: OptimizerOp) -> Values:
    """Two per element; fused Adam 16 (two averages, decay, root, division), SGD 4 to 6."""
    return 1.0 * _of_op(p, FLOPS) * p.numel


def bytes_moved(p: OptimizerOp) -> Values:
    """Every operand once each time it is read or written; step counters are neglected."""
    return 1.0 * _of_op(p, OPERANDS) * p.numel * itemsize_bytes(p.dtype)


def features(p: OptimizerOp, gpu: Gpu) -> dict[str, Numbers | str]:
    """Number of tensors, and elements per tensor."""
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_tensors": np.log2(p.tensors),
        "log_numel": np.log2(p.numel),
        "log_each": np.log2(p.numel / p.tensors),
        "zero_frac": p.zero_frac,
        "aligned_frac": p.aligned_frac,
    }


def from_call(call: OpCall) -> OptimizerOp | None:
    """Describe a foreach or fused optimizer call by the tensors of its first list.

    Overloads and options with a cost of their own are told by further lists: add.List from
    add.Scalar, momentum by the third list of fused SGD, amsgrad by the fifth of fused Adam; EACH
    by a second list of single numbers on the device, as a capturable Adam divides by.
    """
    lists = [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]
    if not lists:
        return None
    _, op, overload = call.op.split(".")
    op = SAME_AS.get(op, op)
    op = "_foreach_add_list" if op == "_foreach_add_" and overload == "List" else op
    if op == "_foreach_div_" and len(lists) > 1 and lists[1][0].shape != lists[0][0].shape:
        op = EACH
    if op == "_fused_sgd_" and call.args[2]:
        op = "_fused_sgd_momentum"
    if op in ("_fused_adam_", "_fused_adamw_") and op in call.op and call.args[4]:
        op = "_fused_adam_amsgrad"
    numel = max(1, sum(t.numel for t in lists[0]))
    zeros = sum(t.zero_frac * t.numel for t in lists[0]) / numel
    return OptimizerOp(
        op=op,
        tensors=len(lists[0]),
        numel=numel,
        zero_frac=zeros,
        aligned_frac=sum(t.numel for t in lists[0] if t.numel % ALIGNED == 0) / numel,
        dtype=lists[0][0].dtype,
    )


NAMES = (*ONE, NORM, *(n for n in TWO if not n.endswith("list")), *FACTS["counted_as"])
OVERLOADS = ("default", "Scalar", "ScalarList", "List", "Tensor", "ScalarAndTensor")


def gpu_variant(p: OptimizerOp, rng: np.random.Generator) -> OptimizerOp:
    """The point without zeros, since square roots of zeros are no faster on a GPU."""
    return replace(p, zero_frac=0.0)


def resize(p: OptimizerOp, factor: float, first_share: float) -> OptimizerOp:
    """Makes the tensors larger, not more of them; step counters keep one element each.

    There is one axis, so that ``first_share`` decides nothing (``GpuSweep``).
    """
    if p.numel <= STEP_COUNTERS * p.tensors:
        return p
    return replace(p, numel=max(p.tensors, round(p.numel * factor)))


def of_rank(p: OptimizerOp, numel: int, tensors: int, largest: int) -> OptimizerOp:
    """The call that updates a rank's part: ``numel`` elements in ``tensors`` of the whole model's.

    A call over step counters keeps one element per tensor: it has at most STEP_COUNTERS per tensor,
    and fewer than ``largest``, the elements of the step's largest call.
    """
    counters = p.numel <= STEP_COUNTERS * p.tensors and p.numel < largest
    return replace(p, numel=max(tensors, tensors if counters else numel), tensors=tensors)


def fallback(p: OptimizerOp, measured: Measured) -> list[Part]:
    """Prices divisions of many tensors by one number each as one op per tensor."""
    if p.op != EACH:
        return []
    numel = max(1, p.numel // p.tensors)
    division = Elementwise(op="div", numel=numel, inner=numel, form="scalar", dtype=p.dtype)
    return [Part(family="elementwise", params=division, times=p.tensors)]


def as_fused(calls: Sequence[OptimizerOp]) -> OptimizerOp:
    """Replaces these foreach calls by a fused step: Adam if there are more than three, else SGD."""
    largest = max(calls, key=lambda p: p.numel)
    return replace(largest, op="_fused_adamw_" if len(calls) > 3 else "_fused_sgd_")


FAMILY = Family(
    name="optimizer",
    params=OptimizerOp,
    sweep=points_of(5, FACTS["cpu"], _drawn),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    fallback=fallback,
    answers={
        **{f"aten.{n}.{o}": from_call for n in NAMES for o in OVERLOADS},
        **{f"itercast.{n}.default": from_call for n in FACTS["same_as"]},
        **{f"aten.{n}.{o}": from_call for n in FUSED if n.endswith("_") for o in LEARNING_RATE},
    },
    weight=1.5,
    gpu_sweep=GpuSweep(
        points=partial(swept, stated=FACTS["gpu"], make=_drawn),
        variant=gpu_variant,
        resize=resize,
        slow_frac=0.2,
        weight=1.5,
    ),
)
