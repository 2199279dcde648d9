"""What the host does without a kernel: module calls, views, autograd bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.ops.family import Family, Workload

CALLS = 50
OPS = ("module_call", "view_op", "autograd_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One event of a kind; ``trial`` tells repetitions of the same measurement apart."""

    op: str
    trial: int = 0
    dtype: str = "fp32"


def sweep() -> Iterator[Host]:
    """Each kind eight times: the spread is the machine's, there are no sizes to vary."""
    for trial in range(8):
        for op in OPS:
            yield Host(op=op, trial=trial)


def build(p: Host, device: str) -> Workload:
    """Chains of fifty events on a tensor of one element; autograd_node includes its backward."""
    import torch  # lazy: formulas must import where torch is absent

    x = torch.ones(1, device=device)
    leaf = torch.ones(1, device=device, requires_grad=True)
    module = torch.nn.Identity()

    def module_calls() -> None:
        for _ in range(CALLS):
            module(x)

    def views() -> None:
        for _ in range(CALLS):
            x.view(1, 1)

    def nodes() -> None:
        y = leaf
        for _ in range(CALLS):
            y = y.view_as(x)
        torch.autograd.grad(y, leaf, x)

    runs = {"module_call": module_calls, "view_op": views, "autograd_node": nodes}
    return Workload(run=runs[p.op], calls=CALLS)


def flops(p: Any) -> Any:
    """None."""
    return np.zeros_like(p.trial, dtype=float)


def bytes_moved(p: Any) -> Any:
    """None worth counting."""
    return np.zeros_like(p.trial, dtype=float)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """The kind is all there is."""
    return {"op": p.op, "dtype": p.dtype}


FAMILY = Family(
    name="host",
    params=Host,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={},
)
