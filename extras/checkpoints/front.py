"""Chooses what layers save under ``recompute=budget``: most time saved within so many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from itercast.compose.pricing.recompute import NOTHING, Item, joined

MAX_FRONT = 4096  # subsets that no other one beats in both time and bytes


def front_of(items: Iterable[Item], room: int) -> Front:
    """What of these items a layer may save within any number of bytes up to ``room``."""
    return Front.of(bundled(items), room)


@dataclass(frozen=True, kw_only=True)
class Front:
    """Subsets of items within ``room`` bytes that no other subset beats in both bytes and time.

    ``nbytes`` of these, rising. ``chosen`` traces each subset back: by item, the number n of
    subsets before the item was considered, and for each subset after it the index of its origin,
    plus n if it has the item. ``thinned``: some subsets were dropped.
    """

    items: Sequence[Item]
    room: int
    nbytes: np.ndarray
    chosen: Sequence[tuple[int, np.ndarray]]
    thinned: bool

    @classmethod
    def of(cls, items: Sequence[Item], room: int) -> Front:
        """An exact search, item by item; of more than ``MAX_FRONT`` subsets every second stays."""
        nbytes, us, chosen, thinned = np.zeros(1, np.int64), np.zeros(1), [], False
        for item in items:
            count = len(nbytes)
            fit = int(np.searchsorted(nbytes, room - item.nbytes, "right"))
            nbytes = np.concatenate((nbytes, nbytes[:fit] + item.nbytes))
            us = np.concatenate((us, us[:fit] + item.time_us))
            order = np.lexsort((-us, nbytes))
            most_us = np.maximum.accumulate(us[order])
            kept = order[np.concatenate(([True], us[order][1:] > most_us[:-1]))]
            while len(kept) > MAX_FRONT:
                kept, thinned = np.concatenate((kept[:1], kept[2::2])), True
            nbytes, us = nbytes[kept], us[kept]
            chosen.append((count, kept.astype(np.int16)))  # below 2 * MAX_FRONT; many are kept
        return cls(items=items, room=room, nbytes=nbytes, chosen=chosen, thinned=thinned)

    def best(self, room: int) -> Item:
        """The items that save most time within ``room`` bytes, joined to one.

        Walks back through ``chosen`` from the largest subset that fits. If subsets were left out
        and fewer bytes are asked for, searches again.
        """
        if self.thinned and room < self.room:
            return Front.of(self.items, room).best(room)
        if room < 0:
            return NOTHING
        at = int(np.searchsorted(self.nbytes, room, "right")) - 1
        saved = list[Item]()
        for item, (count, kept) in zip(reversed(self.items), reversed(self.chosen), strict=True):
            at = int(kept[at])  # which subset it was before this item
            if at >= count:  # with the item
                at -= count
                saved.append(item)
        return reduce(joined, reversed(saved), NOTHING)


def bundled(items: Iterable[Item]) -> list[Item]:
    """Bundles equal items by 1, 2, 4, ... and the rest, so that any number is a sum of them."""
    alike, found = dict[tuple[int, float], list[Item]](), list[Item]()
    for item in items:
        alike.setdefault((item.nbytes, item.time_us), []).append(item)
    for same in alike.values():
        size = 1
        while same:
            found.append(reduce(joined, same[:size]))
            same, size = same[size:], 2 * size
    return found
