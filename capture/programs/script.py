"""Runs an unchanged training script as one rank of many, on GPUs that need not exist.

``main`` captures the script that an order names, and writes what it launched in one step to a file.
"""

from __future__ import annotations

import json
import linecache
import math
import os
import re
import runpy
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from itercast.capture.base.files import real_path, write_atomic
from itercast.capture.base.user_errors import first_line
from itercast.capture.input.batches import TakenBatches, loaders_give_real_batches
from itercast.capture.input.lane import InputLane
from itercast.capture.programs.attempts import Attempt, KnownRanks, Row, in_fork
from itercast.capture.programs.capture import capture_ranks, runs_of_steps
from itercast.capture.programs.gpus.asked import Asked, EmulatedGpu
from itercast.capture.programs.gpus.devices import OnCpu
from itercast.capture.programs.gpus.loaded import weights_not_downloaded
from itercast.capture.programs.gpus.machine import gpus_that_are_not_there
from itercast.capture.programs.gpus.streams import recorded_streams
from itercast.capture.programs.kept_files import KEPT
from itercast.capture.programs.kernels.own import WITHOUT_CUDA, own_kernels
from itercast.capture.programs.kernels.xformers import xformers_attention
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.objects import AwaitedError
from itercast.capture.programs.outside import RefusedError, nothing_outside
from itercast.capture.programs.program import ProgramCapture, write_program
from itercast.capture.programs.repeated.evaluations import Evaluations, Lines
from itercast.capture.programs.repeated.forms import UnlikeError
from itercast.capture.programs.repeated.mapped import some_rows_through_models
from itercast.capture.programs.reports.epoch import EnoughSteps
from itercast.capture.programs.reports.notes import script_notes
from itercast.capture.programs.reports.progress import printed_progress
from itercast.capture.programs.saved import saved_for_loading
from itercast.capture.programs.steps import KINDS, Steps
from itercast.capture.programs.trained.facts import STOPS
from itercast.capture.programs.trained.finder import Finder
from itercast.capture.programs.trained.serve import TrainedModel, serve

PACKAGES = sysconfig.get_path("purelib")
STDLIB = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
NAMED = (PACKAGES, str(Path(torch.__file__).parents[1]), sys.prefix, sys.base_prefix)
INSTALLED = (*NAMED, *map(real_path, NAMED))  # an environment may be reached by a link
ON_HOST = "no work on the GPU in a step: what it computes with was not moved there"
# Python's warnings of what decides how a step runs, in what a script wrote to stderr.
WARNED = re.compile(r"site-packages/((?:torch|accelerate|deepspeed)/\S+?:\d+: UserWarning: .+)")
OURS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[2]}{os.sep}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script with its arguments; ``steps`` run, the last one is captured.

    More steps run where its loop does some things less often, for up to ``patience_s`` seconds.
    ``module``: its name where it runs as ``python -m`` runs it, from the working directory.
    """

    path: Path
    module: str = ""
    arguments: Sequence[str] = ()
    steps: int = 3
    patience_s: float = math.inf

    @property
    def folder(self) -> Path:
        """The folder of the script and of the modules that it imports from beside it."""
        return self.path.resolve().parent

    @property
    def first_on_path(self) -> str:
        """Where Python looks for modules first."""
        return os.getcwd() if self.module else str(self.folder)

    def owns(self, file: str) -> bool:
        """Whether a file lies in that folder and not in an environment inside it."""
        return _lies_beside(self.path, file)

    def named(self, lines: Lines) -> str:
        """FILE:LINE of the innermost line in the user's code, else of the innermost line."""
        own = [line for line in lines if self.owns(line[0])]
        innermost = (own or lines)[-1:]
        return "".join(f"{_short(file)}:{number}" for file, number in innermost)

    def quoted(self, lines: Lines) -> str:
        """Quote up to two of these lines in brackets; "" for no lines.

        They are the script's innermost line, and the innermost of all if that is a library's.
        """
        own = [line for line in lines if self.owns(line[0])][-1:]
        below = [line for line in lines[-1:] if line not in own]
        quotes = []
        for file, number in (*own, *below):
            name = Path(file).name if self.owns(file) else _short(file)
            quotes.append(f"{name}:{number}: {linecache.getline(file, number).strip()}")
        return f" ({'; '.join(quotes)})" if quotes else ""

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise ValueError(f"steps {self.steps}: at least 2, the first one makes optimizer state")
        if not self.path.is_file():
            raise ValueError(f"script {str(self.path)!r}: no such file")
        if self.path.suffix not in ("", ".py"):
            raise ValueError(f"script {str(self.path)!r}: allowed is a Python file (.py)")


def capture_script(
    script: Script,
    gpu: EmulatedGpu | Asked,
    world_size: int,
    per_node: int,
    taken: TakenBatches,
    finder: Finder | None = None,
    kept: Path | None = None,
    make: Callable[[Attempt], KnownRanks] = lambda attempt: attempt(),
) -> ProgramCapture:
    """Capture a step of a script, mostly from one step of its optimizer to the next (``Steps``).

    ``per_node`` GPUs share a node; ``taken`` gets the batches of its DataLoaders; ``finder`` gets
    the model that it trains; ``kept``: the file to list those in that the script writes over.
    ``make``: see ``capture_ranks``. RefusedError names the line of the script that cannot run so.
    """

    def run(rank: int, log: ProgramLog) -> Row:
        """Run the script as one rank, everything around it emulated; facts of the captured step."""
        with ExitStack() as stack:
            if gpu.kind != "cpu":
                count = min(per_node, world_size)
                stack.enter_context(gpus_that_are_not_there(gpu, count, rank % per_node, log))
            listed = kept or Path(stack.enter_context(tempfile.TemporaryDirectory()), KEPT)
            stack.enter_context(nothing_outside(script.owns, listed))
            on_gpu = OnCpu(log.gpu_memory) if gpu.kind != "cpu" else None
            stack.enter_context(loaders_give_real_batches(taken, log.routing, on_gpu))
            stack.enter_context(some_rows_through_models(log))
            stack.enter_context(log.routing.lists_at_once())
            stack.enter_context(own_kernels(log))
            stack.enter_context(xformers_attention())
            stack.enter_context(weights_not_downloaded(log.guesses))
            follows = rank == 0 and finder is None  # beyond its steps, to the end of its epoch
            how = finder, gpu.kind != "cpu", follows
            steps = _run_until_enough_steps(script, log, taken, *how)
        taken.copied_ahead = log.gpu_memory.beside
        guesses = [f"{guess}{_place(at, script)}" for guess, at in log.guesses.items()]
        return {
            "samples": sum(taken.samples) if taken.loader is not None else 0,
            "rows_given": _rows_given(steps, taken),
            "optimizer_steps": steps.optimizer_steps,
            "passes": steps.kept_passes(script.named),
            "notes": [*steps.notes, *guesses, *steps.own_input()],
            "training": steps.epoch.training(rank, world_size),
        }

    ranks = (0,) if finder else ()  # plans are made of no pipeline: one rank has the whole model
    captured = capture_ranks(run, world_size, ranks, lasting=finder is not None, make=make)
    notes = dict.fromkeys([*captured.notes, *script_notes(captured)])
    return replace(captured, notes=tuple(notes))


def _rows_given(steps: Steps, taken: TakenBatches) -> int:
    """Samples that the model got in the kept iteration, by the first axes of its inputs.

    0 where DataLoaders give batches, which count instead, or where not each backward has one
    forward.
    """
    backwards = sum(what == "backward" for step in steps.kept for what, _ in step.passes)
    alone = taken.loader is None and len(taken.samples) == backwards
    return sum(taken.samples) if alone else 0


def _run_until_enough_steps(
    script: Script,
    log: ProgramLog,
    taken: TakenBatches,
    finder: Finder | None,
    on_gpu: bool,
    follows: bool,
) -> Steps:
    """Run the script until it has made enough steps; ``log`` has the launches of the last one.

    RefusedError where it ends or fails before.
    """
    lines = partial(_running_lines, script)
    evaluated, how = Evaluations(_outside_torch), (script.patience_s, on_gpu)
    steps = Steps(script.steps, log, taken, lines, script.quoted, evaluated, *how)
    steps.epoch.may_follow = follows
    steps.epoch.begin(script.patience_s)
    argv = [str(script.path), *script.arguments]

    def doing(frame: FrameType) -> str:
        return f"{steps.so_far()}{script.quoted(_running_lines(script, frame))}"

    try:
        with (
            printed_progress(doing),
            patch.object(sys, "argv", argv),
            patch.object(sys, "path", [script.first_on_path, *sys.path]),
            runs_of_steps(log),
            patch.object(Optimizer, "_patch_step_function", lambda made: steps.made(made)),
            finder.watching(log) if finder else nullcontext(),
            saved_for_loading(log.routing, steps.epoch.saved),
        ):
            if script.module:
                runpy.run_module(script.module, run_name="__main__")
            else:
                runpy.run_path(str(script.path), run_name="__main__")
    except (Exception, SystemExit, EnoughSteps, UnlikeError, AwaitedError) as exc:
        if isinstance(exc, UnlikeError | AwaitedError) and not steps.epoch.follows:
            raise
        exits = isinstance(exc, SystemExit) and not exc.code
        has_step = steps.kept and (exits or KINDS[steps.kind] == "optimizer")
        if not (steps.enough or has_step):  # else it failed after what is needed of it
            raise _refusal(exc, steps.done, script, on_gpu) from exc
        if exits:
            steps.epoch.script_ended()
    else:
        steps.epoch.script_ended()
    finally:
        steps.epoch.close()
    if not steps.kept and steps.enough:
        raise RefusedError(f"{script.path.name}: {steps.notes[0]}")
    if not steps.kept:
        raise RefusedError(_too_few(steps.done, script, "ends"))
    if on_gpu and not steps.computes_on_gpu:
        raise RefusedError(f"{script.path.name}: {ON_HOST}")
    steps.restore()
    return steps


def _refusal(exc: BaseException, done: int, script: Script, on_gpu: bool) -> RefusedError:
    """The one-line error: what in a script cannot be forecast, and on which line."""
    if isinstance(exc, SystemExit):
        return RefusedError(_too_few(done, script, f"exits with {exc.code!r}"))
    where = _place(traceback.extract_tb(exc.__traceback__), script)
    install = WITHOUT_CUDA.get(getattr(exc, "name", None) or "")
    hint = f"; its Python is enough: {install}" if install else ""
    if isinstance(exc, ModuleNotFoundError) and not install:
        hint = f"; the script runs in the Python of itercast: {sys.executable}"
    if not on_gpu and re.search("cuda|nvidia", first_line(exc), re.IGNORECASE):
        hint = "; name the GPU that it would run on: --gpu h100-sxm-80gb"
    return RefusedError(f"{first_line(exc)}{where}{hint}")


def _too_few(done: int, script: Script, how: str) -> str:
    """The error of a script that made too few steps; ``how`` it ended: "ends", "exits with 1"."""
    needed = f"{script.steps} are needed, of an optimizer, backward or forward"
    return f"{script.path.name} {how} after {done} steps; {needed}"


def _place(frames: Iterable[traceback.FrameSummary], script: Script) -> str:
    """The lines of a stack as ``Script.quoted``, without those of torch."""
    outside = (f for f in frames if _outside_torch(f.filename))
    return script.quoted(tuple((f.filename, f.lineno or 0) for f in outside))


def _running_lines(script: Script, innermost: FrameType | None = None) -> Lines:
    """The lines that run now outside torch and Python's library, the script's first.

    ``innermost``: the frame to start from, by default the caller's.
    """
    lines, path = list[tuple[str, int]](), str(script.path)
    for frame, number in traceback.walk_stack(innermost):
        if _outside_torch(file := frame.f_code.co_filename):
            lines.append((file, number or 0))  # another thread may be between two lines
        if file == path and frame.f_code.co_name == "<module>":
            break
    return tuple(lines[::-1])


@cache
def _outside_torch(file: str) -> bool:
    """Whether a file is neither of torch, nor of Python's library, nor ours."""
    library = file.startswith(STDLIB) and not file.startswith(PACKAGES)
    return not (library or file.startswith(("<", *OURS)))


def _short(file: str) -> str:
    """The path of an installed package's file from the package on; of another file its name."""
    return str(Path(file).relative_to(PACKAGES)) if file.startswith(PACKAGES) else Path(file).name


def main(order: str, result: str, temporary: str) -> int:
    """Capture the script of an order (JSON) into the file ``result``; returns the exit code.

    Where it fails, one line on stderr says why, and the code is ``STOPS`` where the script itself
    does not go on, else 2. Beside ``result``, the file ``.asked`` says what the script asked of
    this machine. An order that names a folder to ``serve`` goes on capturing the model that the
    script trains, as files in that folder ask. ``temporary`` is a folder for the script's files.
    """
    given = json.loads(order)
    finder = Finder() if given["serve"] else None
    taken, asked = TakenBatches(), Asked(EmulatedGpu(**given["gpu"]))
    if "TMPDIR" not in os.environ:
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
    try:
        script = Script(
            path=Path(given["script"]),
            module=given["module"],
            arguments=given["arguments"],
            steps=given["steps"],
            patience_s=given["patience_s"],
        )
        heard = _Heard(script.path.name, taken, asked)
        with asked.noted():
            size = given["world_size"], given["per_node"]
            listed, make = Path(temporary, KEPT), partial(in_fork, heard.tell, heard.hear)
            captured = capture_script(script, asked, *size, taken, finder, listed, make)
            trained = TrainedModel.of(finder, asked.kind != "cpu") if finder else None
    except ValueError as exc:
        line = (str(exc).splitlines() or [type(exc).__name__])[0]
        print(f"\nitercast: {line}", file=sys.__stderr__)  # a progress bar may be unfinished
        return STOPS if isinstance(exc, RefusedError) else 2
    captured = replace(captured, notes=(*captured.notes, *_warnings(2)))  # of its stderr
    write_program(captured, Path(result), heard.lane())
    ours = (str(Path(__file__).resolve().parents[2] / "capture"), str(Path(result).parent))
    answers = asked.answers(_loaded(script), (*INSTALLED, *OURS, *ours, temporary))
    write_atomic(Path(result).with_suffix(".asked"), json.dumps(answers).encode())
    if trained is not None:
        log = ProgramLog()
        with recorded_streams(log), ExitStack() as stack:
            if trained.on_gpu:
                stack.enter_context(gpus_that_are_not_there(asked, 1, 0, log))
            serve(trained, Path(given["serve"]))
    return 0


def _warnings(written: int) -> dict[str, None]:
    """Warnings in the file that a script wrote to, each once; none if it is a terminal."""
    with suppress(OSError):
        text = os.pread(written, os.fstat(written).st_size, 0).decode(errors="replace")
        return dict.fromkeys(WARNED.findall(text))
    return {}


class _Heard:
    """What an attempt to run a script tells besides its capture: batches, and what it asked for."""

    def __init__(self, name: str, taken: TakenBatches, asked: Asked) -> None:
        self._name, self._taken, self._asked = name, taken, asked
        self._earlier: InputLane | None = None

    def lane(self) -> InputLane | None:
        """The lane of the last attempt that took batches."""
        return self._taken.lane(self._name) or self._earlier

    def tell(self) -> Any:
        return self.lane(), self._asked.so_far()

    def hear(self, told: Any) -> None:
        self._earlier = told[0]
        self._asked.hear(told[1])


def _loaded(script: Script) -> set[str]:
    """Files of the script and of modules that were imported, none of them ours."""
    loaded = [m for name, m in sys.modules.items() if not name.startswith("itercast")]
    return {real_path(file) for file in (str(script.path), *map(_file, loaded)) if file}


@cache
def _lies_beside(script: Path, file: str) -> bool:
    """Whether a file is in the script's folder or below, and not in an environment there."""
    path = real_path(file)
    beside = path.startswith(_folder(script)) and not path.startswith(INSTALLED)
    return beside and os.path.isfile(path)


@cache
def _folder(script: Path) -> str:
    """The folder of a script, with a separator behind."""
    return os.path.join(script.resolve().parent, "")


def _file(module: Any) -> str:
    """The file of a module; empty for one without, or that is not imported until it is asked."""
    return str(getattr(module, "__dict__", {}).get("__file__") or "")
