"""Optimizer arithmetic over lists of tensors: the foreach ops of SGD, Adam and AdamW."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, TensorSpec
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype

ONE = ("_foreach_mul_", "_foreach_add_", "_foreach_sqrt", "_foreach_div_", "_foreach_neg")
TWO = ("_foreach_lerp_", "_foreach_addcmul_", "_foreach_addcdiv_", "_foreach_add_list")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOp:
    """One foreach call over ``tensors`` tensors of ``numel`` elements together."""

    op: str
    tensors: int
    numel: int
    dtype: str = "fp32"


def sweep() -> Iterator[OptimizerOp]:
    """Endless: 1 to 200 tensors, up to 16M elements."""
    rng = np.random.default_rng(5)
    while True:
        tensors = log_uniform(rng, 1, 200)
        numel = max(tensors, log_uniform(rng, 64, 2**24))
        yield OptimizerOp(op=str(rng.choice(ONE + TWO)), tensors=tensors, numel=numel)


def build(p: OptimizerOp, device: str) -> Workload:
    """Half of the tensors small, as biases are; values that neither vanish nor overflow."""
    import torch  # lazy: formulas must import where torch is absent

    def tensors() -> list[Any]:
        large = max(1, (p.tensors + 1) // 2)
        small = max(1, min(256, p.numel // p.tensors // 2))
        each = max(1, (p.numel - small * (p.tensors - large)) // large)
        sizes = [each] * large + [small] * (p.tensors - large)
        return [torch.rand(n, device=device).add_(0.5).to(torch_dtype(p.dtype)) for n in sizes]

    xs, ys, zs = tensors(), tensors(), tensors()
    aten = torch.ops.aten
    factors = [1.0] * p.tensors
    runs = {
        "_foreach_mul_": lambda: aten._foreach_mul_.Scalar(xs, 0.9999),
        "_foreach_add_": lambda: aten._foreach_add_.Scalar(xs, 1e-8),
        "_foreach_sqrt": lambda: aten._foreach_sqrt(xs),
        "_foreach_neg": lambda: aten._foreach_neg(xs),
        "_foreach_div_": lambda: aten._foreach_div_.ScalarList(xs, factors),
        "_foreach_lerp_": lambda: aten._foreach_lerp_.Scalar(xs, ys, 0.1),
        "_foreach_addcmul_": lambda: aten._foreach_addcmul_.Scalar(xs, ys, zs, 1e-6),
        "_foreach_addcdiv_": lambda: aten._foreach_addcdiv_.ScalarList(
            xs, ys, zs, [-1e-6] * len(xs)
        ),
        "_foreach_add_list": lambda: aten._foreach_add_.List(xs, ys, alpha=1e-8),
    }
    return Workload(run=runs[p.op])


def flops(p: Any) -> Any:
    """Two per element."""
    return 2.0 * p.numel


def operands(p: Any) -> Any:
    """Tensor lists read or written per call."""
    three = np.isin(p.op, ["_foreach_lerp_", "_foreach_add_list"])
    four = np.isin(p.op, ["_foreach_addcmul_", "_foreach_addcdiv_"])
    return np.where(four, 4, np.where(three, 3, 2))


def bytes_moved(p: Any) -> Any:
    """Every operand once."""
    return 1.0 * operands(p) * p.numel * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Number of tensors, and elements per tensor."""
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_tensors": np.log2(p.tensors),
        "log_numel": np.log2(p.numel),
        "log_each": np.log2(p.numel / p.tensors),
    }


def from_call(call: OpCall) -> OptimizerOp | None:
    """The first list of tensors sets the size; a second list tells add.List from add.Scalar."""
    lists = [a for a in call.args if isinstance(a, tuple) and a and isinstance(a[0], TensorSpec)]
    if not lists:
        return None
    _, op, overload = call.op.split(".")
    op = "_foreach_add_list" if op == "_foreach_add_" and overload == "List" else op
    numel = max(1, sum(t.numel for t in lists[0]))
    return OptimizerOp(op=op, tensors=len(lists[0]), numel=numel, dtype=lists[0][0].dtype)


NAMES = (*ONE, *(n for n in TWO if not n.endswith("list")))
OVERLOADS = ("default", "Scalar", "ScalarList", "List", "Tensor")
FAMILY = Family(
    name="optimizer",
    params=OptimizerOp,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={f"aten.{n}.{o}": from_call for n in NAMES for o in OVERLOADS},
)
