"""Runs a module in a process that ends with its parent: ``leash MODULE ARGUMENTS``.

Workers run in process groups of their own, so that a parent can end all of a group. Without this
they would go on, and hold the GPU, after a parent that was killed.
"""

from __future__ import annotations

import ctypes
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; only Linux can."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError, TypeError):
        return
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
