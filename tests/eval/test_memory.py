"""Memory forecasts beside torch's own trackers (`python -m itercast.eval.memory`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
from itercast.eval.memory import PLANS, compared
for plan in PLANS:
    print(compared("gpt-s", plan).error_pct)
"""


def test_memory_is_what_torchs_trackers_see() -> None:
    """One process, DDP, FSDP2 and recomputation of a small GPT within 12 %."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=root, check=True, capture_output=True, text=True
    )
    errors = [float(line) for line in done.stdout.split()]
    assert len(errors) == 7 and max(abs(e) for e in errors) < 12, errors
