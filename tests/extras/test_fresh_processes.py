"""Fresh processes of a program that is stopped or killed while they work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import lives

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
from pathlib import Path
from itercast.extras.processes import processes

def work(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(60)

if __name__ == "__main__":
    with processes() as pool:
        list(pool.map(work, [sys.argv[1]] * 4))
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_program(tmp_path: Path, how: signal.Signals) -> None:
    """The signal goes to the program alone; each worker has two minutes of work before it."""
    program, pids = tmp_path / "program.py", tmp_path / "pids"
    program.write_text(PROGRAM)
    pids.mkdir()
    words = [sys.executable, str(program), str(pids)]
    stopped = subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        # jobs in the background of a shell ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    end = time.monotonic() + 30
    while len(list(pids.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    workers = [int(path.name) for path in pids.iterdir()]
    stopped.send_signal(how)
    try:
        stopped.wait(10)
        end = time.monotonic() + 5
        while any(map(lives, workers)) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(workers) == 2 and not any(map(lives, workers))
    finally:
        for pid in [stopped.pid, *filter(lives, workers)]:
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        stopped.wait()
