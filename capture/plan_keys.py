"""The keys of plans: how the text of one is read, what it changes, and keys that packages add."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from itercast.capture.base.extensions import with_added

TRANSFORMS = ("split", "reorder", "fuse", "overlap")  # CoCoNeT, arXiv:2105.05720
QUANTISED, DCT = ("int8", "fp8", "int4"), "dct"  # of compress
V_SHAPED = ("zbv", "dualpipev")  # schedules
GREEDY = "greedy"  # of shard
DEFAULT_CHUNKS = 8  # of coconet=...,overlap
MOST = 99_999_999  # ranks or micro-batches of one kind
FLAG = "a flag has no value"  # in place of a reader
Value = TypeVar("Value")
Read = Callable[[str, str], Value]  # a value from its key and text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """A key of plans that a package adds: its text, its rules and what it changes, in one place.

    ``read`` turns its text into a value, by the key's name. Where a plan has it:

    - ``rules(plan, value)`` yields (whether the plan breaks the rule, the rule);
    - ``replicas(strategy, value)`` returns how replicas are kept equal, from the ``Strategy`` of a
      plan without the key (``itercast.compose.simulate.data_parallel``);
    - ``step(captured, plan, value)`` returns what one rank does of a captured micro-batch; a key
      that has it ``changes`` "ops prices" (see ``key``);
    - ``memory(by_purpose, plan, value)`` returns bytes of a rank by purpose.
    """

    name: str
    read: Read[Hashable]
    rules: Callable[[Any, Any], Iterator[tuple[bool, str]]] = lambda plan, value: iter(())
    changes: str = ""
    replicas: Callable[[Any, Any], Any] = lambda strategy, value: strategy
    step: Callable[[Any, Any, Any], Any] = lambda captured, plan, value: captured
    memory: Callable[[dict[str, int], Any, Any], dict[str, int]] = lambda bytes_, plan, value: (
        bytes_
    )


def added_keys() -> dict[str, PlanKey]:
    """The keys that packages add, by name."""
    return with_added("plan_keys", {}, PlanKey)


def key(
    read: Read[Value] | str,
    default: Value,
    changes: str | None = None,
    *,
    short: Mapping[str, str] | None = None,
) -> Value:
    """A dataclass field for a key of plans: how its text is read, its default, what it changes.

    A plan search keeps results for plans with the same values of the keys that change them.
    ``changes`` says which this key does: "ops" of a rank, their "prices", the layers of "stages".
    With "" it changes none of these: only groups of ranks, how replicas are kept equal
    (``itercast.compose.simulate.data_parallel.Strategy``), or results that are never cached. With
    None it changes all. ``short``: abbreviations, as a dict from text to longer text.
    """
    facts: dict[str, object] = {"read": read, "short": short or {}}
    if changes is not None:
        facts["changes"] = changes.split()
    return field(default=default, metadata=facts)


def behind(key: str, read: Read[Value], default: Value, changes: str) -> Value:
    """A dataclass field for a number that may follow the value of another key: ``ep=8:1.2``."""
    metadata = {"behind": key, "read": read, "changes": changes.split()}
    return field(default=default, metadata=metadata)


def integer(low: int, high: int) -> Read[int]:
    """Reads a whole number from ``low`` to ``high``."""

    def read(key: str, text: str) -> int:
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(high))
        if not (digits and low <= int(text) <= high):
            raise ValueError(f"{key} is an integer from {low} to {high}, got {text!r}")
        return int(text)

    return read


degree = integer(1, MOST)


def number(rule: str) -> Read[float]:
    """Reads a number; ``rule`` is what errors say is allowed, which rules of plans check."""

    def read(key: str, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{key} is a number {rule}, got {text!r}") from None

    return read


share = number("above 0 and up to 1")


def one_of(*names: str) -> Read[str]:
    """A reader of a plan key's text, which accepts only one of these names."""

    def read(key: str, text: str) -> str:
        if text not in names:
            raise ValueError(f"{key} is one of {', '.join(names)}, got {text!r}")
        return text

    return read


def some_of(*names: str) -> Read[str]:
    """A reader of one of these names, or several joined by ``+``; returns them in listed order."""

    def read(key: str, text: str) -> str:
        parts = text.split("+")
        if not set(parts) <= set(names) or len(set(parts)) < len(parts):
            raise ValueError(f"{key} is one of {', '.join(names)}, or some by +, got {text!r}")
        return "+".join(name for name in names if name in parts)

    return read


def named(rule: str) -> Read[str]:
    """Reads any text but an empty one, for which the error says ``rule``."""

    def read(key: str, text: str) -> str:
        if not text:
            raise ValueError(f"{key} {rule}")
        return text

    return read


def transforms(key: str, text: str) -> str:
    """Reads CoCoNeT's transforms, such as ``split+overlap:8``; returns them joined by commas."""
    read: dict[str, str] = {}
    for step in text.split("+"):
        name, _, count = step.partition(":")
        if name not in TRANSFORMS or name in read or (count and name != "overlap"):
            raise ValueError(f"{key} takes split, reorder, fuse, overlap:N once each, got {step!r}")
        chunks = integer(2, 1024)(name, count or str(DEFAULT_CHUNKS))
        read[name] = f"overlap:{chunks}" if name == "overlap" else name
    return ",".join(read.values())


def counts(key: str, text: str) -> str:
    """Reads positive integers with + between them, such as ``8+10+6``."""
    return "+".join(str(degree(key, part)) for part in text.split("+"))


def codec(key: str, text: str) -> str:
    """Reads how messages are compressed: ``0.5`` (a share of their bytes), ``int8``, ``dct:0.1``.

    "" where all bytes are kept.
    """
    name, colon, share = text.partition(":")
    if name in QUANTISED and not colon:
        return text
    number = share if name == DCT and colon else text
    try:
        kept = float(number)
    except ValueError:
        allowed = f"a share of the bytes, {', '.join(QUANTISED)} or {DCT}:SHARE"
        raise ValueError(f"{key} is {allowed}, got {text!r}") from None
    if not 0 < kept <= 1:
        raise ValueError(f"{key} is above 0 and up to 1, got {number}")
    return f"{DCT}:{kept:g}" if name == DCT else "" if kept == 1 else f"{kept:g}"
