"""Keeps a script inside its process: no sockets, no programs, no other processes.

A script that starts one process per rank runs here as the captured rank's process alone. Processes
that other modules start, pools of processes and managers of shared objects become threads, which
compute for real.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import multiprocessing.dummy
import multiprocessing.util
import os
import shlex
import socket
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp
from torch.utils.data import dataloader

from itercast.capture.base.slow_imports import once_imported
from itercast.capture.programs.kept_files import files_kept

DATA = dataloader.__file__  # starts workers, which fork
ENVIRONMENT = {  # nothing is sent or logged elsewhere or happens in other threads, errors are whole
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # ours may be the reason that it is installed
    "COMET_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "HYDRA_FULL_ERROR": "1",
}
# Programs that libraries ask or build with.
TOOLS = (
    *("make", "ninja", "ldconfig", "git", "uname", "hostname", "ls", "lscpu", "nproc", "echo"),
    "df",
)
PROGRAMS = ("system", "posix_spawn", "posix_spawnp", "forkpty", "execv", "execve")
POOLS = ("multiprocessing", "multiprocess")  # the latter is of Hugging Face's datasets
OF_THREADS = [
    "Process",
    "_setup_queues",
    "_get_sentinels",
    "_get_worker_sentinels",
    "_help_stuff_finish",
    "_wrap_exception",
]
SHARED = (  # what a manager of shared objects makes
    *("dict", "list", "Namespace", "Value", "Array", "Queue", "JoinableQueue", "Event", "Lock"),
    *("RLock", "Semaphore", "BoundedSemaphore", "Condition", "Barrier", "Pool"),
)


class RefusedError(ValueError, PermissionError):
    """Raised where a script does what a forecast cannot follow, with the line that does it.

    As a PermissionError it lets libraries that look for a newer version go on as if offline.
    """


@contextmanager
def nothing_outside(owns: Callable[[str], bool], kept: Path) -> Iterator[None]:
    """Let the script open no sockets and start no programs; workers of DataLoaders may.

    Libraries may ask another Python (``python -c``), as some do for the version of theirs.
    ``owns``: whether a file is the script's own; ``kept``: a file in which to list the files that
    the script overwrites (``kept_files``).
    """
    others: dict[str, Any] = dict.fromkeys(PROGRAMS, _refuse("starts another program"))
    with ExitStack() as stack:
        for context in (
            patch.object(os, "fork", _refuse("forks", os.fork)),
            patch.multiple(os, **others),
            patch.object(subprocess.Popen, "__init__", _starting_tools(owns)),
            patch.object(multiprocessing.util, "spawnv_passfds", _refuse("spawns processes")),
            patch.dict(os.environ, ENVIRONMENT),
            patch.object(socket.socket, "connect", _of_unix("connect", "opens a connection")),
            patch.object(socket.socket, "bind", _of_unix("bind", "opens a socket")),
            patch.multiple(mp, spawn=_spawned, start_processes=_spawned),
            patch.object(concurrent.futures, "ProcessPoolExecutor", _Threads),
        ):
            stack.enter_context(context)
        stack.enter_context(once_imported("wandb", _without_runs))
        stack.enter_context(files_kept(kept))
        stack.enter_context(_rank_of_processes(owns))
        for package in filter(find_spec, POOLS):
            stack.enter_context(_threads_for_processes(package))
        yield


def _without_runs(wandb: Any) -> None:
    """Let wandb log nowhere, also where a script states a ``mode``, which beats the variable."""
    init = wandb.init
    wandb.init = lambda *args, **kwargs: init(*args, **{**kwargs, "mode": "disabled"})


def _refuse(what: str, start: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A function that raises RefusedError; a DataLoader that calls it gets ``start`` instead."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        if start and _by_loader():
            return start(*args, **kwargs)
        raise RefusedError(f"the script {what}, which a forecast does not allow")

    return refused


def _of_unix(name: str, what: str) -> Callable[..., Any]:
    """Wrap a method of sockets: only Unix sockets, by which workers pass batches, may use it.

    ``bind`` to port 0 is allowed: a program looks for a free port.
    """
    method, refused = getattr(socket.socket, name), _refuse(what)

    def call(own: socket.socket, address: Any) -> Any:
        allowed = own.family == socket.AF_UNIX or (name == "bind" and address[1] == 0)
        return method(own, address) if allowed else refused()

    return call


def _by_loader() -> bool:
    """Whether a DataLoader runs now, which starts workers."""
    return any(frame.f_code.co_filename == DATA for frame, _ in traceback.walk_stack(None))


def _starting_tools(owns: Callable[[str], bool]) -> Callable[..., None]:
    """A ``Popen.__init__`` that finds no programs but ``TOOLS``; ``nvidia-smi -L`` lists the GPUs.

    ``owns``: whether a file is the script's own. Other files may also start ``python -c``.
    """
    original_init = subprocess.Popen.__init__

    def init(process: Any, args: Any, *others: Any, **options: Any) -> None:
        """As ``Popen.__init__``; a shell that would start a refused program prints an error."""
        if args in ("nvidia-smi -L", ["nvidia-smi", "-L"]):
            args, options["shell"] = ["echo", _listed_gpus()], False
        files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
        starts = next(file for file in files if file not in (__file__, subprocess.__file__))
        asks = [*args[:2]] == [sys.executable, "-c"] and not owns(starts)
        programs = _programs(args) if isinstance(args, str) else [*map(str, args[:1])]
        refused = [p for p in programs if os.path.basename(p) not in TOOLS and not asks]
        if refused and not _by_loader():  # such as ffmpeg, which reads videos
            said = f"{refused[0]!r}: a forecast starts no other programs"
            if not options.get("shell"):
                raise FileNotFoundError(said)
            args = f"echo {shlex.quote(f'FileNotFoundError: {said}')} >&2; exit 127"
        original_init(process, args, *others, **options)

    return init


def _listed_gpus() -> str:
    """GPUs that need not be there, as ``nvidia-smi -L`` lists them."""
    names = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    return "\n".join(f"GPU {i}: {name} (UUID: GPU-{i})" for i, name in enumerate(names))


def _programs(line: str) -> list[str]:
    """The programs that a line of shell starts; the whole line where commands are nested."""
    if any(inner in line for inner in ("`", "$(", "\n")):
        return [line]
    words = list(shlex.shlex(line, posix=True, punctuation_chars=True))
    before = [";", *words]  # of each word; a program follows these marks
    return [word for word, mark in zip(words, before, strict=False) if set(mark) <= set("|&;(")]


def _spawned(function: Callable[..., Any], args: Any = (), *more: Any, **options: Any) -> None:
    """As ``torch.multiprocessing.spawn``, but only this rank's process runs, here."""
    function(int(os.environ["LOCAL_RANK"]), *args)


@contextmanager
def _rank_of_processes(owns: Callable[[str], bool]) -> Iterator[None]:
    """If a script starts a process for each rank, run the target of this rank's process here.

    Processes with the same target function are the ranks, in order of their start. Daemons, such as
    readers of data, and processes that modules outside its folder start, become threads.
    """
    original_start, original_join, started = BaseProcess.start, BaseProcess.join, Counter[Any]()

    def start(process: Any) -> None:
        """As ``Process.start``: run the target here and now if the process is this rank's."""
        if process.daemon or not owns(sys._getframe(1).f_code.co_filename):
            if _by_loader():
                original_start(process)
            else:
                process._popen = _Thread(process.run)
            return
        rank = started[process._target]
        started[process._target] += 1
        if rank == int(os.environ["LOCAL_RANK"]):
            process.run()

    def join(process: Any, timeout: float | None = None) -> None:
        if process._popen is not None:
            original_join(process, timeout)

    with patch.multiple(BaseProcess, start=start, join=join):
        yield


class _Thread(threading.Thread):
    """A thread with the methods of a started process (``multiprocessing.popen_fork.Popen``)."""

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(target=run, daemon=True)
        self.pid = os.getpid()
        self.start()

    def poll(self, flag: int = 0) -> int | None:
        """The exit code; None while it runs."""
        return None if self.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it ends."""
        self.join(timeout)
        return self.poll()

    def terminate(self) -> None:
        """Let it run until this process ends."""

    kill = close = terminate


class _Threads(ThreadPoolExecutor):
    """A pool of threads with the arguments of ``ProcessPoolExecutor``."""

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> None:
        """What is said of processes (``mp_context``, ``options``) means nothing to threads."""
        super().__init__(max_workers, "", initializer, initargs)


@contextmanager
def _threads_for_processes(package: str) -> Iterator[None]:
    """Let pools and managers of a package such as ``multiprocessing`` use threads.

    All start methods become fork: locks of the others would start a tracker process.
    """
    context, dummy, managers, pool = (
        importlib.import_module(f"{package}.{name}")
        for name in ("context", "dummy", "managers", "pool")
    )
    fork = context._concrete_contexts["fork"]
    of_threads = {name: vars(pool.ThreadPool)[name] for name in OF_THREADS}

    def making(name: str) -> Callable[..., Any]:
        return lambda manager, *args, **options: getattr(dummy, name)(*args, **options)

    makers: dict[str, Any] = {name: making(name) for name in SHARED}
    makers |= dict.fromkeys(("start", "connect", "shutdown"), lambda *args: None)
    with (
        patch.multiple(pool.Pool, create=True, **of_threads),
        patch.object(dummy.DummyProcess, "pid", os.getpid(), create=True),
        patch.multiple(managers.SyncManager, create=True, **makers),
        patch.object(managers.SyncManager, "__enter__", lambda manager: manager, create=True),
        patch.object(context._default_context, "_actual_context", None),
        patch.dict(context._concrete_contexts, dict.fromkeys(context._concrete_contexts, fork)),
    ):
        yield
