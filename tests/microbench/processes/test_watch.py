"""Workers that hang, outlive their time or leave others behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers import lives

from itercast.microbench.processes import child_processes
from itercast.microbench.processes.ranks import start_ranks
from itercast.microbench.processes.watch import log_tail, never, watch

ROOT = Path(__file__).parents[3]
SLEEPER = "import time; time.sleep(60)"


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)


def gone(pid: int) -> bool:
    """Whether it ends within a few seconds."""
    end = time.monotonic() + 5
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not lives(pid)


def test_a_process_that_shows_no_sign_of_life_is_killed() -> None:
    process = start(SLEEPER)
    assert watch(process, lambda: 0, lambda: 0.3, time.monotonic() + 30) == "stalled"
    assert process.returncode == -signal.SIGKILL


def test_signs_of_life_keep_it_until_its_time_is_over() -> None:
    process, begin = start(SLEEPER), time.monotonic()
    assert watch(process, time.monotonic, lambda: 0.3, begin + 1.0) == "late"
    assert time.monotonic() - begin > 1.0
    assert process.returncode == -signal.SIGKILL


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """The worker ends well and leaves a sleeper in its group."""
    code = (
        "import subprocess, sys; from pathlib import Path;"
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]);"
        f"Path({str(tmp_path / 'pid')!r}).write_text(str(p.pid))"
    )
    process = start(code)
    assert watch(process, lambda: 0, never, time.monotonic() + 30) == "ended"
    assert process.returncode == 0
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed, its worker is in a group of its own."""
    (tmp_path / "sleeper.py").write_text(
        "import os, sys, time; from pathlib import Path\n"
        "Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
    )
    code = (
        "import os, subprocess, sys, time\n"
        "from itercast.microbench.processes.child_processes import ended_with_this\n"
        "words = ['-m', 'itercast.microbench.processes.child_processes', 'sleeper', sys.argv[1]]\n"
        "subprocess.Popen([sys.executable, *words], env=os.environ | ended_with_this(),"
        " start_new_session=True)\ntime.sleep(60)"
    )
    path = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    end = time.monotonic() + 20
    while not (path.is_file() and path.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    worker = int(path.read_text())
    assert lives(worker)
    parent.kill()
    parent.wait()
    assert gone(worker)


def test_a_worker_whose_parent_ended_before_it_began_ends_too() -> None:
    """Its variable names no pipe, another file under the number of a closed one, or a pipe."""
    command = [sys.executable, "-m", child_processes.__name__, "this"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with Path(__file__).open() as other:
        for gone_pipe in ("/proc/1/fd/99999:1", f"/proc/{os.getpid()}/fd/{other.fileno()}:1"):
            environment[child_processes.PARENT] = gone_pipe
            run = subprocess.run(command, env=environment, capture_output=True, timeout=60)
            assert run.returncode == -signal.SIGKILL and not run.stdout
    environment |= child_processes.ended_with_this()
    run = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert run.returncode == 0 and b"Beautiful" in run.stdout


FAMILY = """
import multiprocessing, os, sys, time
from pathlib import Path

def note(more=()):
    Path(sys.argv[1], str(os.getpid())).touch()
    for one in more:
        one()
    time.sleep(60)

def fork(*more):
    if os.fork() == 0:
        os.setsid()
        note(more)

def threads():
    import threading
    thread = threading.Thread(target=lambda: multiprocessing.Process(target=note).start())
    thread.start()
    thread.join()

note([lambda: fork(fork, threads), fork])
"""


def family(folder: Path, variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A process that ends with this one, and four more: forks of forks in other sessions."""
    folder.mkdir()
    (folder / "family.py").write_text(FAMILY)
    there = folder / "pids"
    there.mkdir()
    words = ["-m", child_processes.__name__, "family", str(there)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"} | variables
    first = subprocess.Popen([sys.executable, *words], env=environment, start_new_session=True)
    end = time.monotonic() + 20
    while len(list(there.iterdir())) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    return first, [int(path.name) for path in there.iterdir()]


def test_what_a_worker_forks_ends_with_it_and_with_its_parent(tmp_path: Path) -> None:
    """A thread that forked and ended does not end its fork."""
    first, pids = family(tmp_path / "killed", child_processes.ended_with_this())
    assert len(pids) == 5 and all(map(lives, pids))
    first.kill()
    assert all(map(gone, pids))
    first.wait()


def test_the_end_of_a_log_is_one_line(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "none.log") == ""
    (tmp_path / "one.log").write_text("x" * 1000 + "\nTraceback\n  RuntimeError: no\n")
    assert log_tail(tmp_path / "one.log").endswith("x Traceback RuntimeError: no")


def test_a_worker_on_a_gpu_logs_to_a_file_and_lets_go_of_the_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "teller.py").write_text(
        "import os; print(*(os.environ.get(n, '-') for n in ('TEARDOWN_CUPTI', 'OMP_NUM_THREADS')))"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    for name in ("TEARDOWN_CUPTI", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for device, said in (("cuda", "1 1"), ("cpu", "- -")):
        log = tmp_path / f"logs/{device}.log"
        assert start_ranks("teller", {"device": device}, 1, log=log).wait() == 0
        assert log.read_text().strip() == said


def test_a_rank_that_is_done_does_not_fail_while_it_shuts_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a thread of gloo aborts it; an error before that is told."""
    (tmp_path / "aborts.py").write_text("import atexit, os; atexit.register(os.abort); print('x')")
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    for module, ends in (("aborts", [0]), ("fails", [1, 3])):
        log = tmp_path / f"{module}.log"
        assert start_ranks(module, {"device": "cpu"}, 2, log=log).wait() in ends
    assert (tmp_path / "aborts.log").read_text().count("x") >= 2
