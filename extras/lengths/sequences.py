"""Sequences of unlike lengths in a batch: padded to the longest of each micro-batch, or packed.

Lengths are drawn at random from a file or a distribution, a number of steps of all replicas. A step
lasts as long as that of its slowest replica. Padded: the one whose longest sequences are longest.
Packed: rows of the whole context are filled with sequences in the order drawn, and attention stays
within a sequence; rows have the same number of tokens, so the slowest replica has the largest sum
of squared lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.attention_kernels import SDPA_OPS

ROWS = 65536  # drawn at most, where that leaves FEWEST_STEPS
STEPS, FEWEST_STEPS = 64, 4
DRAWN = 4096  # lengths that stand for a distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What a micro-batch of the slowest replica computes, as a mean over steps.

    - ``row_tokens``: tokens of a row, with its padding.
    - ``squares``: sum of the squared lengths that attention runs over, with their padding.
    - ``rows``, ``sequences``: of a micro-batch; packed rows hold several sequences.
    - ``real_tokens``: tokens of a row that are no padding, as a mean of all replicas.
    - ``imbalance``: what makes a replica slow (tokens; packed: squares), slowest over mean.
    """

    row_tokens: float
    squares: float
    rows: int
    sequences: float
    real_tokens: float
    imbalance: float

    @property
    def padding_frac(self) -> float:
        """Share of the slowest replica's tokens that are padding."""
        return max(0.0, 1 - self.real_tokens / self.row_tokens)

    @property
    def attention(self) -> tuple[int, int]:
        """Equal sequences with the same sum of squared lengths: how many, and their length."""
        count = max(1, round(self.sequences))
        return count, max(1, round(math.sqrt(self.squares / count)))

    def facts(self) -> dict[str, float]:
        """What a forecast reports of it."""
        return {
            "row_tokens": self.row_tokens,
            "real_tokens": self.real_tokens,
            "padding_frac": self.padding_frac,
            "attention_tokens": self.squares / (self.rows * self.row_tokens),
            "imbalance": self.imbalance,
        }


def unlike_lengths(
    spec: str, plan: ParallelPlan, packed: bool, *, batch: int | None, seq: int | None
) -> tuple[int, Callable[[StepCapture], StepCapture]]:
    """The length to capture a micro-batch of ``batch`` samples at, and what its step becomes.

    ``seq``: the context. ValueError where lengths are not stated, or mean nothing.
    """
    if not spec:
        raise ValueError("packed sequences need --lengths: how long they are")
    if not (batch and seq):
        lacks = "a model of sequences, and their length (--seq)" if batch else "a batch (--batch)"
        raise ValueError(f"lengths {spec!r} need {lacks}")
    if plan.cp > 1:
        raise ValueError(f"plan {str(plan)!r}: cp cuts sequences of one length: no lengths")
    lengths = lengths_of(spec, plan, rows=batch, context=seq, packed=packed)
    rewrite = partial(with_lengths, lengths=lengths, packed=packed)
    return max(1, round(lengths.row_tokens)), rewrite


def read_lengths(spec: str, context: int) -> np.ndarray:
    """Lengths by a text: ``uniform:LOW:HIGH``, ``lognormal:MEDIAN:SIGMA`` (cut at the context), or
    a file of whole numbers; ValueError names one that is not from 1 to the context.
    """
    kind, *numbers = spec.split(":")
    if kind not in ("uniform", "lognormal"):
        return _read_file(Path(spec), context)
    try:
        low, high = (float(n) for n in numbers)
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low > 0 and high > 0):
        form = "uniform:LOW:HIGH" if kind == "uniform" else "lognormal:MEDIAN:SIGMA"
        raise ValueError(f"lengths {spec!r}: {form} has two positive numbers")
    shares = (np.arange(DRAWN) + 0.5) / DRAWN
    if kind == "uniform":
        if high < low:
            raise ValueError(f"lengths {spec!r}: HIGH is at least LOW")
        _within(np.array([low, high]), context, repr(spec))
        return np.round(low + shares * (high - low)).astype(int)
    from statistics import NormalDist

    deviates = np.array([NormalDist().inv_cdf(share) for share in shares])
    with np.errstate(over="ignore"):  # infinite ones are cut, too
        drawn = np.minimum(context, np.maximum(1, np.round(low * np.exp(high * deviates))))
    return drawn.astype(int)


def _read_file(path: Path, context: int) -> np.ndarray:
    try:
        words = path.read_text().split()
        found = np.array([int(word) for word in words])
    except (OSError, ValueError) as exc:
        known = "known are uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA and files of whole numbers"
        raise ValueError(f"lengths {str(path)!r}: {exc}; {known}") from None
    if not len(found):
        raise ValueError(f"lengths {str(path)!r}: no numbers")
    return _within(found, context, repr(str(path)))


def _within(found: np.ndarray, context: int, where: str) -> np.ndarray:
    wrong = found[(found < 1) | (found > context)]
    if len(wrong):
        rule = f"a length is from 1 to the {context} tokens of the context"
        raise ValueError(f"lengths {where}: {rule}, got {wrong[0]:.15g}")
    return found


def lengths_of(
    spec: str, plan: ParallelPlan, *, rows: int, context: int, packed: bool = False
) -> Lengths:
    """The work of the slowest of a plan's replicas; ``rows``: of one of its micro-batches."""
    micro, replicas = plan.microbatches, plan.dp
    each = replicas * micro * rows
    steps = max(FEWEST_STEPS, min(STEPS, ROWS // each))
    known, rng = read_lengths(spec, context), np.random.default_rng(0)
    shape = (steps, replicas, micro, rows)
    if packed:
        return _packed(known, rng, shape, context)
    drawn = rng.choice(known, shape)
    longest = drawn.max(axis=3)  # of a micro-batch, which is padded to it
    load, squares = longest.mean(axis=2), rows * (longest.astype(float) ** 2).mean(axis=2)
    slowest = load.argmax(axis=1)[:, None]
    row_tokens = float(np.take_along_axis(load, slowest, 1).mean())
    return Lengths(
        row_tokens=row_tokens,
        squares=float(np.take_along_axis(squares, slowest, 1).mean()),
        rows=rows,
        sequences=rows,
        real_tokens=float(drawn.mean()),
        imbalance=row_tokens / float(load.mean()),
    )


def _packed(
    known: np.ndarray, rng: np.random.Generator, shape: tuple[int, ...], context: int
) -> Lengths:
    """Rows of ``context`` tokens, filled with sequences whose lengths are drawn from ``known``.

    ``shape``: (steps, replicas, micro-batches, rows of a micro-batch).
    """
    count, rows = math.prod(shape), shape[-1]
    facts = np.array(_fill(known, rng, count, context), dtype=float)
    tokens, squares, sequences = facts.T.reshape(3, *shape)
    load = squares.sum(axis=3).mean(axis=2)  # of a replica's micro-batch
    slowest = float(load.max(axis=1).mean())
    return Lengths(
        row_tokens=context,
        squares=slowest,
        rows=rows,
        sequences=rows * float(sequences.mean()) * float(load.mean()) / slowest,
        real_tokens=float(tokens.mean()),
        imbalance=slowest / float(load.mean()),
    )


def _fill(
    known: np.ndarray, rng: np.random.Generator, count: int, context: int
) -> list[tuple[int, int, int]]:
    """Fill ``count`` rows in turn; returns (tokens, sum of squares, sequences) of each."""
    found = list[tuple[int, int, int]]()
    left = np.empty(0, dtype=int)
    while len(found) < count:
        left = np.concatenate([left, rng.choice(known, 4 * count)])
        ends, squares, start = np.cumsum(left), np.cumsum(left**2), 0
        while len(found) < count:
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + context, "right"))
            if stop == len(left):
                break  # the row may hold more than was drawn
            squared = int(squares[stop - 1]) - (int(squares[start - 1]) if start else 0)
            found.append((int(ends[stop - 1]) - before, squared, stop - start))
            start = stop
        left = left[start:]
    return found


def with_lengths(capture: StepCapture, lengths: Lengths, *, packed: bool) -> StepCapture:
    """The step whose self-attention runs over equal sequences with the same sum of squares.

    The keyword ``sequences`` of such a call is (sequences per captured one, number of captured
    ones, their length). ValueError where sequences are packed and the step has no fused attention.
    """
    count, length = lengths.attention
    calls, found = list[OpCall](), False
    for call in capture.calls:
        q: tuple[int, ...] = call.args[-3].shape if call.op in SDPA_OPS else ()
        if len(q) > 2 and q[-2] == call.args[-2].shape[-2] > 1:  # as many queries as keys
            found = True
            sequences = (count, lengths.rows, length)
            call = replace(call, kwargs={**call.kwargs, "sequences": sequences})
        calls.append(call)
    if packed and not found:
        raise ValueError("packed sequences need fused attention (sdpa), and the model has none")
    return replace(capture, calls=tuple(calls), lengths=lengths.facts())
