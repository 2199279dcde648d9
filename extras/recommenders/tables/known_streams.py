"""Tells embedding bags of a captured step how their row numbers are distributed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from itercast.capture.opcall import OpCall, StepCapture
from itercast.extras.lookups.embedding_bag import FAMILY, EmbeddingBag
from itercast.extras.recommenders.tables.index_streams import IndexStream, parse_indices


def with_indices(capture: StepCapture, spec: str) -> StepCapture:
    """The step with the index streams that a text states; unchanged where it is empty."""
    return with_index_streams(capture, parse_indices(spec)) if spec else capture


def with_index_streams(capture: StepCapture, streams: Sequence[IndexStream]) -> StepCapture:
    """Tell embedding bags how they look rows up: ``streams`` has one for all tables, or one each.

    Tables are numbered in the order of their first lookup. A backward pass looks up the rows of its
    forward pass; backward passes run in reverse order. The keyword ``stream`` of a call gets
    features of its rows; ``drawn``, for lookups, the stream itself. ValueError where the numbers of
    tables differ, or a table lacks rows that its stream looks up.
    """
    found = ((i, _point(call)) for i, call in enumerate(capture.calls))
    bags = {i: p for i, p in found if p is not None}
    forward = [i for i, p in bags.items() if p.op == "forward"]
    if len(streams) not in (1, len(forward)):
        raise ValueError(
            f"indices of {len(streams)} tables, the model looks up {len(forward)} of them"
        )
    drawn = {i: streams[at if len(streams) > 1 else 0] for at, i in enumerate(forward)}
    of_call = {i: stream.facts(bags[i].rows, bags[i].bags) for i, stream in drawn.items()}
    waiting: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in forward:
        waiting[_sizes(bags[i])].append(i)
    for i, p in bags.items():
        if p.op == "backward" and waiting[_sizes(p)]:
            of_call[i] = of_call[waiting[_sizes(p)].pop()]
    if len(streams) == 1 and streams[0] != IndexStream():  # without bags: for caches alone
        rows = (i for i, call in enumerate(capture.calls) if call.op == "aten.embedding.default")
        drawn |= dict.fromkeys(rows, streams[0])
    calls = tuple(
        replace(call, kwargs={**call.kwargs, "stream": of_call.get(i, {}), "drawn": drawn.get(i)})
        if of_call.get(i) or (i in drawn and i not in bags)
        else call
        for i, call in enumerate(capture.calls)
    )
    return replace(capture, calls=calls)


def _point(call: OpCall) -> EmbeddingBag | None:
    answer = FAMILY.answers.get(call.op)
    found: EmbeddingBag | None = answer(call) if answer else None
    return found


def _sizes(p: EmbeddingBag) -> tuple[int, ...]:
    return (p.rows, p.dim, p.bags, p.lookups)
