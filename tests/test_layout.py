"""The house keeps its shape: rooms import one way, datasets hold data only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ["microbench", "learners", "compose", "eval", "itercast"]


def imports(path: Path) -> set[str]:
    """Top-level packages a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way_only(room: str) -> None:
    """microbench <- learners <- compose <- eval <- itercast."""
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for path in (ROOT / room).rglob("*.py"):
        assert not imports(path) & later, path


def test_only_tracking_imports_mlflow_and_nothing_pickles() -> None:
    """predict must not pay for MLflow; data files are never executed."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            found = imports(path)
            assert "mlflow" not in found or path.name == "tracking.py", path
            assert "pickle" not in found, path


def test_datasets_hold_no_python() -> None:
    """With an __init__.py it would shadow Hugging Face's datasets package."""
    assert not list((ROOT / "datasets").rglob("*.py"))


def test_files_stay_under_400_lines() -> None:
    """Over that, there are two ideas in it (STYLE: about 300 lines, 400 where it is one idea)."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path
