"""Steps whose ranks have unlike work are timed in turn, over gloo."""

from __future__ import annotations

import json
from pathlib import Path

from itercast.microbench.processes.ranks import start_ranks


def test_steps_take_turns(tmp_path: Path) -> None:
    """One rank, two steps of 4 x 64 and 4 x 8 tokens: three times of each, after the warm-up."""
    out, one = tmp_path / "times.json", {"threads": 1, "rows": 4}
    steps = [[{**one, "seq": 64}], [{**one, "seq": 8}]]
    order = {"case": "gpt-s", "steps": steps, "rounds": 3, "out": str(out)}
    worker = start_ranks("itercast.microbench.iterations.unlike_ranks", order, 1, "--standalone")
    assert worker.wait() == 0
    times_us = json.loads(out.read_text())
    assert [len(times) for times in times_us] == [3, 3]
    assert all(us > 0 for times in times_us for us in times)
