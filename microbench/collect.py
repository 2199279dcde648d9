"""A sweep within a budget: workers measure points, the parent restarts and compacts."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.hardware.machine import measure_cpu
from microbench.ops import families
from microbench.ranks import start_ranks
from microbench.zoo import points_file

Progress = Callable[[int, float], None]
MAX_RESTARTS = 20


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
    cache_bytes: float
    points: str


def stack() -> str:
    """Software and versions, as one string."""
    import torch  # lazy: cards can be read without torch

    return f"torch-{torch.__version__}"


def spent_s(root: Path, gpu: str, names: Sequence[str], threads: int) -> float:
    """Seconds earlier sweeps of this root spent measuring on so many threads."""
    total = 0.0
    for name in names:
        rows = store.read_rows([root], name)
        if len(rows):
            mine = rows[(rows["gpu"] == gpu) & (rows["threads"] == threads)]
            total += float(mine["cost_s"].sum())
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a sweep: one process, or the ranks of one group."""

    families: tuple[str, ...]
    threads: int
    share: float
    ranks: int = 1


def phases(device: str, swept: Sequence[str]) -> list[Phase]:
    """On a CPU: all cores on one op, then a rank per core on the same op at once, then collectives.

    Shares of phases without a family go to the others.
    """
    together = tuple(n for n in swept if families()[n].ranks > 1)
    single = tuple(n for n in swept if n not in together)
    cores = os.cpu_count() or 1
    if device == "cpu":
        found = [
            Phase(families=single, threads=cores, share=0.5),
            Phase(families=single, threads=1, share=0.38 * (cores > 1), ranks=cores),
            Phase(families=together, threads=1, share=0.12, ranks=2),
        ]
    else:
        import torch  # lazy: CPU sweeps do not ask

        ranks = torch.cuda.device_count()
        found = [
            Phase(families=single, threads=1, share=0.9),
            Phase(families=together, threads=1, share=0.1 * (ranks > 1), ranks=ranks),
        ]
    found = [p for p in found if p.families and p.share]
    total = sum(p.share for p in found)
    return [replace(p, share=p.share / total) for p in found]


def collect(
    root: Path,
    device: str,
    names: Sequence[str] | None,
    budget_s: float,
    seed: int = 0,
    progress: Progress | None = None,
) -> int:
    """Sweep the families until the budget of this root is spent; returns new rows.

    The budget is the root's, not the run's: a resumed or repeated sweep spends what is left.
    """
    swept = known_families(names)
    facts = card_facts(root, device)
    gpu = facts["hardware"]["name"]
    moved = store.compact(root, facts)
    points = points_file(root, device, seed)
    for phase in phases(device, swept):
        left_s = budget_s * phase.share - spent_s(root, gpu, phase.families, phase.threads)
        if left_s < 1:
            continue
        label = f"t{phase.threads}-r{phase.ranks}"
        order = WorkerOrder(
            root=str(root),
            run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{label}",
            device=device,
            gpu=gpu,
            families=phase.families,
            threads=phase.threads,
            budget_s=left_s,
            seed=seed,
            ranks=phase.ranks,
            cache_bytes=facts["hardware"]["l2_bytes"],
            points=str(points),
        )
        run_worker(order, progress)
        moved += store.compact(root, facts)
    return moved


def known_families(names: Sequence[str] | None) -> tuple[str, ...]:
    """The families named, all where none is; ValueError for a name nobody knows."""
    known = families()
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown family {name!r}; known: {sorted(known)}")
    return tuple(names or known)


def card_facts(root: Path, device: str) -> dict[str, Any]:
    """What every card of this sweep says: machine, versions, day."""
    import torch  # lazy: cards can be read without torch

    gpu = measure_cpu() if device == "cpu" else cuda_gpu()
    earlier = store.read_hardware([root]).get(gpu.name)
    return {
        "what": "single-op times swept by itercast collect",
        "when": datetime.date.today().isoformat(),
        "licence": "Apache-2.0",
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__)},
        "hardware": (earlier or gpu).to_dict(),
    }


def cuda_gpu() -> Any:
    """The first CUDA device as a Gpu: from our hardware file, else from what torch tells."""
    import torch  # lazy: CPU sweeps must run where torch has no CUDA

    from microbench.hardware.cuda import gpu_of

    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available here; allowed: cpu")
    return gpu_of(torch.cuda.get_device_properties(0))


def run_worker(order: WorkerOrder, progress: Progress | None) -> None:
    """Run the process or the group of ranks; one that dies is started again while there is time."""
    begin = time.monotonic()
    process, restarts = start_worker(order), 0
    while True:
        time.sleep(0.2)
        elapsed_s = time.monotonic() - begin
        if progress:
            progress(count_lines(order), min(1.0, elapsed_s / order.budget_s))
        if process.poll() is None:
            continue
        if process.returncode == 0 or elapsed_s > order.budget_s - 2 or restarts == MAX_RESTARTS:
            return
        restarts += 1
        process = start_worker(order)


def start_worker(order: WorkerOrder) -> subprocess.Popen[bytes]:
    """A worker process, or a group of them; it reads its order from its argument."""
    return start_ranks("microbench.worker", asdict(order), order.ranks)


def count_lines(order: WorkerOrder) -> int:
    """Rows journalled so far."""
    journal = Path(order.root) / ".journal" / f"{order.run_id}.jsonl"
    return journal.read_bytes().count(b"\n") if journal.is_file() else 0
