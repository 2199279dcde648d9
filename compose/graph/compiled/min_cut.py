"""Least bytes that cross from what is there to what is needed: a minimum cut of a graph."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise

UNBOUNDED = 2**62
NEEDED = "needed"  # the node that all of what is needed leads to


class Flow:
    """How much may still flow along each edge of a graph."""

    def __init__(self) -> None:
        self.left: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def edge(self, start: Hashable, end: Hashable, most: int = UNBOUNDED) -> None:
        """Adds an edge along which at most so much flows."""
        self.left[start][end] = self.left[start].get(end, 0) + most
        self.left[end].setdefault(start, 0)

    def behind_cut(self, sources: Iterable[Hashable]) -> set[Hashable]:
        """What lies behind the least cut between sources and ``NEEDED``; the last of several.

        A source from which nothing more flows stays so while others are pushed.
        """
        for source in sources:
            while path := self._path(source):
                pairs = list(pairwise(path))
                most = min(self.left[a][b] for a, b in pairs)
                for a, b in pairs:
                    self.left[a][b] -= most
                    self.left[b][a] += most
        found: set[Hashable] = {NEEDED}
        todo: list[Hashable] = [NEEDED]
        while todo:
            end = todo.pop()
            new = [a for a in self.left[end] if a not in found and self.left[a][end]]
            found.update(new)
            todo += new
        return found

    def _path(self, source: Hashable) -> list[Hashable]:
        """The shortest way along which more can flow; empty where there is none."""
        came: dict[Hashable, Hashable] = {source: source}
        todo = deque([source])
        while todo:
            at = todo.popleft()
            for to, left in self.left[at].items():
                if left and to not in came:
                    came[to] = at
                    todo.append(to)
            if NEEDED in came:
                break
        else:
            return []
        path: list[Hashable] = [NEEDED]
        while path[-1] != source:
            path.append(came[path[-1]])
        return path[::-1]
