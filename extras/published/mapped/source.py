"""A mapping: the YAML file that says what the columns of a published table mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from itercast.capture.base.yaml_text import OwnLoader
from itercast.capture.opcall import ITEMSIZE_BYTES
from itercast.extras.imports.base import About
from itercast.extras.published.mapped.conversions import columns_of
from itercast.microbench.ops import families
from itercast.microbench.ops.family import parameter_types
from itercast.microbench.store import Facts, Row

ROW_COLUMNS = ("op", "gpu", "stack", "timer", "dtype", "time_us")  # that every row states
MORE_COLUMNS: tuple[str, ...] = ("time_us_p20", "time_us_p80", "samples", "cache", "kernel")
MORE_COLUMNS += ("module", "doubts", "settings")
JSON = "json."  # before the keys of unpacked objects
TIMERS = ("device", "with_launch")
CLOSED = ("op", "gpu", "dtype")  # whose text must not come from a file unchecked
LISTS = ("files", "header", "optional", "named", "joined", "parts")  # of a table
TESTS = ("is", "is_not", "above", "below", "differs", "unlike")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Rows to leave out: those whose ``column`` (or conversion) passes a test, and the reason."""

    column: Any
    test: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Dataset rows of one family, made of the lines of a table whose columns equal ``where``.

    ``fastest``: of lines with equal parameters only the fastest is taken.
    """

    family: str
    where: Mapping[str, tuple[str, ...]]
    skip: tuple[Skip, ...]
    constants: Facts
    columns: Facts
    fastest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files of one form, how they are read, and the rules for their lines.

    ``path``: a pattern whose named groups are columns. ``header``: the names of columns where the
    file has none. ``section``: the title of the part of a sheet. ``unpack``: a column of JSON
    objects whose keys become columns ``json.KEY``; ``named``: a column of names and one of values,
    which become such columns too. ``joined``: (a JSON file that maps names to YAML texts, the
    column with these names, a key of the texts); the values under that key become such columns.
    ``parts``: columns, each with a pattern whose named groups become columns, empty where the text
    does not match. ``skip``: lines that no rule sees. ``leave_out``: why the files are not
    imported.
    """

    files: tuple[str, ...]
    path: str = ""
    header: tuple[str, ...] = ()
    section: str = ""
    optional: tuple[str, ...] = ()
    unpack: str = ""
    named: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    leave_out: str = ""
    skip: tuple[Skip, ...] = ()
    rules: tuple[Rule, ...] = ()

    def read(self) -> list[str]:
        """Lists the columns that the rules read, also those of the path and of JSON objects."""
        skips = [*self.skip, *(skip for rule in self.rules for skip in rule.skip)]
        said = ({"text": skip.reason} for skip in skips)  # may name columns in braces
        found = dict.fromkeys(name for skip in skips for name in columns_of(skip.column))
        found |= dict.fromkeys(name for text in said for name in columns_of(text))
        differing = (skip.value for skip in skips if skip.test == "differs")
        found |= dict.fromkeys(name for value in differing for name in columns_of(value))
        for rule in self.rules:
            found |= dict.fromkeys(rule.where)
            for expression in rule.columns.values():
                found |= dict.fromkeys(columns_of(expression))
        return list(found)

    def needed(self) -> list[str]:
        """Columns that the files must have."""
        keys = (self.unpack, *self.named, *self.joined[1:2], *self.parts[::2])
        read = dict.fromkeys([*keys, *self.read()])
        patterns = (self.path, *self.parts[1::2])
        made = {"", *self.optional, *(name for p in patterns for name in re.compile(p).groupindex)}
        return [name for name in read if name not in made and not name.startswith(JSON)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published source: where it comes from and the tables it has."""

    about: About
    tables: tuple[Table, ...]


def load(path: Path) -> Source:
    """Read a mapping; ValueError says what is wrong with it."""
    try:
        given = yaml.load(path.read_text(), OwnLoader)
        _keys(given, ("where", "licence", "conventions", "tables"), ("values", "constants"))
        about = About(
            source=path.stem,
            **{key: " ".join(str(given[key]).split()) for key in ("where", "licence")},
            conventions=" ".join(str(given["conventions"]).split()),
        )
        tables = tuple(_table(table, given) for table in given["tables"])
    except (ValueError, TypeError, re.error, yaml.YAMLError) as exc:
        raise ValueError(f"mapping {path.name}: {exc}") from exc
    return Source(about=about, tables=tables)


def _keys(given: Any, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{given!r} is not a mapping of {[*needed, *optional]}")
    if missing := [key for key in needed if key not in given]:
        raise ValueError(f"no {missing[0]!r} in {list(given)}")
    if unknown := [key for key in given if key not in (*needed, *optional)]:
        raise ValueError(f"unknown key {unknown[0]!r}; known: {[*needed, *optional]}")


def _table(given: Any, source: Facts) -> Table:
    names = [f.name for f in fields(Table)]
    _keys(given, ("files",), (*names, "constants", "columns"))
    texts = {key: str(given.get(key, "")) for key in ("path", "section", "unpack", "leave_out")}
    lists = {key: _list(given.get(key, [])) for key in LISTS}
    common = {**source, **given, "constants": _merged(source, given, "constants")}
    rules = tuple(_rule(rule, common) for rule in given.get("rules", ()))
    if bool(rules) == ("leave_out" in given):
        raise ValueError(f"{given['files']} need either rules or leave_out")
    for pattern in (texts["path"], *lists["parts"][1::2]):
        re.compile(pattern)
    facts: Row = {**texts, **lists}
    skip = tuple(map(_skip, given.get("skip", ())))
    return Table(rules=rules, skip=skip, **facts)


def _rule(given: Any, table: Facts) -> Rule:
    known = ("where", "skip", "constants", "columns", "fastest")
    _keys(given, ("family",), known)
    rule = Rule(
        family=given["family"],
        where={str(k): _list(v) for k, v in given.get("where", {}).items()},
        skip=tuple(map(_skip, given.get("skip", ()))),
        constants=_merged(table, given, "constants"),
        columns={
            name: _named(expression, table.get("values", {}))
            for name, expression in _merged(table, given, "columns").items()
            if name not in given.get("constants", {})
        },
        fastest=bool(given.get("fastest", False)),
    )
    constants = {k: v for k, v in rule.constants.items() if k not in rule.columns}
    _check(rule.columns, constants, rule.family)
    return replace(rule, constants=constants)


def _merged(outer: Facts, inner: Facts, key: str) -> Row:
    return {**outer.get(key, {}), **inner.get(key, {})}


def _list(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in (value if isinstance(value, list) else [value]))


def _skip(given: Any) -> Skip:
    _keys(given, ("column", "reason"), TESTS)
    tests = [test for test in TESTS if test in given]
    if len(tests) != 1:
        raise ValueError(f"skip of {given['column']!r} needs one test of {TESTS}")
    (test,) = tests
    value: Any = given[test]
    if test in ("is", "is_not"):
        value = _list(value)
    elif test == "unlike":
        value = re.compile(value).pattern
    return Skip(column=given["column"], test=test, value=value, reason=str(given["reason"]))


def _named(expression: Any, tables: Facts) -> Any:
    """The expression with the names of tables of values replaced by the tables."""
    if not isinstance(expression, dict):
        return expression
    if set(expression) == {"of", "values"}:
        values = expression["values"]
        if isinstance(values, str):
            if values not in tables:
                raise ValueError(f"unknown table of values {values!r}; known: {list(tables)}")
            values = tables[values]
        translated = {str(k): _named(v, tables) for k, v in values.items()}
        return {"of": _named(expression["of"], tables), "values": translated}
    return {
        key: [_named(e, tables) for e in given]
        if isinstance(given, list)
        else _named(given, tables)
        for key, given in expression.items()
    }


def _check(columns: Facts, constants: Facts, family: str) -> None:
    """ValueError where a row would lack something, or have something that no reader knows."""
    stated = {*columns, *constants}
    types: Mapping[str, type] = {}
    needed = [*ROW_COLUMNS, "case", "mode", "batch", "plan", "world_size"]
    if family != "iteration":
        params = fields(families()[family].params) if family in families() else ()
        if not params:
            raise ValueError(f"unknown family {family!r}; known: {['iteration', *families()]}")
        types = parameter_types(families()[family].params)
        if unknown := stated - types.keys() - {*ROW_COLUMNS, *MORE_COLUMNS}:
            raise ValueError(f"{family} has no {sorted(unknown)}; it has {list(types)}")
        needed = [*ROW_COLUMNS, *(f.name for f in params if f.default is MISSING)]
    if missing := [name for name in needed if name not in stated]:
        raise ValueError(f"rows of {family} lack {missing}")
    for name, expression in columns.items():
        list(columns_of(expression))
        free = (
            not isinstance(expression, dict)
            or not {"of", "gpu", "node", "link"} & expression.keys()
        )
        if free and (name in CLOSED or types.get(name) in (str, bool)):
            raise ValueError(f"{name} must be a constant, a table of values or a gpu")
    for name in stated:
        for value in _values(columns, constants, name):
            _check_value(name, value, types.get(name, object))


def _check_value(name: str, value: Any, kind: type) -> None:
    if name == "dtype" and value not in ITEMSIZE_BYTES and value != "":
        raise ValueError(f"unknown dtype {value!r}; known: {list(ITEMSIZE_BYTES)}")
    if name == "timer" and value not in TIMERS:
        raise ValueError(f"unknown timer {value!r}; known: {TIMERS}")
    allowed = kind if kind in (str, bool) else object
    if not isinstance(value, allowed) or (kind in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{name}: {value!r} is no {kind.__name__}")


def _values(columns: Facts, constants: Facts, name: str) -> Iterator[Any]:
    """All values that a column can have, where it is a constant or a table of values."""
    if name in constants:
        yield constants[name]
    elif isinstance(columns[name], dict):
        yield from columns[name].get("values", {}).values()
