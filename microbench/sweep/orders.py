"""What one worker process of a sweep is told to do, and how a sweep is divided among workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.ops import families

HOST_SHARE = 0.05  # of a GPU's sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """What one worker process does: families to sweep on so many threads, for so long."""

    root: str
    run_id: str
    device: str
    gpu: str
    families: tuple[str, ...]
    threads: int
    budget_s: float
    seed: int
    ranks: int
    hardware: dict[str, Any]
    points: str
    torchrun: str = ""  # its arguments, where ranks are on several nodes
    only: bool = False  # measure the points of the file and no others, in their order
    begin_s: float = 0.0  # time.monotonic() when the budget begins; 0: when the worker is ready

    @property
    def together(self) -> bool:
        """Whether several ranks measure each point at once."""
        return self.ranks > 1 or bool(self.torchrun)


def stack() -> str:
    """Software and versions, as one string."""
    import torch  # lazy: cards can be read without torch

    return f"torch-{torch.__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a sweep: one process, or the ranks of one group."""

    families: tuple[str, ...]
    threads: int
    share: float
    ranks: int = 1


def spent_s(root: Path, gpu: str, phase: Phase) -> float:
    """Seconds earlier sweeps of this root spent measuring in this phase."""
    total = 0.0
    for name in phase.families:
        rows = store.read_rows([root], name)
        if len(rows):
            mine = (rows["gpu"] == gpu) & (rows["threads"] == phase.threads)
            if "ranks_per_node" in rows:
                mine &= rows["ranks_per_node"] == phase.ranks
            total += float(rows["cost_s"][mine].sum())
    return total


def phases(device: str, swept: Sequence[str], nodes: bool = False) -> list[Phase]:
    """On a CPU: all cores on one op, then a rank per core on the same op at once, then collectives.

    On GPUs: one of them, first the host alone in a process that never profiles, then all other
    families but collectives; then a rank on each of two, four, ... and all; several ``nodes`` do
    collectives only, on all. Shares of phases without a family go to the others.
    """
    together = tuple(n for n in swept if families()[n].ranks > 1)
    single = tuple(n for n in swept if n not in together)
    cores = os.cpu_count() or 1
    if device == "cpu":
        found = [
            Phase(families=single, threads=cores, share=0.46),
            Phase(families=single, threads=1, share=0.34 * (cores > 1), ranks=cores),
            Phase(families=together, threads=1, share=0.2, ranks=2),
        ]
    else:
        import torch  # lazy: CPU sweeps do not ask

        gpus = torch.cuda.device_count()
        groups = sorted({2**n for n in range(1, gpus.bit_length())} | {gpus} - {1})
        groups = [gpus] if nodes else groups
        host = tuple(n for n in single if n == "host")
        rest = tuple(n for n in single if n != "host")
        found = [
            Phase(families=host, threads=0, share=HOST_SHARE * (not nodes)),
            Phase(families=rest, threads=0, share=(0.9 - HOST_SHARE) * (not nodes)),
        ]
        found += [
            Phase(families=together, threads=0, share=0.1 / len(groups), ranks=ranks)
            for ranks in groups
        ]
    found = [p for p in found if p.families and p.share]
    total = sum(p.share for p in found)
    return [replace(p, share=p.share / total) for p in found]


def known_families(names: Sequence[str] | None) -> tuple[str, ...]:
    """The families named, all but those on demand where none is; ValueError for an unknown name."""
    known = families()
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown family {name!r}; known: {sorted(known)}")
    return tuple(names or (n for n, family in known.items() if not family.on_demand))
