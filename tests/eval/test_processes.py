"""What times whole processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from itercast.eval.speed import timed_s


def test_a_process_is_timed() -> None:
    assert timed_s(["-c", "import time; time.sleep(0.05)"]) > 0.05


def test_a_process_that_fails_is_one_line_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"python -m no_such_module: exit code 1: .*No module"):
        timed_s(["-m", "no_such_module"])


def test_a_bundle_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "itercast.eval.speed", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "no readable bundle.json" in done.stderr
