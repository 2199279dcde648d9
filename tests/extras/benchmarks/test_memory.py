"""What `python -m itercast.extras.benchmarks.memory` and `.speed` measure."""

import subprocess
import sys
from pathlib import Path

import pytest

from itercast.extras.benchmarks.speed import python_s

CODE = """
import sys
from itercast.extras.benchmarks.memory import PLANS, captured_bytes, forecast_bytes, tracked_bytes
from itercast.capture.cases.registry import case
for name in ("gpt-s", "llama-s", "vit-s", "moe-s", "dlrm-s"):
    for plan in (PLANS[2], PLANS[-1]) if name == "gpt-s" else ("dp=2,zero=3",):
        tracked = tracked_bytes(case(name), plan)
        for peak in (captured_bytes, forecast_bytes)[: 1 if name == "llama-s" else 2]:
            print(100 * (peak(case(name), plan) / tracked - 1))
"""


@pytest.mark.slow
def test_memory_is_what_torchs_trackers_see() -> None:
    """Captured and forecast within 3 %: a small GPT that recomputes, and models under FSDP2.

    Not under DDP: the trackers do not see its buckets. Of llama-s the captured one alone: on GPUs
    attention of grouped queries in fp32 holds its weights, on the CPU that is tracked it does not.
    """
    words, root = [sys.executable, "-c", CODE], Path(__file__).parents[3]
    done = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True)
    errors = [float(number) for number in done.stdout.split()]
    assert len(errors) == 11 and max(map(abs, errors)) < 3, errors


def test_a_process_is_timed() -> None:
    assert python_s(["-c", "import time; time.sleep(0.05)"]) > 0.05


def test_a_process_that_fails_is_one_line_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"python -m no_such_module: exit code 1: .*No module"):
        python_s(["-m", "no_such_module"])


def test_a_bundle_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "itercast.extras.benchmarks.speed", str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "no readable bundle.json" in done.stderr
