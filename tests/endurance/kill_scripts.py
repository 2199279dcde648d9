"""Kills ``itercast run`` at random moments and counts the processes that are left: none may be.

``python tests/endurance/kill_scripts.py [--kills 200] [--seed 0]`` runs scripts that never end,
with workers and ranks of their own. Each time one process, mostly the command itself, gets a
signal; if that was another one, the command is killed in the end. A process counts that carries the
command's mark in its environment and is there two seconds later.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import typer

SCRIPT = Path(__file__).parent / "scripts" / "never_ends.py"
SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGHUP)
MARK = "ITERCAST_KILLED"
LATEST_S, GONE_S = 20.0, 2.0


def marked(mark: str) -> list[int]:
    """Processes that carry the mark and are no zombies."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            carries = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            found += [int(folder.name)] if state != "Z" and carries else []
    return found


def kill_once(
    how: str, sent: signal.Signals, mark: str, wait: Callable[[], object], others: bool = False
) -> list[int]:
    """Run a script, wait, kill the command or one of the others; the processes that are left."""
    command = [sys.executable, "-m", "itercast", "run", "--gpu=h100-sxm-80gb", "--gpus=2"]
    process = subprocess.Popen(
        [*command, str(SCRIPT), how],
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait()
    except BaseException:
        process.kill()
        raise
    started = [pid for pid in marked(mark) if pid != process.pid]
    with suppress(ProcessLookupError):
        os.kill(random.choice(started) if others and started else process.pid, sent)
    time.sleep(GONE_S)
    if others or process.poll() is None:  # a worker may die without the rest
        process.kill()
        time.sleep(GONE_S)
    process.wait()
    left = marked(mark)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def main(kills: int = 200, seed: int = 0) -> None:
    """Print a line for each kill that leaves processes, and a sum."""
    random.seed(seed)
    left, done = 0, Counter[str]()
    for number in range(kills):
        how, sent = random.choice(("sleep", "workers", "ranks")), random.choice(SIGNALS)
        after_s, others = random.uniform(0, LATEST_S), random.random() < 0.25
        mark, wait = f"{os.getpid()}.{number}", partial(time.sleep, after_s)
        found = kill_once(how, sent, mark, wait, others)
        done[how] += 1
        left += len(found)
        if found:
            print(f"{sent.name} after {after_s:.2f} s of {how}: {len(found)} left", flush=True)
    print(f"{kills} kills ({dict(done)}): {left} processes left")
    sys.exit(bool(left))


if __name__ == "__main__":
    typer.run(main)
