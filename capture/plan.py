"""Parallel plans: how a training step is split over ranks, read from text such as ``dp=8,zero=3``.

The keys are in ``plan_fields``, which of them go together in ``plan_rules``. Rules about the model
(heads, layers, samples) are checked by the rewrites they are of.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from itercast.capture.plan_fields import PlanFields
from itercast.capture.plan_keys import FLAG, TRANSFORMS, added_keys
from itercast.capture.plan_rules import broken_rules


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan(PlanFields):
    """A plan that breaks no rule, with its text."""

    def __post_init__(self) -> None:
        for rule in broken_rules(self):
            raise ValueError(f"plan {str(self)!r}: {rule}")

    def parts(self, changed: str) -> tuple[object, ...]:
        """The values of all keys that change ``changed``: ops, prices or stages.

        The whole plan where an added key does, which is told of all of it.
        """
        kind: Any = type(self)
        own = tuple(getattr(self, name) for name in _changing(kind, changed))
        added = any(changed in added_keys()[name].changes for name, _ in self.more)
        return (*own, *((self,) if added else ()))

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """Reads a plan such as ``dp=8,zero=3``; ValueError names the wrong part and the rule."""
        values, added = dict[str, Any](), dict[str, Hashable]()
        if text.strip() and not text.replace(",", "").strip():
            raise ValueError(f"plan {text!r}: no key; a plan is like dp=8,zero=3")
        joined = re.sub(rf",\s*(?=(?:{'|'.join(TRANSFORMS)})\b)", "+", text)  # to coconet=...
        for part in filter(None, (p.strip() for p in joined.split(","))):
            key, given, value = (s.strip() for s in part.partition("="))
            try:
                if key in values or key in added:
                    raise ValueError(f"{key} is given twice")
                if key not in _KEYS and key in added_keys():
                    added[key] = added_keys()[key].read(key, value)
                else:
                    values |= _read(key, value, flag=not given)
            except ValueError as exc:
                raise ValueError(f"plan {text!r}: {exc}") from None
        return cls(**values, more=tuple(sorted(added.items())))

    def __str__(self) -> str:
        """The text that ``parse`` reads: dp, and each option that is not the default."""
        stated, parts = self.stated, [f"dp={self.dp}"]
        for name in stated:
            if name != "dp" and name in _KEYS:
                value, number = getattr(self, name), _NUMBERS.get(name, "")
                behind = f":{getattr(self, number):g}" if number in stated else ""
                parts.append(name if value is True else f"{name}={value}{behind}")
        return ",".join([*parts, *(f"{name}={value}" for name, value in self.more)])


@cache
def _changing(plan: Any, changed: str) -> tuple[str, ...]:
    """The fields that change ``changed``: those that say so, and those that say nothing."""
    every = [changed]
    own = (f for f in fields(plan) if f.name != "more")
    return tuple(f.name for f in own if changed in f.metadata.get("changes", every))


_FIELDS = {f.name: f.metadata for f in fields(ParallelPlan) if f.name != "more"}
_NUMBERS = {facts["behind"]: name for name, facts in _FIELDS.items() if "behind" in facts}
_KEYS = [name for name in _FIELDS if name not in _NUMBERS.values()]


def _read(key: str, text: str, *, flag: bool) -> dict[str, Any]:
    """The values of a key's text: its own, and that of a number behind it."""
    if key not in _KEYS:
        raise ValueError(f"unknown key {key!r}; known: {[*_KEYS, *added_keys()]}")
    facts, number = _FIELDS[key], _NUMBERS.get(key)
    if facts["read"] == FLAG:
        if not flag:
            raise ValueError(f"{key} takes no value, got {text!r}")
        return {key: True}
    text = facts["short"].get(text, text)
    if number is None:
        return {key: facts["read"](key, text)}
    value, colon, count = text.partition(":")
    found = {key: facts["read"](key, value)}
    return found | ({number: _FIELDS[number]["read"](f"{key}:N", count)} if colon else {})


def micro_batch(plan: ParallelPlan, batch: int, seq: int) -> tuple[int, int]:
    """Returns (samples, tokens of each on one rank) of a micro-batch, from a replica's batch."""
    micro = plan.microbatches
    if batch % micro:
        raise ValueError(
            f"plan {str(plan)!r}: {batch} samples do not divide by {micro} micro-batches"
        )
    if plan.cp > 1 and (seq == 0 or seq % (2 * plan.cp)):
        raise ValueError(f"plan {str(plan)!r}: a length of {seq} does not divide by 2 * cp")
    return batch // micro, seq // plan.cp
