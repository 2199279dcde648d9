"""Runs a module in a process that is killed when its parent ends: ``leash MODULE ARGUMENTS``.

Workers are in process groups of their own, so that a parent can kill a whole group. After a parent
that was itself killed they would otherwise run on and occupy the GPU.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PARENT = "ITERCAST_PARENT"  # variable with the id of the process that starts this one


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, or has ended; Linux only."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError, TypeError):
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(os.environ.pop(PARENT, os.getppid())) != os.getppid():
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    # Threads of gloo may abort a rank that is done while Python shuts down.
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
