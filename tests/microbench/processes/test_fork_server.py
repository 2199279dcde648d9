"""Forks of a process that has imported a module: what they run in, how they end, and with whom."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from test_watch import ROOT, gone, lives

from itercast.microbench.processes import fork_server
from itercast.microbench.processes.fork_server import Fork

CALLED = """
import os, signal, sys, time
from pathlib import Path

print("imported", file=open(Path(__file__).with_suffix(".imports"), "a"))
time.sleep(float(os.environ.get("PYTHON_SLOW", "0")))

def main(what, *more):
    if what == "tell":
        print(os.getcwd(), os.environ.get("TOLD"), os.getsid(0) == os.getpid(), flush=True)
        print("to stderr", file=sys.stderr, flush=True)
        return int(more[0])
    if what == "fails":
        raise KeyError("lost")
    if what == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "leaves" and os.fork() == 0:  # in its group, when it has ended
        Path(more[0], str(os.getpid())).touch()
        time.sleep(60)
    if what == "stays" and os.fork() == 0:
        os.setsid()
    if what in ("stays", "ignores"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(more[0], str(os.getpid())).touch()
        time.sleep(60)
    while what == "leaves" and not os.listdir(more[0]):
        time.sleep(0.01)
    return 0
"""
OTHER = """
import os, sys, time
from itercast.microbench.processes.fork_server import Fork
kept = [Fork("called", ["stays", sys.argv[1]], 1, 2) for _ in range(2)]
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module that forks call; its servers are gone after a test."""
    (tmp_path / "called.py").write_text(CALLED)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    yield tmp_path / "called.py"
    if known := fork_server._running.pop("called", None):
        known[1].end()


def called(*words: str) -> tuple[int | None, str, str]:
    """How a call ends, and what it writes."""
    with TemporaryFile() as out, TemporaryFile() as err:
        fork = Fork("called", words, out.fileno(), err.fileno())
        code = fork.poll(None)
        fork.end()  # of no effect
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


def pids(folder: Path, count: int) -> list[int]:
    """Processes that have noted themselves, once there are so many."""
    end = time.monotonic() + 30
    while len(found := list(folder.iterdir())) < count and time.monotonic() < end:
        time.sleep(0.02)
    return [int(path.name) for path in found]


def test_forks_run_here_and_now_and_the_module_is_imported_once(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called("tell", "0") == (0, f"{os.getcwd()} None True\n", "to stderr\n")
    monkeypatch.setenv("TOLD", "now")
    monkeypatch.chdir(tmp_path)
    assert called("tell", "7") == (7, f"{tmp_path} now True\n", "to stderr\n")
    assert module.with_suffix(".imports").read_text() == "imported\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # which libraries read when they are imported
    assert called("tell", "0")[0] == 0
    assert module.with_suffix(".imports").read_text() == 2 * "imported\n"


def test_how_a_fork_ended_is_known(tmp_path: Path) -> None:
    assert called("dies")[0] == -signal.SIGSEGV
    code, _, said = called("fails")
    assert code == 1 and said.endswith("KeyError: 'lost'\n")
    (tmp_path / "left").mkdir()
    assert called("leaves", str(tmp_path / "left"))[0] == 0
    (left,) = pids(tmp_path / "left", 1)
    assert gone(left)


def test_a_fork_that_is_ended_takes_all_with_it_and_no_other(tmp_path: Path) -> None:
    there, others = tmp_path / "there", tmp_path / "others"
    there.mkdir()
    others.mkdir()
    other = Fork("called", ["ignores", str(others)], 1, 2)
    fork = Fork("called", ["stays", str(there)], 1, 2)
    started = pids(there, 2)
    fork.end()
    assert fork.returncode == -signal.SIGKILL and fork.pid in started
    assert all(gone(pid) for pid in started) and other.poll() is None
    assert other.pid == pids(others, 1)[0]
    other.end()
    assert gone(other.pid)


def test_a_fork_goes_on_while_others_need_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    fork = Fork("called", ["ignores", str(there)], 1, 2)
    assert len(pids(there, 1)) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert called("tell", "0")[0] == 0
    time.sleep(0.5)  # in which its server would end
    assert fork.poll() is None
    fork.end()
    assert gone(fork.pid)


def test_a_fork_that_has_not_started_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module takes a minute to import; the next call finds another server."""
    monkeypatch.setenv("PYTHON_SLOW", "60")
    begin, fork = time.monotonic(), Fork("called", ["tell", "0"], 1, 2)
    fork.end()
    assert fork.returncode == -signal.SIGKILL and time.monotonic() - begin < 30
    monkeypatch.setenv("PYTHON_SLOW", "0")
    assert called("tell", "0")[0] == 0


def test_a_module_that_cannot_be_imported_ends_the_call(module: Path) -> None:
    module.write_text("import nowhere_at_all")
    assert called("tell", "0")[0] == -signal.SIGKILL
    module.write_text(CALLED)
    assert called("tell", "0")[0] == 0


@pytest.mark.parametrize("who", ["parent", "server"])
def test_forks_end_with_their_server_and_that_with_its_parent(tmp_path: Path, who: str) -> None:
    there = tmp_path / "there"
    there.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", OTHER, str(there)])
    started = pids(there, 4)
    assert len(started) == 4 and all(map(lives, started))
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    (server,) = map(int, children)
    if who == "parent":
        parent.kill()
        parent.wait()
    else:
        os.kill(server, signal.SIGKILL)
    assert gone(server) and all(map(gone, started))
    parent.kill()
    parent.wait()
