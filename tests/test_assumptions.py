"""Assumed numbers are data: each has a unit, a source and where it holds, and each is used."""

import ast
import itertools
import math
import re
from pathlib import Path
from typing import TypeGuard

import pytest

from itercast.capture.base.assumptions import (
    FILE,
    all_assumptions,
    assumed,
    assumptions_in,
    leaving_out,
)

ROOT = Path(__file__).parents[1]
PACKAGES = ("capture", "microbench", "learners", "compose", "eval", "itercast", "extras")
FORECASTING = ("compose", "learners", *(f"microbench/{x}" for x in ("ops", "capture", "hardware")))
HYPERPARAMETERS = "learners/models"  # data decide what they do
MARK = "# no assumption:"


def uses() -> set[tuple[Path, str, str]]:
    """(folder, module, name) of every ``assumed(__file__, name)`` in the code."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                if called and node.func.id == "assumed":
                    found.add((path.parent, path.stem, ast.literal_eval(node.args[1])))
    return found


def stated() -> set[tuple[Path, str, str]]:
    """(folder, module, name) of every entry of every file."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob(FILE)]
    return {(path.parent, *key) for path in files for key in assumptions_in(path.parent)}


def test_every_assumption_is_used_and_every_use_is_stated() -> None:
    assert uses() == stated()


def test_every_assumption_says_where_it_comes_from() -> None:
    for one in all_assumptions(ROOT):
        for text in (one.unit, one.source, one.holds):
            assert isinstance(text, str) and text.strip(), (one.module, one.name)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("value: 5, unit: us, holds: everywhere", r"host\.launch_us: missing \['source'\]"),
        (
            "value: 4, unit: us, source: a test, holds: here, without: 2",
            "'without' needs sources in fitted_on",
        ),
    ],
)
def test_an_entry_without_sources_is_refused(tmp_path: Path, entry: str, told: str) -> None:
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {{{entry}}}\n")
    with pytest.raises(ValueError, match=told):
        assumptions_in(tmp_path)


def test_a_value_is_found_by_module_and_name(tmp_path: Path) -> None:
    entry = "{value: [1, 2], unit: us, source: a test, holds: here, fitted_on: [x]}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    assert assumed(str(tmp_path / "host.py"), "launch_us") == [1, 2]
    with pytest.raises(ValueError, match=r"no assumption other\.launch_us"):
        assumed(str(tmp_path / "other.py"), "launch_us")


FITTED = (
    "value: 4, unit: us, source: a test, holds: here, fitted_on: [NeuSight], checked_on: [timm]"
)


@pytest.mark.parametrize(("without", "left"), [(", without: 2", 2), ("", 4)])
def test_a_source_left_out_takes_the_value_without_it(
    tmp_path: Path, without: str, left: int
) -> None:
    """Where the source it was fitted or checked on is left out, in any case; else 4."""
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {{{FITTED}{without}}}\n")
    found = []
    for source in ("neusight", "timm", "vidur", ""):
        with leaving_out(source):
            found.append(assumed(str(tmp_path / "host.py"), "launch_us"))
    assert found == [left, left, 4, 4]


def test_a_neutral_value_has_the_form_of_the_value() -> None:
    """The same keys, or as many numbers; a table whose entries default to 1 may be empty."""
    for one in all_assumptions(ROOT):
        if isinstance(one.value, dict) and one.without:
            assert set(one.without) == set(one.value), one.name
        if one.without is not None:
            assert isinstance(one.without, type(one.value) | float), one.name


def unexplained(source: str) -> list[str]:
    """Statements with a float that neither assumptions.yaml nor a comment explains.

    That is a float in a constant of a module or class, except one named MAX or MIN, and a fraction
    in arithmetic. A whole number in arithmetic counts something.
    """
    tree, lines = ast.parse(source), source.splitlines()
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    found: set[ast.stmt | ast.expr] = set()
    for statement in itertools.chain(*bodies):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            limit = lines[statement.lineno - 1].lstrip(" _").startswith(("MAX_", "MIN_", "FAMILY"))
            floats = [node for node in ast.walk(statement.value) if _decides(node)]
            found |= {statement} if floats and not limit else set()
    for node in ast.walk(tree):
        sides = (node.left, node.right) if isinstance(node, ast.BinOp) else ()
        found |= {side for side in sides if _decides(side) and side.value % 1}
    texts = {
        node.lineno: lines[max(node.lineno - 2, 0) : node.end_lineno]  # and the line before
        for node in found
    }
    unmarked = [number for number, text in texts.items() if MARK not in "".join(text)]
    return [lines[number - 1].strip() for number in sorted(unmarked)]


def _decides(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Whether it is a float other than 0, 0.5, 1, 2 and the powers of ten."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, float):
        return False
    plain = node.value in (0.0, 0.5, 1.0, 2.0, math.inf)
    return not plain and not re.fullmatch(r"1e[+-]?\d+|10*\.0|0\.0*1", repr(node.value))


def test_every_number_that_may_decide_a_forecast_is_an_assumption() -> None:
    paths = [path for folder in FORECASTING for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(p.relative_to(ROOT)): unexplained(p.read_text()) for p in paths}
    found = {
        path: lines
        for path, lines in found.items()
        if lines and not path.startswith(HYPERPARAMETERS)
    }
    assert not found, (
        f"floats without a source: {found}. What decides a forecast belongs into assumptions.yaml "
        f"beside the code; a definition, a limit or a share of a sweep says so: {MARK} ..."
    )
