"""Orders to run a script as rank 0 of several, and what it does meanwhile, for all commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

    from itercast.capture.programs.program import ProgramCapture
    from itercast.compose.machines.file import KnownMachine
    from itercast.compose.programs.scripts import ScriptOrder


def script_order(
    script: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str = "cpu",
    gpus: int = 1,
    node: str = "",
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
    machine: KnownMachine | None = None,
) -> ScriptOrder:
    """The order to run a script, or a module by its name, as rank 0 of so many GPUs.

    A changed text or other arguments make it another model, of which measured steps of this one
    tell less; in another folder, or on another machine, it stays the same model.
    """
    from itercast.compose.programs.scripts import ScriptOrder, digest, module_file
    from itercast.compose.target import find_target

    path, place = module_file(script) if module else Path(script), f"node={node}" if node else ""
    text = path.read_bytes() if path.is_file() else b""  # the order refuses what is no file
    model = f"{path.name} {digest((text, *arguments))}"
    target = find_target(gpu, place, bundle, host, stack, machine, model)
    name = script if module else ""
    return ScriptOrder(path=path, module=name, arguments=arguments, target=target, world_size=gpus)


def captured(order: ScriptOrder) -> ProgramCapture:
    """What a script launches in a step: captured, or read where it was before."""
    from itercast.compose.programs.several import captured_scripts

    with telling(order) as orders_with_progress:
        (found,) = captured_scripts(orders_with_progress)
    if isinstance(found, ValueError):
        raise found
    return found.program


@contextmanager
def telling(*orders: ScriptOrder) -> Iterator[list[ScriptOrder]]:
    """The orders, changed such that each shows a line of progress while its script runs."""
    from itercast.eval.progress import progress_bar

    tasks: dict[str, TaskID] = {}
    with progress_bar() as bar:

        def tell(order: ScriptOrder, doing: str) -> None:
            label = f"running {order.path.name} as rank 0 of {order.world_size}"
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=None)
            bar.update(tasks[label], description=f"{label}: {doing}")

        yield [replace(order, tell=tell) for order in orders]
