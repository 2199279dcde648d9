"""Progress bars on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

FIRST_LINE_S, LINE_EVERY_S = 2.0, 10.0


class PlainLines(Progress):
    """Progress where no terminal shows a bar: a line now and then, on stderr."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, disable=True)
        self.began_s = time.monotonic()
        self.next_line_s = self.began_s + FIRST_LINE_S

    def update(self, task_id: TaskID, *args: Any, **fields: Any) -> None:
        """Set how far a task is."""
        super().update(task_id, *args, **fields)
        self._print_if_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Add to how far a task is."""
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def _print_if_due(self, task_id: TaskID) -> None:
        now_s, task = time.monotonic(), self.tasks[task_id]
        if now_s < self.next_line_s:
            return
        self.next_line_s = now_s + LINE_EVERY_S
        share = f" {100 * task.completed / task.total:.0f} %" if task.total else ""
        print(f"{task.description}{share} ({now_s - self.began_s:.0f} s)", file=sys.stderr)


def progress_bar() -> Progress:
    """A progress bar on stderr, so that --json on stdout stays clean; lines off a terminal."""
    console = Console(stderr=True, markup=False)
    return Progress(console=console) if console.is_terminal else PlainLines(console)


@contextmanager
def rows_bar(what: str) -> Iterator[Callable[[int, float], None]]:
    """A progress bar of measurements: a function of the rows so far and of the share done."""
    with progress_bar() as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda rows, frac: bar.update(task, completed=frac, description=f"{what} {rows} rows")
