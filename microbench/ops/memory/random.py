"""Random numbers: dropout, draws of a tensor's size, permutations, samples of categories."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.calls import answers_of, call_of
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Numbers,
    Workload,
    is_any,
    itemsize_bytes,
    logs,
)
from itercast.microbench.ops.sizes import MAX_NUMEL, points_of, scale_axes

DROPOUT = ("native_dropout", "native_dropout_backward")
FACTS = facts_of(__file__)
MAX_CATEGORIES = 2**20
READS = (*DROPOUT, "bernoulli")
FLOPS_PER_NUMBER: float = assumed(__file__, "flops_per_number")


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOp:
    """One call over rows x size elements; ``draws`` are made per row by multinomial.

    Only multinomial has more than one row.
    """

    op: str
    size: int
    rows: int = 1
    draws: int = 1
    replacement: bool = False
    dtype: str = "fp32"


def _is_quick(p: RandomOp) -> bool:
    """A core draws some 100 million numbers a second."""
    drawn = p.rows * max(p.size, 16 * p.draws)
    return p.op != "multinomial" or (p.draws <= p.size and drawn <= MAX_CATEGORIES)


def build(p: RandomOp, device: str) -> Workload:
    """Operands as in a model; draws overwrite them, so that values never drift."""
    dtype = torch_dtype(p.dtype)
    operands = {
        "x": lambda: torch.rand(p.rows, p.size, device=device).to(dtype),
        "mask": lambda: torch.rand(p.rows, p.size, device=device) > 0.1,
        **{name: getattr(p, name) for name in ("size", "draws", "replacement")},
        "dtype": dtype,
        "device": device,
    }
    return Workload(run=call_of(p.op, FACTS["calls"][p.op], operands))


def flops(p: RandomOp) -> Numbers:
    """FLOPS_PER_NUMBER per number drawn; a mask's product one.

    Multinomial draws a number per category without replacement, else makes a running sum.
    """
    flops_per_number = np.where(np.equal(p.op, "native_dropout_backward"), 1.0, FLOPS_PER_NUMBER)
    return flops_per_number * p.rows * p.size


def bytes_moved(p: RandomOp) -> Numbers:
    """Numbers written once, inputs of dropout and of probabilities read once, a byte per mask."""
    numbers = 1.0 * p.rows * p.size
    reads = is_any(p.op, READS)
    mask = np.where(is_any(p.op, DROPOUT), 1.0, 0.0)
    plain = numbers * ((1.0 + reads) * itemsize_bytes(p.dtype) + mask)
    sampled = numbers * itemsize_bytes(p.dtype) + 8.0 * p.rows * p.draws
    return np.where(np.equal(p.op, "multinomial"), sampled, plain)


def features(p: RandomOp, gpu: Gpu) -> dict[str, Numbers | str]:
    """Size, numbers per core, draws per row."""
    numbers = 1.0 * p.rows * p.size
    return {
        "op": p.op,
        "dtype": p.dtype,
        "replacement": 1.0 * p.replacement,
        **logs(p, "size", "rows", "draws"),
        "log_draws_per_size": np.log2(p.draws / p.size),
        "log_per_core": np.log2(numbers / gpu.sm_count),
    }


def from_call(call: OpCall) -> RandomOp | None:
    """Any draw: the result sets the size; native_dropout(x, p, train), bernoulli_(x, p)."""
    op = call.op.split(".")[1]
    tensors = [*call.outputs[:1], *call.tensors()]
    if not tensors:
        return None
    drawn = tensors[0]
    return RandomOp(op=FACTS["same_as"].get(op, op), size=max(1, drawn.numel), dtype=drawn.dtype)


def from_multinomial(call: OpCall) -> RandomOp | None:
    """Describe multinomial(probabilities, draws, replacement=False)."""
    x, draws = call.args[:2]
    replacement = call.argument(2, "replacement", False)
    if x.numel == 0:
        return None
    rows, size = x.numel // x.shape[-1], x.shape[-1]
    return RandomOp(
        op="multinomial",
        size=size,
        rows=rows,
        draws=draws,
        replacement=bool(replacement),
        dtype=x.dtype,
    )


def resize(p: RandomOp, factor: float, first_share: float) -> RandomOp:
    """Grows the count of numbers, of multinomial its rows."""
    return scale_axes(p, factor, 1.0, {"rows" if p.op == "multinomial" else "size": MAX_NUMEL})


def gpu_variant(p: RandomOp, rng: np.random.Generator) -> RandomOp:
    """A dropout kernel in place of ``bernoulli_``, with which a CPU's dropout draws its mask."""
    return replace(p, op=str(rng.choice(DROPOUT))) if p.op == "bernoulli_" else p


FAMILY = Family(
    name="random",
    params=RandomOp,
    sweep=points_of(14, FACTS["sweep"], RandomOp, _is_quick),
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers=answers_of(FACTS["answers"], from_call, from_multinomial),
    gpu_sweep=GpuSweep(
        variant=gpu_variant,
        resize=resize,
    ),
    fusible=True,
)
