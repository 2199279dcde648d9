"""Slow packages are imported when they are used; modules are changed once they are there."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from itercast.capture.base.slow_imports import once_imported

TREES = """
import atexit
from itercast.capture.base.slow_imports import xgb
atexit.register(lambda: print(kept[0].handle, hasattr(kept[1], "handle")))  # after xgboost's own
kept = [xgb.Booster(), xgb.DMatrix([[1.0]])]
"""


def test_trees_are_freed_before_modules_are_cleared() -> None:
    """Else each one that a cache still holds prints an exception when Python ends."""
    done = subprocess.run([sys.executable, "-c", TREES], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None False\n", "")


def test_no_cycles_are_looked_for_while_a_package_is_imported() -> None:
    code = "import gc; from itercast.capture.base.slow_imports import pd; seen = []\n"
    code += "gc.callbacks.append(lambda *told: seen.append(told))\n"
    code += "pd.DataFrame; print(len(seen), gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert int(done.stdout.split()[0]) < 10 and done.stdout.split()[1] == "True", done.stderr


@pytest.mark.parametrize("before", [True, False])
def test_a_module_is_changed_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Imported before or inside the context; others are as ever, and so are imports after it."""
    (tmp_path / "asked.py").write_text("number = 1")
    (tmp_path / "other.py").write_text("number = 1")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    if before:
        importlib.import_module("asked")
    with once_imported("asked", lambda module: setattr(module, "number", 2)):
        numbers = [importlib.import_module(name).number for name in ("asked", "other")]
    assert numbers == [2, 1] and sys.meta_path == finders
    for name in ("asked", "other"):
        del sys.modules[name]
