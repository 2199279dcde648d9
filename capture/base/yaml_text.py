"""Reads YAML in C (libyaml) where that is safe, and makes dataclasses of what a file states.

C is eight times as fast as Python. Libyaml follows nested values without a limit, until the stack
overflows; in Python that is an exception.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from itercast.capture.base.close_names import near

T = TypeVar("T")

MERGE = "tag:yaml.org,2002:merge"  # of the key <<
OPENS_A_LEVEL = re.compile(r"[\[{]|[-?]\s")
MAX_OPENED = 64
MAX_CHARACTERS = 8192  # at most 128 levels by indentation: 1 + 2 + ... + 128 spaces


def _checked(base: Any) -> Any:
    """A subclass of a YAML loader that refuses a key written twice; YAML's takes the last value."""

    class Checked(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """As its base class, which takes the last of equal keys without a word."""
            keys = [k for k, _ in node.value if isinstance(k, yaml.ScalarNode) and k.tag != MERGE]
            seen = set[tuple[str, str]]()
            for key in keys:
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(
                        f"key {key.value!r} is written twice, again in line {line}"
                    )
                seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

    return Checked


SlowLoader = _checked(yaml.SafeLoader)
OwnLoader = _checked(getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # for the project's own files


def load_yaml(text: str) -> Any:
    """The values of a YAML text from anywhere, as ``yaml.safe_load`` returns them.

    yaml.YAMLError also for a key written twice, and where PyYAML raises others (``!!bool x``).
    """
    cannot_overflow = len(text) <= MAX_CHARACTERS and len(OPENS_A_LEVEL.findall(text)) <= MAX_OPENED
    try:
        return yaml.load(text, OwnLoader if cannot_overflow else SlowLoader)
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        raise yaml.YAMLError(f"{type(exc).__name__} {exc}") from exc


def facts_of(file: str) -> dict[str, Any]:
    """The contents of the YAML file beside a module (its ``__file__``) that has the same name."""
    facts: dict[str, Any] = yaml.load(Path(file).with_suffix(".yaml").read_text(), OwnLoader)
    return facts


def read_values(path: Path, what: str) -> Any:
    """The values in a YAML file; ValueError, which says ``what`` it should be, if unreadable."""
    try:
        return load_yaml(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{what} {str(path)!r}: no such file") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ValueError(f"{path}: not a readable {what} ({reason})") from exc


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML file; ValueError, with ``what`` the file should be, for others."""
    values = read_values(path, what)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping, a {what}")
    return values


def made_of(kind: type[T], values: Any, where: str) -> T:
    """Make a dataclass of plain values; ValueError names a wrong or missing key, and ``where``.

    Fields are text, numbers of at least 0, booleans, tuples and mappings of these, or dataclasses.
    Numbers may be strings: YAML 1.1 reads 3e9, without sign or point, as text.
    """
    stated: Any = kind
    types = _types(stated)
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: expected a mapping of {sorted(types)}, got {values!r}"[:300])
    if others := sorted(str(k) for k in values if k not in types):
        raise ValueError(f"{where}: unknown keys {others}; known: {near(others[0], sorted(types))}")
    checked = {k: typed(types[k], v, f"{where}: {k}") for k, v in values.items()}
    needed = [f.name for f in fields(stated) if f.default is MISSING is f.default_factory]
    if missing := [name for name in needed if name not in checked]:
        raise ValueError(f"{where}: missing keys {missing}")
    return kind(**checked)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields by name."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def typed(kind: Any, value: Any, where: str) -> Any:
    """A plain value as one of type ``kind``, see ``made_of``; ``where``: its name in errors."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else made_of(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is a list, got {value!r}")
        return tuple(typed(inner[0], v, where) for v in value)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            wanted = "numbers" if inner[1] in (int, float) else "values"
            raise ValueError(f"{where} maps names to {wanted}, got {value!r}")
        return {str(k): typed(inner[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind in (str, bool):
        if isinstance(value, kind):
            return value
        wanted = "text" if kind is str else "true or false"
        raise ValueError(f"{where} is {wanted}, got {value!r}")
    return _number(value, where, whole=kind is int) if kind in (int, float) else value


def _number(value: Any, where: str, *, whole: bool) -> float:
    """A finite number of at least 0, also of text; an integer if it has to be ``whole``."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{where} is a number of at least 0, got {value!r}")
    if whole and number != int(number):
        raise ValueError(f"{where} is a whole number, got {value!r}")
    return int(number) if whole else number
