"""Captured op calls with a duration each: learned where there is a model, roofline elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from compose.pricer import Pricer, price_or_none
from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, StepCapture
from microbench.ops import families
from microbench.ops.family import Family

UNMODELLED = "unmodelled"
UNMODELLED_P90 = 2.0  # assumption: a roofline is a lower bound, real ops take up to twice that
ALLOCATORS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One call with its duration in us; ``family`` is 'unmodelled' where roofline priced it.

    ``flops`` are those of the family's formula, 0 where no family answers for the call.
    """

    family: str
    op: str
    index: int
    phase: str
    duration_us: float
    p10: float
    p90: float
    in_envelope: bool
    flops: float = 0.0
    flops_family: str = ""
    dtype: str = "fp32"


def cold_fractions(calls: tuple[OpCall, ...], l2_bytes: float) -> list[float]:
    """Share of each call's input bytes that have left the last cache since they were touched.

    Reuse distance of a storage: bytes touched by the calls between its last read or write and this
    call, in a steady state (the walk before the one that counts is the previous step). A tensor is
    warm up to half the cache and cold from one and a half; bytes of unknown storage are cold.
    """
    clock, last = 0.0, dict[int, float]()
    for call in calls:
        clock = _touch(call, clock, last)
    result = []
    for call in calls:
        cold = total = 0.0
        for storage, nbytes in _distinct(call.tensors()):
            distance = clock - last[storage] if storage in last else float("inf")
            cold += nbytes * min(1.0, max(0.0, (distance - 0.5 * l2_bytes) / l2_bytes))
            total += nbytes
        result.append(cold / total if total else 0.0)
        clock = _touch(call, clock, last)
    return result


def _distinct(tensors: Any) -> list[tuple[int, int]]:
    """(storage, bytes) once per storage; tensors of unknown storage count each."""
    known: dict[int, int] = {}
    unknown = []
    for t in tensors:
        if t.storage < 0:
            unknown.append((-1, t.nbytes))
        else:
            known[t.storage] = max(known.get(t.storage, 0), t.nbytes)
    return [*known.items(), *unknown]


def _touch(call: OpCall, clock: float, last: dict[int, float]) -> float:
    if _allocates(call):
        return clock
    touched = _distinct([*call.tensors(), *call.outputs])
    clock += sum(nbytes for _, nbytes in touched)
    last.update((storage, clock) for storage, _ in touched if storage >= 0)
    return clock


def _allocates(call: OpCall) -> bool:
    """An allocation touches no bytes."""
    return call.op.partition(".")[2].partition(".")[0] in ALLOCATORS


def generic_bytes(call: OpCall) -> int:
    """Bytes of all inputs (once per storage) and all outputs; 0 for allocations."""
    if _allocates(call):
        return 0
    inputs = sum(nbytes for _, nbytes in _distinct(call.tensors()))
    return inputs + sum(t.nbytes for t in call.outputs)


def describe(call: OpCall) -> tuple[Family, Any] | None:
    """The family that answers for a call and the call as its parameters."""
    for family in families().values():
        answer = family.answers.get(call.op)
        params = answer(call) if answer else None
        if params is not None:
            return family, params
    return None


def price_calls(capture: StepCapture, pricer: Pricer, gpu: Gpu, threads: int) -> list[PricedOp]:
    """Every call of the step in launch order; equal shapes are priced once, a family in one call.

    Duration = (1 - f) * warm + f * cold, f from ``cold_fractions``; bounds are mixed alike.
    """
    described = [describe(call) for call in capture.calls]
    by_family: dict[str, dict[Any, int]] = {}
    for found in described:
        if found:
            shapes = by_family.setdefault(found[0].name, {})
            shapes.setdefault(found[1], len(shapes))
    prices = {
        name: _price_shapes(pricer, name, list(shapes), gpu, threads)
        for name, shapes in by_family.items()
    }
    cold = cold_fractions(capture.calls, gpu.l2_bytes)
    ops = []
    for index, (call, found) in enumerate(zip(capture.calls, described, strict=True)):
        place: dict[str, Any] = {"op": call.op, "index": index, "phase": call.phase}
        facts: dict[str, Any] = {}
        bound_us = generic_bytes(call) / gpu.hbm_bytes_per_s * 1e6
        if found:
            family, params = found
            flops, dtype = float(family.flops(params)), str(getattr(params, "dtype", "fp32"))
            facts = {"flops": flops, "flops_family": family.name, "dtype": dtype}
            table = prices[family.name]
            if table is not None:
                row = by_family[family.name][params]
                ops.append(_mixed(table, row, cold[index], family.name, place | facts))
                continue
            moved = float(family.bytes_moved(params))
            bound_us = max(flops / gpu.peak(dtype), moved / gpu.hbm_bytes_per_s) * 1e6
        ops.append(
            PricedOp(
                family=UNMODELLED,
                duration_us=bound_us,
                p10=bound_us,
                p90=UNMODELLED_P90 * bound_us,
                in_envelope=False,
                **place,
                **facts,
            )
        )
    return ops


def _price_shapes(
    pricer: Pricer, family: str, shapes: list[Any], gpu: Gpu, threads: int
) -> pd.DataFrame | None:
    """Prices of the shapes: first every shape warm, then every shape cold; None: no model."""
    rows = [
        {f.name: getattr(p, f.name) for f in fields(p)}
        | {"gpu": gpu.name, "threads": threads, "cache": cache}
        for cache in ("warm", "cold")
        for p in shapes
    ]
    table = price_or_none(pricer, family, pd.DataFrame(rows), gpu)
    return None if table is None else table.reset_index(drop=True)


def _mixed(
    table: pd.DataFrame, row: int, cold_frac: float, family: str, facts: dict[str, Any]
) -> PricedOp:
    other = row + len(table) // 2

    def mix(column: str) -> float:
        values = table[column].to_numpy()
        return float((1 - cold_frac) * values[row] + cold_frac * values[other])

    inside = table["in_envelope"].to_numpy()
    return PricedOp(
        family=family,
        duration_us=mix("predicted_us"),
        p10=mix("predicted_us_p10"),
        p90=mix("predicted_us_p90"),
        in_envelope=bool(inside[row] and (cold_frac == 0 or inside[other])),
        **facts,
    )
