"""Assumed numbers are data: each has a unit, a source and where it holds, and each is used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from microbench.assumptions import FILE, all_assumptions, assumed, assumptions_in

ROOT = Path(__file__).parents[1]
PACKAGES = ("microbench", "learners", "compose", "eval", "itercast")


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


def test_an_entry_without_a_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("host:\n  launch_us: {value: 5, unit: us, holds: everywhere}\n")
    with pytest.raises(ValueError, match=r"host\.launch_us: missing \['source'\]"):
        assumptions_in(tmp_path)


def test_a_value_is_found_by_module_and_name(tmp_path: Path) -> None:
    entry = "{value: [1, 2], unit: us, source: a test, holds: here, fitted_on: [x]}"
    (tmp_path / FILE).write_text(f"host:\n  launch_us: {entry}\n")
    assert assumed(str(tmp_path / "host.py"), "launch_us") == [1, 2]
    with pytest.raises(ValueError, match=r"no assumption other\.launch_us"):
        assumed(str(tmp_path / "other.py"), "launch_us")
