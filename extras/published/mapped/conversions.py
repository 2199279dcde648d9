"""Conversions that a mapping may name: a closed list, so that a mapping holds no code."""

from __future__ import annotations

import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.extras.imports.base import Unreadable, read_json, text_of
from itercast.extras.published.sources.device_names import link_of, node_of, unknown_gpu
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.store import Facts

OTHERS = "*"  # key of a table of values: what all values have that it does not list
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
HOLE = re.compile(r"\{([^{}]+)\}")
DEGREES = ("dp", "tp", "pp", "cp", "ep", "micro")  # keys of plans that are numbers
MOST_BYTES = 2**16  # of a text in an archive
UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}  # in us


def _product(*values: Any) -> Any:
    return np.prod(np.broadcast_arrays(*values), axis=0)


def _sum(*values: Any) -> Any:
    return np.sum(np.broadcast_arrays(*values), axis=0)


# Of arrays of numbers, NaN where a cell holds none.
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{unit: lambda x, us=us: x * us for unit, us in UNITS.items()},
    "product": _product,
    "sum": _sum,
    "quotient": lambda a, b: a / b,
    "ceil_quotient": lambda a, b: np.ceil(a / b),
    "difference": lambda a, b: a - b,
    "round": np.round,
    "giga_per_s": lambda count, rate: count / (rate * 1e3),  # time in us
    "tera_per_s": lambda count, rate: count / (rate * 1e6),  # time in us
}
OPERANDS: dict[str, int] = {
    "json": 2,
    "packed": 2,
    "quotient": 2,
    "ceil_quotient": 2,
    "difference": 2,
    "giga_per_s": 2,
    "tera_per_s": 2,
}
OPERANDS |= dict.fromkeys([*UNITS, "round"], 1)
OF_TEXT: tuple[str, ...] = ("gpu", "node", "link", "text", "lower", "first", "number", "of")
OF_TEXT += ("plan", "json", "file", "packed")


def operands(expression: Any) -> tuple[str, list[Any]]:
    """The name of a conversion and its operands; ValueError for another form or name."""
    if not isinstance(expression, Mapping):
        raise ValueError(f"conversion {expression!r}: neither a column, a number nor a mapping")
    if set(expression) == {"of", "values"}:
        return "of", [expression["of"], expression["values"]]
    if len(expression) != 1:
        raise ValueError(f"conversion {dict(expression)!r} needs one name; known: {known()}")
    ((name, given),) = expression.items()
    given = list(given) if isinstance(given, list | tuple) else [given]
    if name not in ARITHMETIC and name not in OF_TEXT:
        raise ValueError(f"unknown conversion {name!r}; known: {known()}")
    if len(given) != OPERANDS.get(name, len(given)):
        raise ValueError(f"conversion {name!r} takes {OPERANDS[name]} operands, got {len(given)}")
    return name, given


def known() -> list[str]:
    """Names of all conversions."""
    return sorted([*ARITHMETIC, *OF_TEXT, "of + values"])


def columns_of(expression: Any) -> Iterator[str]:
    """Columns that an expression reads; ValueError where it is none."""
    if isinstance(expression, str):
        yield expression
    elif not isinstance(expression, bool | int | float):
        name, given = operands(expression)
        if name in ("text", "file", "packed"):
            yield from HOLE.findall(" ".join(map(str, given)))
            return
        if name in ("plan", "json"):
            given = list(given[-1].values())
        if name == "of":
            given = [given[0], *(value for value in given[1].values() if isinstance(value, dict))]
        for operand in given[:1] if name == "number" else given:
            yield from columns_of(operand)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder of a table, and the imported folder, outside of which no file is read."""

    folder: Path
    root: Path


NOWHERE = Place(folder=Path(os.devnull), root=Path(os.devnull))


class Cells:
    """Evaluates a mapping's expressions on a table; notes for each row why it cannot be imported.

    The reason is empty for rows that can.
    """

    def __init__(self, frame: pd.DataFrame, place: Place = NOWHERE) -> None:
        self.frame = frame
        self.place = place
        self.why = pd.Series("", index=frame.index, dtype=object)

    def refuse(self, hit: Any, reason: Any) -> None:
        """Refuse rows where ``hit``, for one reason or one per row; an earlier reason stays."""
        fresh = np.asarray(hit, dtype=bool) & (self.why == "").to_numpy()
        self.why = self.why.mask(fresh, reason)

    def value(self, expression: Any) -> Any:
        """Values of an expression: a number, a column's name or a conversion of such."""
        if isinstance(expression, bool | int | float):
            return expression
        if isinstance(expression, str):
            return self.frame[expression]
        name, given = operands(expression)
        if name in ARITHMETIC:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                found = ARITHMETIC[name](*(self.numbers(operand) for operand in given))
            return pd.Series(np.broadcast_to(found, len(self.frame)), index=self.frame.index)
        return getattr(self, f"_{name}")(*given)

    def numbers(self, expression: Any) -> Any:
        """Values of an expression as floats, NaN where a cell holds no number."""
        found = self.value(expression)
        if isinstance(found, pd.Series):
            return pd.to_numeric(found, errors="coerce").to_numpy(dtype=float, na_value=np.nan)
        return float(found)

    def texts(self, expression: Any) -> pd.Series:
        """Values of an expression as text, empty where a cell is."""
        found = self.value(expression)
        if not isinstance(found, pd.Series):
            found = pd.Series([found] * len(self.frame), index=self.frame.index, dtype=object)
        return found.map(plain).astype(object)

    def _of(self, expression: Any, names: Facts) -> pd.Series:
        """Values translated by a table, which may name conversions; others are refused."""
        given = self.texts(expression)
        named = expression if isinstance(expression, str) else "value"
        unknown = ~given.isin(list(names)) & (OTHERS not in names)
        self.refuse(unknown, f"unknown {named}: " + given.map(lambda text: repr(text[:40])))
        found = given.map(lambda text: names.get(text, names.get(OTHERS)))
        for text, value in names.items():
            if isinstance(value, dict):
                found = found.where(given != text, self.value(value))
        return found

    def _gpu(self, expression: Any) -> pd.Series:
        """Names of GPUs' hardware files by any of their names."""
        given = self.texts(expression)
        found = _each(given, lambda text: gpu_named(text) or "")
        self.refuse(found == "", _each(given, unknown_gpu))
        return found

    def _node(self, expression: Any) -> pd.Series:
        """Names of nodes' files, by the name of a system or of the GPU in it; empty without one."""
        return _each(self.texts(expression), node_of)

    def _link(self, expression: Any, ranks: Any = 2) -> pd.Series:
        """The link among ``ranks`` GPUs of a system, by the system's name or its GPU's."""
        pairs = zip(self.texts(expression), self.texts(ranks), strict=True)
        links = [link_of(name, int(n) if n.isdecimal() else 2) for name, n in pairs]
        return pd.Series(links, index=self.frame.index, dtype=object)

    def _text(self, pattern: str) -> pd.Series:
        """A text with columns' values in place of their names in braces."""
        found = pd.Series("", index=self.frame.index, dtype=object)
        for at, part in enumerate(HOLE.split(pattern)):
            found = found + (self.texts(part) if at % 2 else part)
        return found.map(text_of)

    def _lower(self, expression: Any) -> pd.Series:
        """Text in lower case."""
        return self.texts(expression).str.lower()

    def _first(self, *expressions: Any) -> pd.Series:
        """The first value that is not empty."""
        found = self.texts(expressions[0])
        for expression in expressions[1:]:
            found = found.where(found != "", self.texts(expression))
        return found

    def _plan(self, keys: Facts) -> pd.Series:
        """A plan of these keys: without those that are empty or false, and without degrees of 1.

        Flags are true. ``micro``, the micro-batches of a step, is ``accumulate`` where no pipeline
        has stages.
        """
        columns = {key: self.texts(value) for key, value in keys.items()}
        for key in columns.keys() & set(DEGREES):
            self.refuse(~columns[key].str.fullmatch(r"\d*"), f"{key} is not a whole number")
        lines = zip(*columns.values(), strict=True)
        plans = [_plan_of(dict(zip(columns, line, strict=True))) for line in lines]
        return pd.Series(plans, index=self.frame.index, dtype=object)

    def _json(self, constants: Facts, keys: Facts) -> pd.Series:
        """A JSON object of constants and of columns with numbers, or with true and false."""
        columns = {key: self.texts(value).map(_value) for key, value in keys.items()}
        lines = pd.DataFrame(columns, index=self.frame.index).to_dict("records")
        objects = [json.dumps({**constants, **line}, sort_keys=True) for line in lines]
        return pd.Series(objects, index=self.frame.index, dtype=object)

    def _file(self, pattern: str) -> pd.Series:
        """The JSON object in a file, named from the folder of the table that is read."""
        paths = self._text(pattern)
        found = paths.map({path: _document(self.place, path) for path in paths.unique()})
        self.refuse(found == "", "no readable file " + paths.map(lambda path: repr(path[-60:])))
        return found

    def _packed(self, archive: str, pattern: str) -> pd.Series:
        """The text of a file in an archive, which is in the folder of the table that is read."""
        archives, files = self._text(archive), self._text(pattern)
        texts = {name: _members(self.place, name) for name in archives.unique()}
        found = [texts[a].get(f, "") for a, f in zip(archives, files, strict=True)]
        members = pd.Series(found, index=self.frame.index, dtype=object)
        self.refuse(members == "", "no readable file " + files.map(lambda name: repr(name[-60:])))
        return members

    def _number(self, expression: Any, at: int = 0) -> pd.Series:
        """The number at a position among those in a text: 8192 of "(128, 8192)" at 1."""
        digits = self.texts(expression).map(lambda text: NUMBER.findall(text[:1000])[at : at + 1])
        return digits.map(lambda found: float(found[0]) if found else np.nan).astype(float)


def _each(texts: pd.Series, function: Callable[[str], str]) -> pd.Series:
    """A function of every text, called once for equal ones."""
    return texts.map({text: function(text) for text in texts.unique()})


def _plan_of(keys: Mapping[str, str]) -> str:
    """The plan's text, from the texts of its keys."""
    staged = keys.get("pp", "") not in ("", "1")
    keys = {k: v for k, v in keys.items() if v not in ("", "False")}
    if not staged:
        keys = {"accumulate" if k == "micro" else k: v for k, v in keys.items()}
    kept = {k: v for k, v in keys.items() if v != "1" or k not in (*DEGREES[:-1], "accumulate")}
    return ",".join(k if v == "True" else f"{k}={v}" for k, v in kept.items())


def _value(text: str) -> float | str:
    """A number, true or false as JSON has it; other text stays text."""
    if text in ("True", "False"):
        return text == "True"
    if text.isdecimal():
        return int(text)
    return float(text) if NUMBER.fullmatch(text) else text


def _document(place: Place, name: str) -> str:
    """The JSON object in a file, its keys sorted; empty where there is none in the root."""
    path = (place.folder / name).resolve()
    try:
        found = read_json(path) if path.is_relative_to(place.root.resolve()) else None
    except Unreadable:
        found = None
    return json.dumps(found, sort_keys=True) if isinstance(found, dict) else ""


def _members(place: Place, name: str) -> dict[str, str]:
    """Texts of the files in an archive; none where it is unreadable. No file is written."""
    found: dict[str, str] = {}
    path = (place.folder / name).resolve()
    if not path.is_relative_to(place.root.resolve()):
        return found
    with suppress(tarfile.TarError, OSError, EOFError, zlib.error), tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and member.size <= MOST_BYTES:
                found[member.name] = file.read().decode("utf-8", "replace")
    return found


def plain(value: Any) -> str:
    """A cell as text: whole numbers without a point, nothing for missing ones."""
    if type(value) is str:
        return value.strip()
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value).strip()
