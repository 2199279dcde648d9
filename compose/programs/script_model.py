"""The model that a user's script trains, as a case: captured in any batch, under any plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.base.files import write_atomic
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.programs.program import MARKS, ProgramCapture, read_program
from itercast.capture.programs.trained.facts import ANSWER, ASKED, FACTS, REFUSED, Trained
from itercast.capture.recorder.cache import cached, loads
from itercast.capture.step import StepSettings
from itercast.compose.capture_model import SizedModel
from itercast.compose.programs.scripts import (
    ScriptOrder,
    ScriptProcess,
    ScriptStopsError,
    digest,
    fresh_path,
    keep,
)


@contextmanager
def script_model(order: ScriptOrder) -> Iterator[tuple[SizedModel, ProgramCapture]]:
    """The model that a script trains, and the step that it was found in.

    The script runs as one process; if it stops that way, as one of its ``world_size`` ranks.
    ValueError in one line if no plan can be made for it. Captures of the model are kept on disk
    beside the script's; new ones are made in the script's process, which ends with this context.
    """
    order = replace(order, steps=2)  # the first one makes optimizer state
    with ExitStack() as stack:
        as_ordered = _Captures(order, stack)
        single = as_ordered  # as one process, tried first
        if order.world_size > 1:
            single = _Captures(replace(order, world_size=1), stack)
        captures = as_ordered if as_ordered.kept() and not single.kept() else single
        try:
            path = captures.kept() or captures.start()
        except ScriptStopsError as alone:
            if captures is as_ordered:
                raise
            captures = as_ordered
            try:
                path = captures.start()
            except ScriptStopsError as exc:
                many = "" if str(exc) == str(alone) else f"; as one of {order.world_size}: {exc}"
                raise ValueError(f"{alone}{many}") from exc
        program, _ = read_program(path)
        facts = Trained(**json.loads(path.with_suffix(".trained").read_text()))
        model = SizedModel(
            name=order.path.name,
            facts=facts,
            engine=engine_of(program.ranks[0].calls),
            capture_at=partial(captures.at, path.name),
        )
        yield model, program


def engine_of(calls: Sequence[OpCall]) -> str:
    """What launches more than half of a step's ops: one by one, compiled, as CUDA graphs."""
    ops = [c for c in calls if c.phase != "optimizer" and c.op not in MARKS]
    used = {"compile": sum(c.compiled > 0 for c in ops), "graph": sum(c.graphed > 0 for c in ops)}
    return "+".join(kind for kind, count in used.items() if 2 * count > len(ops)) or "eager"


class _Captures:
    """Captures of a script's model: kept ones from disk, new ones from the script's process."""

    def __init__(self, order: ScriptOrder, stack: ExitStack) -> None:
        self.order, self.key, self.stack = order, order.key(serve=True), stack
        self.folder = Path(stack.enter_context(TemporaryDirectory()))
        self.process: ScriptProcess | None = None
        self.numbers = count()

    def kept(self) -> Path | None:
        """The step that the model was found in, if it is known."""
        path = self.order.kept(self.key)
        return path if path and path.with_suffix(".trained").is_file() else None

    def start(self) -> Path:
        """Run the script until its model is found, and keep what was captured."""
        with fresh_path(self.key) as path:
            command = self.order.command(path, str(self.folder))
            process = self.stack.enter_context(ScriptProcess(self.order, command))
            process.written(self.folder / FACTS)
            self.process = process
            kept = keep(path, self.key)
        write_atomic(kept.with_suffix(".trained"), (self.folder / FACTS).read_bytes())
        return kept

    def at(
        self, name: str, settings: StepSettings, batch: int, seq: int, shallow: bool
    ) -> StepCapture:
        """A captured micro-batch of the script of capture ``name``, kept on disk.

        ``batch`` samples of ``seq`` tokens; ``shallow``: with few of its equal layers.
        """
        key = digest((name, settings, batch, seq, shallow))
        make = partial(self._ask, settings, batch, seq, shallow)
        return cached(key, make, cache_folder("captures"))

    def _ask(self, settings: StepSettings, batch: int, seq: int, shallow: bool) -> StepCapture:
        """Have the script's process capture a micro-batch, by a file that asks for it."""
        if self.process is None:
            self.start()
        if self.process is None:
            raise ValueError(f"{self.order.path.name} did not start")
        request = {"settings": asdict(settings), "batch": batch, "seq": seq, "shallow": shallow}
        path = self.folder / f"{next(self.numbers)}{ASKED}"
        write_atomic(path, json.dumps(request).encode())
        answer, refused = path.with_suffix(ANSWER), path.with_suffix(REFUSED)
        self.process.written(answer, refused)
        if refused.is_file():
            raise ValueError(refused.read_text())
        return loads(answer.read_bytes())
