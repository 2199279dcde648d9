"""Ends the processes that a process starts when it ends itself, in whatever way.

A process holds a pipe. Those that it starts open the pipe's end for reading and ask the kernel for
SIGKILL when nobody holds the other end any more: however the holder ends, and whatever session or
process group they are in. What they fork is on a pipe of theirs in turn. On Linux only; elsewhere
nothing happens.

``python -m itercast.microbench.processes.child_processes MODULE ARGUMENTS`` runs a module so.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import select
import signal
import sys
from functools import cache

START = "itercast.microbench.processes.child_processes"  # this module, which runs others
PARENT = "ITERCAST_PARENT"  # variable with the path of the parent's pipe and its inode
_held: dict[int, int] = {}  # pipes of this process: the end to read from -> the one to write to
_opened: list[int] = []  # the parent's pipe


@cache
def ended_with_this() -> dict[str, str]:
    """The variable for processes that end with this one."""
    return {PARENT: _path(_pipe()[0])}


def _pipe() -> tuple[int, int]:
    end, kept = os.pipe()
    _held[end] = kept
    return end, kept


def _path(end: int) -> str:
    """Where others open a pipe, and its inode: the number of a closed one may name another file."""
    return f"/proc/{os.getpid()}/fd/{end}:{os.fstat(end).st_ino}"


def end_with_parent() -> None:
    """Make the kernel kill this process, and all that it forks, when its parent ends or has ended.

    The parent is the process that set the variable.
    """
    path = os.environ.get(PARENT)
    if path is None or not hasattr(fcntl, "F_SETSIG"):
        return
    _end_with(path)
    os.register_at_fork(after_in_child=_forked)
    os.environ |= ended_with_this()


def _forked() -> None:
    """Go on a pipe of the process that forked this one, and let go of those that it holds."""
    (path,) = ended_with_this().values()
    inherited = [*_held.items(), *((end,) for end in _opened)]
    _held.clear()
    _opened.clear()
    for ends in inherited:
        for end in ends:
            os.close(end)
    _end_with(path)
    ended_with_this.cache_clear()
    os.environ |= ended_with_this()


def _end_with(path: str) -> None:
    """Be killed when nobody can write to a pipe any more."""
    name, _, inode = path.rpartition(":")
    try:
        end = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        end = -1
    if end < 0 or os.fstat(end).st_ino != int(inode):  # the parent is gone
        os.kill(os.getpid(), signal.SIGKILL)
        return
    fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
    _opened.append(end)
    asked = select.poll()
    asked.register(end, 0)
    if asked.poll(0):  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # forks find the state of the imported module
    from itercast.microbench.processes import child_processes as imported

    imported.end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    # Threads of gloo may abort a rank that is done while Python shuts down.
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
