"""How many samples and tokens all ranks of a program take in a step, no matter how many share them.

A weight's gradient is summed over the rows that a rank computes, and then over the ranks that
compute others: rows times these ranks are the rows of the step. Ranks that split layers, or have
other stages of a pipeline, are not among them. Tokens are the lookups whose results go into layers.
These do not count: items that a recommender compares results with, text beside larger latents, and
categories, one per row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from itercast.capture.opcall import OpCall
from itercast.capture.programs.program import COLLECTIVE, ProgramCapture, launch_order

LOOKUP = "aten.embedding.default"
ATTENTION = "itercast.sdpa"
LAYERS = tuple(f"aten.{name}.default" for name in ("mm", "addmm", "_scaled_mm", "convolution"))
PRODUCTS = (*LAYERS, "aten.bmm.default", "aten.baddbmm.default", ATTENTION)
# Ops whose results are their operands, moved, cast, scaled or added up.
MOVES = re.compile(
    r"aten\.(_foreach)?_?(to_copy|copy|clone|cat|stack|add|mul|div|split_with_sizes_copy"
    r"|constant_pad_nd|slice_backward|select_backward|lift_fresh_copy)_?\."
)
PASS_NO_ACTIVATIONS = ("broadcast", "scatter", "all_to_all", "barrier")  # to ranks that share them
OF_MODEL = "no DataLoader or tokens say what a sample is: taken is a row of the model's input"
Groups = frozenset[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples and tokens of all ranks in a step, 0 if unknown; ``own_samples``: of each rank.

    ``grouped``: ranks made a process group; else one rank does all. ``note``: why a number is
    unknown, or what is counted as a sample.
    """

    samples: float
    tokens: float
    own_samples: int
    grouped: bool
    note: str = ""


def batch_of(program: ProgramCapture) -> Batch:
    """The batch of a step: by its DataLoader's samples if known, else by lookups of tokens.

    A DataLoader of packed rows gives tokens one by one: where a rank is given as many "samples" as
    it looks up tokens, or more, a row of lookups is a sample. Where both are missing, a row that
    the model is given counts as one.
    """
    lookups_of = {rank: _lookups(step.calls) for rank, step in program.ranks.items()}
    first = max(lookups_of, key=lambda rank: sum(tokens for _, tokens in lookups_of[rank]))
    calls, lookups = program.ranks[first].calls, lookups_of[first]
    world, origins = program.world_size if program.grouped else 1, Origins(calls)
    gradients = list(_gradients(calls, origins))
    summed = _summed(gradients, {tokens for _, tokens in lookups})
    unknown = Batch(samples=0, tokens=0, own_samples=program.samples, grouped=program.grouped)
    sequence_groups = _parts_of_sequences(calls, origins)
    token_ranks = world if not _passes_activations(calls, origins) else _size(summed)
    summed_groups = sequence_groups if summed is None else summed
    if not token_ranks or not _ranks(sequence_groups) <= _ranks(summed_groups):
        note = f"which of {world} ranks share samples is not known: rates are left out"
        return replace(unknown, note=note)
    # Of ``token_ranks``, which compute different tokens, so many share the same sequences:
    sequence_ranks = _size(sequence_groups)
    backwards = max(1, calls_backward := program.ranks[first].host.get("backward", 0))
    most = max((n for _, n in lookups), default=0) * -(-len(lookups) // backwards)
    seen = max((_rows(call) for call, _ in gradients if call.op in LAYERS), default=0)
    looked_up = sum(n for _, n in lookups)
    are_texts = most > max((rows for rows, _ in lookups), default=0) or not calls_backward
    tokens = looked_up if seen <= most and are_texts else 0
    rows = _rows_of(lookups, backwards)
    samples = rows * token_ranks / sequence_ranks
    own = program.samples or (0 if rows else program.rows_given)
    if own and not 0 < rows < looked_up <= own:
        given = {c.kwargs["ranks"] for c in calls if c.kwargs.get("loaded")}
        sharing = max(world / token_ranks * sequence_ranks, _size(given))
        samples = own * world / sharing
    return replace(
        unknown,
        samples=samples,
        tokens=tokens * token_ranks,
        own_samples=round(samples * sequence_ranks / token_ranks),
        note="" if program.samples or rows or not own else OF_MODEL,
    )


def _lookups(calls: Sequence[OpCall]) -> list[tuple[int, int]]:
    """(rows, tokens) of each lookup that forward makes in the table with most tokens.

    Only lookups by indices of shape (rows, tokens of a row) count. Tables that forward makes, as
    ZeRO's gathers do for each use, are one table if their shapes are equal.
    """
    by_table, for_layers = defaultdict[Any, list[tuple[int, int]]](list), _for_layers(calls)
    made = {t.storage for call in calls if call.phase == "forward" for t in call.outputs}
    for call in (calls[i] for i in launch_order(calls)):
        if id(call) in for_layers:
            table, places = call.args[:2]  # padding_idx may follow
            name = table.shape if table.storage in made else table.storage
            by_table[name].append((places.shape[0], places.numel))
    return max(by_table.values(), key=lambda table: sum(n for _, n in table), default=[])


def _for_layers(calls: Sequence[OpCall]) -> set[int]:
    """Ids of lookups whose results a product with weights reads; of all lookups if none is so."""
    found_in, looked_up, read = defaultdict[int, set[int]](set), set[int](), set[int]()
    for call in (c for c in calls if c.phase == "forward"):
        found = set[int]().union(*(found_in[t.storage] for t in call.tensors()))
        if call.op == LOOKUP and len(call.args[1].shape) == 2:
            looked_up |= (found := {id(call)})
        read |= found if call.op in LAYERS else set()
        if found and call.op not in PRODUCTS:
            for tensor in call.outputs or call.tensors():  # a kernel writes to its arguments
                found_in[tensor.storage] |= found
    return read or looked_up


def _rows_of(lookups: Sequence[tuple[int, int]], backwards: int) -> int:
    """The samples that these lookups belong to; 0 if micro-batches or their lookups disagree.

    Lookups before one backward, such as an encoder's and a decoder's, are of the same samples.
    """
    per_micro, rest = divmod(len(lookups), max(1, backwards))
    per_micro = 1 if rest or not backwards else per_micro
    # the n-th lookups of all micro-batches
    places = [lookups[n::per_micro] for n in range(per_micro)]
    micros_alike = all(len(set(place)) == 1 for place in places)
    samples = {sum(rows for rows, _ in place) for place in places}
    return samples.pop() if micros_alike and len(samples) == 1 else 0


class Origins:
    """Finds which calls computed the memory that a call reads, back through moves and messages."""

    def __init__(self, calls: Iterable[OpCall]) -> None:
        self.writers = defaultdict[int, list[OpCall]](list)
        for call in calls:
            for storage in {t.storage for t in call.outputs}:
                self.writers[storage].append(call)

    def of(self, storages: Iterable[int]) -> Iterator[tuple[OpCall, Groups]]:
        """Yields calls that computed these storages, with the groups of the messages between."""
        waiting: list[tuple[int, Groups]] = [(storage, Groups()) for storage in set(storages)]
        seen = set(waiting)
        while waiting:
            storage, groups = waiting.pop()
            for call in self.writers[storage]:
                if call.op != COLLECTIVE and not MOVES.match(call.op):
                    yield call, groups
                    continue
                passed = groups | {call.kwargs["ranks"]} if call.op == COLLECTIVE else groups
                read = {(t.storage, passed) for t in call.tensors()} - seen
                seen |= read
                waiting += read


def _gradients(calls: Sequence[OpCall], origins: Origins) -> Iterator[tuple[OpCall, Groups]]:
    """Yields calls of backward that compute weights' gradients, and the groups these go through."""
    read_later = (t.storage for c in calls if c.phase != "backward" for t in c.tensors())
    for call, groups in origins.of(read_later):
        if call.phase == "backward" and not call.recomputed and _rows(call):
            yield call, groups


def _summed(gradients: Sequence[tuple[OpCall, Groups]], tokens: set[int]) -> Groups | None:
    """The groups of ranks that sum up gradients, by weights that see all tokens of a rank.

    ``tokens``: how many tokens lookups have; a weight sees all if its gradient sums as many rows.
    If no weight does, any weight counts. None if there are no gradients, or group sizes differ.
    """
    groups_of = dict[int, Groups]()  # by id of the call that computes a weight's gradient
    for call, groups in gradients:
        groups_of[id(call)] = max(groups_of.get(id(call), Groups()), groups, key=_size)
    sure = {groups_of[id(call)] for call, _ in gradients if _rows(call) in tokens}
    if sure:
        return next(iter(sure)) if len(set(map(_size, sure))) == 1 else None
    return max(groups_of.values(), key=_size, default=None)


def _rows(call: OpCall) -> int:
    """The rows that the gradient of a weight sums up; 0 for other ops."""
    name = call.op.split(".")[1]
    if name in ("mm", "_scaled_mm"):
        return int(call.args[0].shape[-1])
    if name in ("embedding_dense_backward", "convolution_backward"):
        return int(call.args[1].numel if name.startswith("embedding") else call.args[0].shape[0])
    return 0


def _passes_activations(calls: Sequence[OpCall], origins: Origins) -> bool:
    """Whether a rank sends results of forward to others before the last backward ends."""
    last = max((i for i, c in enumerate(calls) if c.phase == "backward"), default=len(calls))
    sent = [c for c in calls[:last] if c.op == COLLECTIVE and c.phase == "forward"]
    return any(
        made.phase == "forward"
        for call in sent
        if call.kwargs["kind"] not in PASS_NO_ACTIVATIONS
        for made, _ in origins.of(t.storage for t in call.tensors())
    )


def _parts_of_sequences(calls: Sequence[OpCall], origins: Origins) -> Groups:
    """The groups of ranks that share sequences: keys reach attention in messages among them."""
    sharing = Groups()
    for call in calls:
        if call.op == ATTENTION and call.phase == "forward":
            for _, groups in origins.of(t.storage for t in call.tensors()):
                sharing |= groups
    return sharing


def _ranks(groups: Groups) -> set[int]:
    """All ranks of some groups."""
    return {rank for group in groups for rank in group}


def _size(groups: Iterable[tuple[int, ...]] | None) -> int:
    """How many ranks these groups, along axes of a mesh, reach together; 0 if not known."""
    if groups is None:
        return 0
    reached, size = set[int](), 1
    for group in sorted(groups, key=len, reverse=True):
        size = size * len(group) // max(1, len(reached.intersection(group)))
        reached.update(group)
    return size
