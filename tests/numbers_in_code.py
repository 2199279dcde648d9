"""Finds the numbers in code that forecasts may rest on, by reading its syntax trees.

Found are constants of modules, default values of classes and literals in functions. Left out are
numbers that only decide what is measured, and those whose place says that they are no assumption:
indices, exponents, unit conversions (1e6, 2**20), and the integers up to 4 and 8 in functions.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("microbench", "learners", "compose", "eval", "itercast")
FORECASTING = (
    "compose/",
    "learners/",
    "microbench/ops/",
    "microbench/hardware/",
    "microbench/capture/",
    "microbench/cases/external/",
    "microbench/importers/published/",
)
MEASURING = tuple(
    f"microbench/{room}/" for room in ("sweep", "campaign", "timing", "processes", "iterations")
)
SEARCHING = (
    "compose/search.py",
    "compose/open_search.py",
    "compose/shared_search.py",
    "learners/active.py",
)
MEASURING_FIELDS = (
    "sweep",
    "build",
    "gpu_sweep",
    "weight",
)  # of itercast.microbench.ops.family.Family
UNITS = (100, 1e3, 1e6, 1e9, 1e-3, 1e-6, 1e-9)
SMALL = (0, 1, 2, 3, 4, 8)  # integers in functions: counts of tensors, axes, bytes
COUNTING_CALLS = ("range", "round", "default_rng", "reshape")
SHAPE_KEYWORDS = ("axis", "dim", "indent", "width", "maxsplit", "seed")


class Name(NamedTuple):
    """A function, class or constant of a module."""

    file: str
    name: str


Statement = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def numbers(trees: Mapping[str, ast.Module] | None = None) -> dict[Name, tuple[float, ...]]:
    """Numbers that may decide a forecast, by where they stand; in all our code if not in ``trees``.

    ``trees`` are modules by file.
    """
    trees = _trees() if trees is None else trees
    for tree in trees.values():
        tree.body = _with_additions(tree.body)
    statements = {
        Name(file, name): statement
        for file, tree in trees.items()
        for name, statement in _statements(tree)
    }
    measuring = _measuring(trees, statements)
    found = {}
    for key, statement in statements.items():
        forecasting = key.file.startswith(FORECASTING) and key.file not in SEARCHING
        if forecasting and key not in measuring and key.name != "FAMILY":
            found[key] = tuple(sorted(set(_numbers_of(statement))))
    return {key: values for key, values in found.items() if values}


def _trees() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}


def _with_additions(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements in which ``X = a``, ``X |= b`` are one: X = (a, b)."""
    found: list[ast.stmt] = []
    constants: dict[str, ast.Assign | ast.AnnAssign] = {}
    for statement in body:
        if isinstance(statement, ast.AugAssign) and ast.unparse(statement.target) in constants:
            constant = constants[ast.unparse(statement.target)]
            parts = [part for part in (constant.value, statement.value) if part is not None]
            constant.value = ast.Tuple(elts=parts, ctx=ast.Load())
            continue
        found.append(statement)
        if isinstance(statement, ast.Assign):
            constants[ast.unparse(statement.targets[0])] = statement
        elif isinstance(statement, ast.AnnAssign):
            constants[ast.unparse(statement.target)] = statement
    return found


def _statements(tree: ast.Module) -> Iterator[tuple[str, Statement]]:
    """Functions, classes and constants of a module by name; a constant's second value too."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            yield statement.name, statement
        elif isinstance(statement, ast.Assign):
            for name in ast.walk(statement.targets[0]):
                if isinstance(name, ast.Name):
                    yield name.id, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement


def _imported(tree: ast.Module, files: set[str]) -> tuple[dict[str, Name], dict[str, str]]:
    """What a module imports from others: names, and modules with their files."""
    names, modules = {}, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = node.module.replace(".", "/")
            if folder.split("/")[1:2] and folder.split("/")[1] in PACKAGES:
                folder = folder.partition("/")[2]
            for alias in node.names:
                as_name = alias.asname or alias.name
                if f"{folder}/{alias.name}.py" in files:
                    modules[as_name] = f"{folder}/{alias.name}.py"
                else:
                    own = f"{folder}.py" if f"{folder}.py" in files else f"{folder}/__init__.py"
                    names[as_name] = Name(own, alias.name)
    return names, modules


def _references(
    nodes: Iterator[ast.AST],
    file: str,
    own: set[str],
    names: dict[str, Name],
    modules: dict[str, str],
) -> Iterator[Name]:
    """Names of this module and of others that some code mentions."""
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in own:
            yield Name(file, node.id)
        elif isinstance(node, ast.Name) and node.id in names:
            yield names[node.id]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in modules:
            yield Name(modules[ast.unparse(node.value)], node.attr)


def _measuring(trees: Mapping[str, ast.Module], statements: dict[Name, Statement]) -> set[Name]:
    """What only sweeps and measurements use: it decides which points are measured, and how."""
    users: dict[Name, set[Name]] = defaultdict(set)
    found = {key for key in statements if key.file.startswith(MEASURING)}
    for file, tree in trees.items():
        own = dict(_statements(tree))
        names, modules = _imported(tree, set(trees))
        others = [s for s in tree.body if s not in own.values() and not _is_import(s)]
        for name, statement in [*own.items(), *((f"line {s.lineno}", s) for s in others)]:
            used: Iterator[ast.AST] = ast.walk(statement)
            if name == "FAMILY" and isinstance(statement, ast.Assign):
                family = statement.value
                sides: dict[bool, list[ast.AST]] = {True: [], False: []}
                for keyword in family.keywords if isinstance(family, ast.Call) else ():
                    sides[keyword.arg in MEASURING_FIELDS] += ast.walk(keyword.value)
                found |= set(_references(iter(sides[True]), file, set(own), names, modules))
                used = iter(sides[False])
            for key in _references(used, file, set(own), names, modules):
                if key != Name(file, name):
                    users[key].add(Name(file, name))
    found -= {key for key in found if any(user.name == "FAMILY" for user in users[key])}
    while more := {k for k in statements if k not in found and users[k] and users[k] <= found}:
        found |= more
    return found


def _is_import(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _numbers_of(statement: Statement) -> list[float]:
    """The numbers in a statement that neither their size nor their place explains."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        values = _literals(statement, _explained(statement))
        return [v for v in values if v not in UNITS and not _small(v)]
    value = statement.value
    if value is None or ast.unparse(value).startswith("Path("):
        return []
    values = _literals(value, _explained(value, powers=False))
    if isinstance(value, ast.Constant | ast.UnaryOp):
        return [v for v in values if v not in (0, 1)]
    if isinstance(value, ast.BinOp):
        return _literals(value, set())  # 25 * 2**20
    return [v for v in values if v not in (0, 1) and (isinstance(v, float) or not _small(v))]


def _small(value: float) -> bool:
    return value in (SMALL if isinstance(value, int) else (0.0, 1.0, 2.0, 8.0))


def _literals(tree: ast.AST, left_out: set[int]) -> list[float]:
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in left_out)
    values = (n.value for n in nodes)
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _explained(tree: ast.AST, powers: bool = True) -> set[int]:
    """Ids of the nodes in places that index, count or shape; with ``powers`` exponents too."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            found.append(node.slice)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift):
            base = isinstance(node.left, ast.Constant) and node.left.value in (2, 10)
            found += [node if base else node.right] if powers else []
        elif isinstance(node, ast.FormattedValue):
            found.append(node)
        elif isinstance(node, ast.FunctionDef):
            found += node.decorator_list
        elif isinstance(node, ast.Call):
            if _called(node) in COUNTING_CALLS:
                found += [arg for arg in node.args if isinstance(arg, ast.Constant)]
            found += [k.value for k in node.keywords if k.arg in SHAPE_KEYWORDS]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            found += [node] if _called(node.left) in ("len", "dim") else []
    return {id(inner) for node in found for inner in ast.walk(node)}


def _called(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")
