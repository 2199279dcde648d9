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
    """A pipe that stays open as long as this process lives: the ends to read from and to write."""
    read_end, write_end = os.pipe()
    _held[read_end] = write_end
    return read_end, write_end


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
    """In a fork: end with the process that forked this one, whose pipes it closes."""
    (path,) = ended_with_this().values()
    inherited = [*_held.items(), *((descriptor,) for descriptor in _opened)]
    _held.clear()
    _opened.clear()
    for descriptors in inherited:
        for descriptor in descriptors:
            os.close(descriptor)
    _end_with(path)
    ended_with_this.cache_clear()
    os.environ |= ended_with_this()


def _end_with(path: str) -> None:
    """Have the kernel kill this process when no process holds the pipe's write end any more."""
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
    poll = select.poll()
    poll.register(end, 0)
    if poll.poll(0):  # it ended before the kernel knew
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
