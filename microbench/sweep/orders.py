"""Orders to the worker processes of a sweep, and the phases into which a sweep is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from itercast.capture.base.close_names import unknown
from itercast.capture.base.slow_imports import torch
from itercast.microbench import store
from itercast.microbench.ops import families
from itercast.microbench.processes.ranks import threads_of
from itercast.microbench.store import Row
from itercast.microbench.sweep.rows import Order

CPU_GROUPS = (2, 4)  # ranks whose collectives are measured on a CPU
HOST_SHARE = 0.05  # of a GPU's sweep, for host times


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder(Order):
    """What a worker process, or each rank of a group, measures, and for how long."""

    families: tuple[str, ...]
    budget_s: float
    seed: int
    hardware: Row
    points: str
    torchrun: str = ""  # its arguments, where ranks are on several nodes
    only: bool = False  # only the points of the file, in their order
    among: Sequence[int] = (0, 1)  # number of the sweep among so many that share all points

    @property
    def together(self) -> bool:
        """Whether several ranks measure each point at once."""
        return self.ranks > 1 or bool(self.torchrun)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a sweep, with a ``share`` of its time, for one process or group of ranks."""

    families: tuple[str, ...]
    threads: int
    share: float
    ranks: int = 1
    lanes: int = 1  # workers side by side, one per GPU


def spent_s(root: Path, gpu: str, phase: Phase) -> float:
    """Seconds of measuring that the rows under a root cost in this phase, by the clock."""
    total = 0.0
    for name in phase.families:
        rows = store.read_rows([root], name)
        if len(rows):
            of_phase = (rows["gpu"] == gpu) & (rows["threads"] == phase.threads)
            if "ranks_per_node" in rows:
                of_phase &= rows["ranks_per_node"] == phase.ranks
            total += float(rows["cost_s"][of_phase].sum())
    return total / phase.lanes


def phases(device: str, swept: Sequence[str], nodes: bool = False, devices: int = 1) -> list[Phase]:
    """The phases of a sweep; shares of phases without families go to the others.

    On a CPU: ops on all cores; then the same op on every core at once, one rank each; then
    collectives of two and of four ranks, which may share cores. On a GPU: host calls, in a process
    without a profiler; then all other ops, on so many ``devices`` at once; then collectives over
    two, four, ... and all GPUs. With several ``nodes``: collectives over all GPUs only.
    """
    together = tuple(n for n in swept if families()[n].ranks > 1)
    single = tuple(n for n in swept if n not in together)
    cores = threads_of(1)
    if device == "cpu":
        planned = [
            Phase(families=single, threads=cores, share=0.46),
            Phase(families=single, threads=1, share=0.34 * (cores > 1), ranks=cores),
            *(Phase(families=together, threads=1, share=0.1, ranks=n) for n in CPU_GROUPS),
        ]
    else:
        gpus = torch.cuda.device_count()
        groups = sorted({2**n for n in range(1, gpus.bit_length())} | {gpus} - {1})
        groups = [gpus] if nodes else groups
        host = tuple(n for n in single if families()[n].on_host)
        rest = tuple(n for n in single if n not in host)
        planned = [
            Phase(families=host, threads=0, share=HOST_SHARE * (not nodes)),
            Phase(families=rest, threads=0, share=(0.9 - HOST_SHARE) * (not nodes), lanes=devices),
        ]
        planned += [
            Phase(families=together, threads=0, share=0.1 / len(groups), ranks=ranks)
            for ranks in groups
        ]
    planned = [p for p in planned if p.families and p.share]
    total = sum(p.share for p in planned)
    return [replace(p, share=p.share / total) for p in planned]


def known_families(names: Sequence[str] | None) -> tuple[str, ...]:
    """The named families; without names all but those on demand. ValueError for unknown names."""
    families_by_name = families()
    for name in names or ():
        if name not in families_by_name:
            raise unknown("family", name, families_by_name)
    return tuple(names or (n for n, family in families_by_name.items() if not family.on_demand))
