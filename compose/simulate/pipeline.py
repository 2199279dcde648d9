"""Pipeline schedules: the order of each rank's actions, and when each rank is done.

Adds: a message per micro-batch and stage boundary, forward and backward, and the bubble. Memory:
activations of the micro-batches in flight.

- gpipe: all forwards, then all backwards (arXiv:1811.06965);
- 1f1b: p - s forwards on stage s, then one backward for each forward (arXiv:1806.03377);
- interleaved: v chunks of layers per rank, p micro-batches at a time (arXiv:2104.04473);
- zb: 1f1b with backward cut in two; weight gradients fill the bubble (ZB-H1, arXiv:2401.10241);
- zbv: the same with two chunks per rank, the second ones in reverse order of ranks, so that the
  first rank has the first and the last chunk (ZB-V, the same paper, section 6);
- dualpipev: chunks as in zbv; forwards of one micro-batch alternate with whole backwards of another
  (arXiv:2412.19437, github.com/deepseek-ai/DualPipe). That the two overlap is not counted.

The orders of zbv and dualpipev are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from itercast.capture.plan_keys import V_SHAPED
from itercast.compose.parallel.v_shaped import Action, dualpipev, zbv
from itercast.compose.simulate.timeline import DeadlockError, Span

TIMES = "FBWA"  # order of the times of actions
FIRST, KEPT = "first", "kept"  # of the step's first micro-batch; right after its chunk's backward
VARIANTS = ("", FIRST, KEPT)
CUT_BACKWARD = ("zb", *V_SHAPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's times per micro-batch.

    ``input_us`` and ``weight_us``: the two parts of backward where a schedule may do weight
    gradients later. ``others_us``: by kind and variant those of actions that take another time.
    ``send_us``: a message to the next stage, or back from it. ``detached``: no gradient comes back
    from the next stage.
    """

    forward_us: float
    backward_us: float
    input_us: float = 0.0
    weight_us: float = 0.0
    others_us: Mapping[tuple[str, str], float] = field(default_factory=dict)
    send_us: float = 0.0
    detached: bool = False

    def of(self, kind: str, variant: str = "") -> float:
        """Time of an action."""
        us = {"F": self.forward_us, "B": self.input_us, "W": self.weight_us, "A": self.backward_us}
        return self.others_us.get((kind, variant), us[kind])


def run_as(kind: str, schedule: str) -> str:
    """What an action runs: all of backward unless it is cut."""
    return "A" if kind == "B" and schedule not in CUT_BACKWARD else kind


def rank_of_chunk(schedule: str, stages: int, chunk: int) -> int:
    """The rank that has a chunk of the model."""
    back = schedule in V_SHAPED and chunk >= stages
    return stages - 1 - chunk % stages if back else chunk % stages


def chunks_of_rank(schedule: str, stages: int, rank: int, chunks: int) -> list[int]:
    """The chunks of a rank, in forward order."""
    return [c for c in range(chunks) if rank_of_chunk(schedule, stages, c) == rank]


@lru_cache(maxsize=512)
def program(schedule: str, stages: int, rank: int, micro: int, virtual: int) -> tuple[Action, ...]:
    """Returns the actions of a rank in order: (kind, micro-batch, chunk of layers).

    Kinds: F forward, B backward, W gradients of weights where a schedule (zb) does them later.
    What is not named here is 1f1b, and zb as 1f1b with W.
    """
    if schedule == "gpipe":
        return tuple(("F", i, 0) for i in range(micro)) + tuple(("B", i, 0) for i in range(micro))
    if schedule == "interleaved":
        return _interleaved(stages, rank, micro, virtual)
    if schedule in V_SHAPED:
        return (zbv if schedule == "zbv" else dualpipev)(stages, rank, micro)
    warm = min(micro, stages - rank)
    actions: list[Action] = [("F", i, 0) for i in range(warm)]
    late = rank if schedule == "zb" else 0
    for i in range(micro):
        actions.append(("B", i, 0))
        if schedule == "zb" and i >= late:
            actions.append(("W", i - late, 0))
        if warm + i < micro:
            actions.append(("F", warm + i, 0))
    if schedule == "zb":
        actions += [("W", i, 0) for i in range(max(0, micro - late), micro)]
    return tuple(actions)


def variants(actions: Sequence[Action]) -> Iterator[str]:
    """Yields for each action whether it is of the first micro-batch, or follows a backward."""
    before = dict[int, str]()  # by chunk
    for kind, micro, chunk in actions:
        yield FIRST if micro == 0 else KEPT if before.get(chunk, "F") != "F" else ""
        if kind != "W":
            before[chunk] = kind


def _interleaved(stages: int, rank: int, micro: int, virtual: int) -> tuple[Action, ...]:
    """The actions of a rank in schedule interleaved; each k-th forward and backward by ``k``."""
    total = micro * virtual
    block = stages * virtual

    def forward(k: int) -> Action:
        return ("F", k // block * stages + k % stages, k % block // stages)

    def backward(k: int) -> Action:
        return ("B", k // block * stages + k % stages, virtual - 1 - k % block // stages)

    warm = min(total, (stages - rank - 1) * 2 + (virtual - 1) * stages)
    actions = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        actions += [forward(warm + k), backward(k)]
    return (*actions, *(backward(k) for k in range(total - warm, total)))


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str, stages: int, rank: int, micro: int, virtual: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many micro-batches' activations a rank holds at most, by chunk.

    A pair: until the end of its first backward, and later. Activations are also held for weight
    gradients that a schedule does later.
    """
    if schedule == "gpipe":
        return (micro,), (micro - 1,)
    held, most = [0] * virtual, ([0] * virtual, [0] * virtual)
    backward_ran = False
    for kind, _, chunk in program(schedule, stages, rank, min(micro, 3 * stages), virtual):
        held[chunk] += kind == "F"
        if sum(held) > sum(most[backward_ran]):
            most[backward_ran][:] = held
        held[chunk] -= kind in ("A", "W") or run_as(kind, schedule) == "A"
        backward_ran |= kind != "F"
    return tuple(most[0]), tuple(most[1])


@dataclass(frozen=True, slots=True)
class _Timing:
    """All actions of a pipeline sorted so that each waits only for earlier ones; 0 is the start.

    ``actions`` have the numbers of their chunks in the model; the arrays are by action from 1 on,
    and hold indices: of its time (``takes``) among the times of all chunks, by variant and kind as
    in ``VARIANTS`` and ``TIMES``; of its message's time (``sends``); of the action before it on its
    rank (``before``), the one whose message it waits for (``waits``), and the one whose message
    goes over the same link just before its own (``behind``). ``levels``: ranges of actions that do
    not wait for each other.
    """

    actions: tuple[Action, ...]
    variants: tuple[str, ...]
    takes: np.ndarray
    sends: np.ndarray
    before: np.ndarray
    waits: np.ndarray
    behind: np.ndarray
    levels: tuple[tuple[int, int], ...]
    last: np.ndarray  # by rank


@lru_cache(maxsize=256)
def _order(
    schedule: str, stages: int, micro: int, virtual: int, detached: frozenset[int]
) -> _Timing:
    """Sort the ranks' programs with a worklist; DeadlockError names what each rank is stuck at.

    Level: 1 + that of the last action waited for. No gradient comes back to ``detached`` chunks.
    """
    programs = [program(schedule, stages, r, micro, virtual) for r in range(stages)]
    count = stages * virtual
    level: dict[Action, int] = {}
    rows: list[_Row] = []
    differ = [list(variants(actions)) for actions in programs]
    position, rank_level = [0] * stages, [0] * stages
    ready = list(range(stages))
    while ready:
        r = ready.pop()
        own_chunks = chunks_of_rank(schedule, stages, r, count)
        while position[r] < len(programs[r]):
            kind, i, own_chunk = programs[r][position[r]]
            c = own_chunks[own_chunk]
            source = _source(kind, i, c, count, detached)
            if source is not None and source not in level:
                break
            rank_level[r] = 1 + max(rank_level[r], level[source] if source is not None else 0)
            level["B" if kind == "A" else kind, i, c] = rank_level[r]
            rows.append(_Row(rank_level[r], (kind, i, c), differ[r][position[r]], source))
            position[r] += 1
            neighbours = (rank_of_chunk(schedule, stages, (c + d) % count) for d in (1, -1))
            ready += [n for n in neighbours if n != r and n not in ready]
    stuck = [r for r in range(stages) if position[r] < len(programs[r])]
    if stuck:
        heads = ", ".join(f"rank {r}: {programs[r][position[r]]}" for r in stuck)
        raise DeadlockError(f"stages wait for each other; next actions: {heads}")
    ranks = [rank_of_chunk(schedule, stages, c) for c in range(count)]
    return _sorted(rows, ranks, detached)


class _Row(NamedTuple):
    """An action with the number of its chunk in the model, and the action that it waits for."""

    level: int
    action: Action
    variant: str
    source: Action | None


def _source(kind: str, i: int, c: int, count: int, detached: frozenset[int]) -> Action | None:
    """The action of a neighbouring chunk that an action waits for: before (F) or after (B)."""
    if kind == "F":
        return ("F", i, c - 1) if c else None
    if kind in "BA":
        return ("B", i, c + 1) if c + 1 < count and c not in detached else ("F", i, c)
    return None


def _sorted(rows: Sequence[_Row], ranks: Sequence[int], detached: frozenset[int]) -> _Timing:
    """Makes the arrays of ``_Timing`` from rows, by level; ``ranks``: the rank of each chunk."""
    count = len(ranks)
    ordered = sorted(rows, key=lambda row: row.level)
    number = {
        ("B" if kind == "A" else kind, i, c): n
        for n, (_, (kind, i, c), *_) in enumerate(ordered, start=1)
    }
    columns: list[list[int]] = [[0] for _ in range(5)]
    rank_last, link_last = [0] * (max(ranks) + 1), dict[tuple[bool, int], int]()
    edges = [1]  # where levels begin
    for n, (level, (kind, _, c), variant, source) in enumerate(ordered, start=1):
        if n > 1 and level != ordered[n - 2].level:
            edges.append(n)
        sends, back = 3 * count, kind in "BA"  # the entry of no message
        if (kind == "F" and c + 1 < count) or (back and c and c - 1 not in detached):
            sends = c if kind == "F" else c - 1
        same_chunk = source is not None and source[2] == c
        values = (
            (VARIANTS.index(variant) * len(TIMES) + TIMES.index(kind)) * count + c,
            sends,
            rank_last[ranks[c]],
            number[source] if source is not None and not same_chunk else 0,
            link_last.get((back, c), 0),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        rank_last[ranks[c]] = n
        if kind != "W":
            link_last[back, c] = n
    edges.append(len(ordered) + 1)
    _, actions, differ, _ = zip(*ordered, strict=True)
    takes, sends_, before, waits, behind = map(np.array, columns)
    levels, last = tuple(pairwise(edges)), np.array(rank_last)
    return _Timing(actions, differ, takes, sends_, before, waits, behind, levels, last)


def finish_us(
    schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int
) -> tuple[float, ...]:
    """When each rank's last action ends.

    An exact longest path over the ranks' programs and one link per boundary and direction.
    """
    times = _times(schedule, chunks, stages, micro)
    return tuple(float(t) for t in times.ends[times.order.last])


class _Times(NamedTuple):
    """For each action, in us: its time, its message's time, its end, its message's arrival."""

    order: _Timing
    took: np.ndarray
    sending: np.ndarray
    ends: np.ndarray
    arrives: np.ndarray


def _times(schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int) -> _Times:
    """The order of actions, and their times."""
    detached = frozenset(c for c, chunk in enumerate(chunks) if chunk.detached)
    order = _order(schedule, stages, micro, len(chunks) // stages, detached)
    kinds = [(run_as(kind, schedule), variant) for variant in VARIANTS for kind in TIMES]
    took = np.array([c.of(*kind) for kind in kinds for c in chunks])[order.takes]
    sent = np.zeros(3 * len(chunks) + 1)
    sent[: len(chunks)] = [c.send_us for c in chunks]
    sending = sent[order.sends]
    ends, arrives = np.zeros(len(took)), np.zeros(len(took))
    before, waits, behind = order.before, order.waits, order.behind
    for level in (slice(*edges) for edges in order.levels):
        ends[level] = np.maximum(ends[before[level]], arrives[waits[level]]) + took[level]
        arrives[level] = np.maximum(ends[level], arrives[behind[level]]) + sending[level]
    return _Times(order, took, sending, ends, arrives)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A chunk's last action of a step; ``busy_us``: the rank's work since another chunk's."""

    kind: str
    variant: str
    chunk: int
    start_us: float
    busy_us: float


def endings(
    schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int
) -> list[list[Ending]]:
    """The last actions of each rank's chunks, in order: the model's last chunks end first."""
    order, took, _, ends, _ = _times(schedule, chunks, stages, micro)
    last = [dict[int, int]() for _ in range(stages)]
    for n, (kind, i, c) in enumerate(order.actions, start=1):
        if kind != "F" and i == micro - 1:
            last[rank_of_chunk(schedule, stages, c)][c] = n
    by_rank: list[list[Ending]] = []
    for last_of_chunk in last:
        own, previous = list[Ending](), 0
        for c, n in sorted(last_of_chunk.items(), reverse=True):
            # Add up the rank's actions between the ending before and this one, backwards in time.
            start_us, busy_us, action = float(ends[n] - took[n]), 0.0, int(order.before[n])
            while action > previous > 0:
                busy_us, action = busy_us + float(took[action]), int(order.before[action])
            kind, variant = run_as(order.actions[n - 1][0], schedule), order.variants[n - 1]
            ending = Ending(kind=kind, variant=variant, chunk=c, start_us=start_us, busy_us=busy_us)
            own.append(ending)
            previous = n
        by_rank.append(own)
    return by_rank


def loads_us(
    schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int
) -> tuple[float, ...]:
    """Time of all actions of each rank."""
    order, took, *_ = _times(schedule, chunks, stages, micro)
    ranks = [rank_of_chunk(schedule, stages, c) for *_, c in order.actions]
    return tuple(np.bincount(ranks, weights=took[1:]).tolist())


def action_spans(
    schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int
) -> tuple[list[tuple[Action, str, Span]], list[tuple[int, int, Span]]]:
    """When each action that ``finish_us`` times runs, with its variant and chunk.

    Actions of one rank are in its order. Also when each message runs: (from chunk, to chunk, span).
    """
    order, *arrays = _times(schedule, chunks, stages, micro)
    took, sending, ends, arrives = (t.tolist() for t in arrays)
    actions, messages = list[tuple[Action, str, Span]](), list[tuple[int, int, Span]]()
    for n, (action, variant) in enumerate(zip(order.actions, order.variants, strict=True), start=1):
        kind, _, c = action
        actions.append((action, variant, Span(ends[n] - took[n], ends[n])))
        if order.sends[n] < len(chunks):
            to = c + 1 if kind == "F" else c - 1
            messages.append((c, to, Span(arrives[n] - sending[n], arrives[n])))
    return actions, messages
