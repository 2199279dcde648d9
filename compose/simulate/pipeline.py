"""Pipeline schedules: the order of each rank's actions, and when each rank is done.

Adds: a message per micro-batch and stage boundary, forward and backward, and the bubble. Memory:
activations of the micro-batches in flight.

- gpipe: all forwards, then all backwards (arXiv:1811.06965);
- 1f1b: p - s forwards on stage s, then one backward for each forward (arXiv:1806.03377);
- interleaved: v chunks of layers per rank, p micro-batches at a time (arXiv:2104.04473);
- zb: 1f1b with backward cut in two; weight gradients fill the bubble (ZB-H1, arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from itercast.compose.simulate.timeline import DeadlockError

Action = tuple[str, int, int]  # F, B or W; micro-batch; chunk of the rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's times per micro-batch.

    ``accumulate_us``: the part of backward that adds gradients to those of earlier micro-batches,
    which the first one leaves out. ``weight_us``: weight gradients, the part of backward that zb
    may do later. ``send_us``: a message to the next stage, or back from it.
    """

    forward_us: float
    backward_us: float
    accumulate_us: float = 0.0
    weight_us: float = 0.0
    send_us: float = 0.0

    def busy_us(self, micro: int) -> float:
        """Time of forward and backward of all micro-batches."""
        return micro * (self.forward_us + self.backward_us) - self.accumulate_us


@lru_cache(maxsize=512)
def program(schedule: str, stages: int, rank: int, micro: int, virtual: int) -> tuple[Action, ...]:
    """Returns the actions (forward, backward of which micro-batch) of a rank, in order."""
    if schedule == "gpipe":
        return tuple(("F", i, 0) for i in range(micro)) + tuple(("B", i, 0) for i in range(micro))
    if schedule == "interleaved":
        return _interleaved(stages, rank, micro, virtual)
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


def _interleaved(stages: int, rank: int, micro: int, virtual: int) -> tuple[Action, ...]:
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
) -> tuple[int, ...]:
    """Counts, by chunk, the micro-batches whose activations a rank holds when they are most."""
    if schedule == "gpipe":
        return (micro,)
    held, best = [0] * virtual, [0] * virtual
    for kind, _, chunk in program(schedule, stages, rank, min(micro, 3 * stages), virtual):
        held[chunk] += {"F": 1, "B": -1, "W": 0}[kind]
        if sum(held) > sum(best):
            best = list(held)
    return tuple(best)


@dataclass(frozen=True, slots=True)
class _Order:
    """All actions of a pipeline sorted so that each waits only for earlier ones; 0 is the start.

    By action, as indices: its time among forward, backward, weight and first backward times of all
    chunks (``takes``); its message's time (``sends``); the action before it on its rank
    (``before``); the action whose message it waits for (``waits``); the action whose message goes
    over the same link just before its own (``behind``).
    """

    takes: np.ndarray
    sends: np.ndarray
    before: np.ndarray
    waits: np.ndarray
    behind: np.ndarray
    levels: tuple[tuple[int, int], ...]
    last: np.ndarray  # by rank


@lru_cache(maxsize=256)
def _order(schedule: str, stages: int, micro: int, virtual: int) -> _Order:
    """Sort the ranks' programs with a worklist; DeadlockError names what each rank is stuck at."""
    programs = [program(schedule, stages, r, micro, virtual) for r in range(stages)]
    count = stages * virtual
    level: dict[tuple[str, int, int], int] = {}
    rows: list[tuple[int, tuple[str, int, int], tuple[str, int, int] | None]] = []
    position, depth = [0] * stages, [0] * stages
    ready = list(range(stages))
    while ready:
        r = ready.pop()
        while position[r] < len(programs[r]):
            kind, i, v = programs[r][position[r]]
            c = v * stages + r
            source = _source(kind, i, c, count)
            if source is not None and source not in level:
                break
            depth[r] = 1 + max(depth[r], level[source] if source is not None else 0)
            level[kind, i, c] = depth[r]
            rows.append((depth[r], (kind, i, c), source))
            position[r] += 1
            neighbours = ((c + 1) % stages, (c - 1) % stages)
            ready += [n for n in neighbours if n != r and n not in ready]
    stuck = [r for r in range(stages) if position[r] < len(programs[r])]
    if stuck:
        heads = ", ".join(f"rank {r}: {programs[r][position[r]]}" for r in stuck)
        raise DeadlockError(f"stages wait for each other; next actions: {heads}")
    return _sorted(rows, stages, count)


def _source(kind: str, i: int, c: int, count: int) -> tuple[str, int, int] | None:
    """The action that an action waits for: of the chunk before (F) or after (B) it."""
    if kind == "F":
        return ("F", i, c - 1) if c else None
    if kind == "B":
        return ("B", i, c + 1) if c + 1 < count else ("F", i, c)
    return None


def _sorted(
    rows: Sequence[tuple[int, tuple[str, int, int], tuple[str, int, int] | None]],
    stages: int,
    count: int,
) -> _Order:
    ordered = sorted(rows, key=lambda row: row[0])
    number = {action: n for n, (_, action, _) in enumerate(ordered, start=1)}
    columns: list[list[int]] = [[0] for _ in range(5)]
    rank_last, link_last = [0] * stages, dict[tuple[str, int], int]()
    edges = [1]
    for n, (depth, (kind, i, c), source) in enumerate(ordered, start=1):
        if n > 1 and depth != ordered[n - 2][0]:
            edges.append(n)
        sends = 3 * count  # nothing
        if (kind == "F" and c + 1 < count) or (kind == "B" and c):
            sends = c if kind == "F" else c - 1
        same_chunk = source is not None and source[2] == c
        values = (
            (3 if kind == "B" and i == 0 else "FBW".index(kind)) * count + c,
            sends,
            rank_last[c % stages],
            number[source] if source is not None and not same_chunk else 0,
            link_last.get((kind, c), 0),
        )
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        rank_last[c % stages] = link_last[kind, c] = n
    edges.append(len(ordered) + 1)
    takes, sends_, before, waits, behind = (np.array(c) for c in columns)
    levels = tuple(pairwise(edges))
    return _Order(takes, sends_, before, waits, behind, levels, np.array(rank_last))


def finish_us(
    schedule: str, chunks: Sequence[StageTimes], stages: int, micro: int
) -> tuple[float, ...]:
    """When each rank's last action ends; chunk c of the model runs on rank c % stages.

    An exact longest path over the ranks' programs and one link per boundary and direction.
    """
    order = _order(schedule, stages, micro, len(chunks) // stages)
    late = [c.weight_us if schedule == "zb" else 0.0 for c in chunks]
    takes = [c.forward_us for c in chunks]
    backward = [c.backward_us - w for c, w in zip(chunks, late, strict=True)]
    first = [us - c.accumulate_us for c, us in zip(chunks, backward, strict=True)]
    took = np.array(takes + backward + late + first)[order.takes]
    sent = np.zeros(3 * len(chunks) + 1)
    sent[: len(chunks)] = [c.send_us for c in chunks]
    sending = sent[order.sends]
    ends, arrives = np.zeros(len(took)), np.zeros(len(took))
    before, waits, behind = order.before, order.waits, order.behind
    for a, b in order.levels:
        end = np.maximum(ends[before[a:b]], arrives[waits[a:b]]) + took[a:b]
        ends[a:b] = end
        arrives[a:b] = np.maximum(end, arrives[behind[a:b]]) + sending[a:b]
    return tuple(float(t) for t in ends[order.last])
