"""Orders of actions in schedules whose first rank has the first and the last chunk of a model."""

from __future__ import annotations

from collections import Counter, deque

# (kind, micro-batch, chunk of the rank). Kinds: F forward; B backward, to the inputs alone where a
# schedule cuts it in two; W backward to the weights; A all of backward.
Action = tuple[str, int, int]


class _Order:
    """A rank's actions as they are added, each on the next micro-batch of its kind and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.done = Counter[tuple[str, int]]()  # by kind and chunk; all of backward counts as B
        self.late = deque[tuple[int, int]]()  # micro-batch and chunk of weight gradients to come

    def add(self, times: int, *steps: str) -> None:
        """Add steps of the schedule: F0 is chunk 0's forward, W the oldest weight gradients."""
        for step in steps * times:
            kind, chunk = step[0], int(step[1:] or 0)
            if step == "W":
                if self.late:
                    self.actions.append(("W", *self.late.popleft()))
                continue
            micro = self.done["B" if kind == "A" else kind, chunk]
            self.actions.append((kind, micro, chunk))
            self.done["B" if kind == "A" else kind, chunk] += 1
            if kind == "B":
                self.late.append((micro, chunk))


def zbv(stages: int, rank: int, micro: int) -> tuple[Action, ...]:
    """As torch's ScheduleZBVZeroBubble; with few micro-batches, the order of a full pipeline."""
    count, order = max(2 * stages - 1, micro), _Order()
    order.add(2 * (stages - rank) - 1, "F0")
    order.add(rank, "F1", "F0")
    order.add(stages - rank, "F1", "B1", "W1")
    while order.done["F", 1] < count:
        order.add(int(order.done["F", 0] < count), "F0")
        order.add(1, "B0", "W0", "F1", "B1", "W1")
    order.add(rank, "B0", "B1")
    order.add(stages - rank, "B0", "W0")
    for step in ("W1", "W0"):
        order.add(count - order.done["W", int(step[1])], step)
    return tuple(a for a in order.actions if a[1] < micro)


def dualpipev(stages: int, rank: int, micro: int) -> tuple[Action, ...]:
    """As torch's ScheduleDualPipeV; steps as of ``_Order.add``."""
    order, before, after = _Order(), stages - rank - 1, rank + 1
    order.add(2 * before, "F0")
    order.add(after, "F0", "F1")
    order.add(before, "B1", "W", "F1")
    order.add(micro - 2 * stages + after, "F0", "A1", "F1", "A0")
    order.add(before, "A1", "F1", "A0")
    ends = ["A1", "A0"] * after
    cut = 2 * (after // 2) + 1 - rank % 2  # from here on weight gradients come later
    order.add(1, *ends[:cut], *(f"B{step[1]}" for step in ends[cut:]))
    order.add(before, "W", "B0")
    order.add(after, "W")
    return tuple(order.actions)
