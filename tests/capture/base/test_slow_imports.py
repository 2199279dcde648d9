"""Slow packages are imported when they are used, and leave as they should."""

from __future__ import annotations

import subprocess
import sys

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
