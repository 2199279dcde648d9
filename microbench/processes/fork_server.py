"""Calls a function of a module in forks of one process, which has imported the module before.

To import torch takes seconds, to fork milliseconds. ``python -m`` this module, ``MODULE SOCKET``
imports MODULE. For each byte on the socket, with which four files come, it forks: the fork calls
``main`` of the module with the arguments in the first file, and ends with what it returns. Its
output goes to the next two; the last one is told the number of its process, then how that ended.

All of them end with the process that started the server (``child_processes``).
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from tempfile import TemporaryFile

from itercast.capture.base.garbage import without_garbage_collection
from itercast.microbench.processes.child_processes import PARENT, START, ended_with_this

MODULE = "itercast.microbench.processes.fork_server"  # this one
AT_IMPORT = ("CUDA", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH", "TORCH")
NUMBER = struct.Struct("i")
_running: dict[str, tuple[object, _Server]] = {}  # by module, with what it may have read


class Fork:
    """A call of ``main(*arguments)`` of a module in a process of its own, which leads its session.

    It runs in the current folder, with the current environment. ``pid`` is 0 until it has started,
    ``returncode`` None until it has ended: what ``main`` returned, or -N where signal N ended it.
    """

    pid: int
    returncode: int | None

    def __init__(self, module: str, arguments: Sequence[str], stdout: int, stderr: int) -> None:
        self.pid, self.returncode = 0, None
        self._server = _server(module)  # which ends when nobody can ask it any more
        self._status, status_pipe = os.pipe()
        try:
            with TemporaryFile() as request:
                request.write(json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode())
                request.flush()
                self._server.ask([request.fileno(), stdout, stderr, status_pipe])
        finally:
            os.close(status_pipe)

    def poll(self, wait_s: float | None = 0) -> int | None:
        """Returncode of the call; None while it runs, after waiting up to ``wait_s`` seconds."""
        while self.returncode is None and select.select([self._status], [], [], wait_s)[0]:
            message = os.read(self._status, NUMBER.size)
            number = NUMBER.unpack(message)[0] if message else -signal.SIGKILL  # with its server
            if message and not self.pid:
                self.pid = number
            else:
                self.returncode = number
                os.close(self._status)
        return self.returncode

    def end(self) -> None:
        """Kill the process and its group, unless it has ended, which ends the group too."""
        if self.poll() is None:
            if self.pid:
                try:
                    os.killpg(self.pid, signal.SIGKILL)
                except ProcessLookupError:  # it leads none yet
                    os.kill(self.pid, signal.SIGKILL)
            else:  # the server has not come to it
                self._server.end()
            self.poll(None)


class _Server:
    """The process that imports a module and forks."""

    def __init__(self, module: str) -> None:
        """Start the process, with one end of a socket pair that ``ask`` writes to."""
        self._requests, server_end = socket.socketpair()
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", START, MODULE, module, str(server_end.fileno())],
                env=os.environ | ended_with_this(),
                pass_fds=[server_end.fileno()],
                stdout=sys.__stderr__,
                stderr=sys.__stderr__,
                start_new_session=True,
            )

    def ask(self, files: list[int]) -> None:
        """Pass it the files of a call."""
        with suppress(BrokenPipeError):  # it ended: so does the pipe that is told
            socket.send_fds(self._requests, [b"1"], files)

    def lives(self) -> bool:
        """Whether it can be asked: one that ends has left its socket before its end is known."""
        left = self._process.poll() is not None or select.select([self._requests], [], [], 0)[0]
        return not left

    def end(self) -> None:
        """Kill it, and all of its forks with it."""
        self._process.kill()
        self._process.wait()
        self._requests.close()


def _server(module: str) -> _Server:
    """The server of a module, started anew if variables have changed that are read at import."""
    startup = {name: v for name, v in os.environ.items() if name.startswith(AT_IMPORT)}, os.getpid()
    running = _running.get(module)
    if running is None or running[0] != startup or not running[1].lives():
        _running[module] = startup, _Server(module)
    return _running[module][1]


def _serve(main: Callable[..., int], requests: socket.socket) -> None:
    """Fork for each call until nobody can ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    while True:
        byte, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not byte:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _exit_with(_watched, main, *files)
        for file in files:
            os.close(file)


def _watched(main: Callable[..., int], request: int, out: int, err: int, status_pipe: int) -> int:
    """Fork the call's process, report its number, wait, kill its group, report how it ended."""
    pid = os.fork()
    if pid == 0:
        os.close(status_pipe)
        _exit_with(_call, main, request, out, err)
    for file in (request, out, err):
        os.close(file)
    os.write(status_pipe, NUMBER.pack(pid))
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.write(status_pipe, NUMBER.pack(os.waitstatus_to_exitcode(status)))
    return 0


def _call(main: Callable[..., int], request: int, out: int, err: int) -> int:
    """In the innermost fork: call ``main`` in the folder and environment of the request."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.lseek(request, 0, os.SEEK_SET)
    with os.fdopen(request) as file:
        arguments, folder, environment = json.load(file)
    for opened in (out, err):
        os.close(opened)
    os.chdir(folder)
    environment[PARENT] = os.environ[PARENT]
    os.environ.clear()
    os.environ |= environment
    return main(*arguments)


def _exit_with(function: Callable[..., int], *args: object) -> None:
    """End this process with what a call returns; 1 after a traceback if it fails."""
    code = 1
    try:
        code = function(*args)
    except BaseException:  # whatever it is, the fork must not go on as its server
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, in which "python script.py" finds no modules
    with without_garbage_collection():
        function = import_module(sys.argv[1]).main
    gc.freeze()  # what was imported stays
    _serve(function, socket.socket(fileno=int(sys.argv[2])))
