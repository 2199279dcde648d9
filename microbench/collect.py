"""A sweep within a budget: workers measure points, the parent restarts and compacts."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from microbench import store
from microbench.contention import measure_contention
from microbench.hardware.machine import measure_cpu
from microbench.nvml import driver_version
from microbench.ops import families
from microbench.ranks import start_ranks
from microbench.zoo import check_points, points_file, points_path

Progress = Callable[[int, float], None]
MAX_RESTARTS = 20
STALLED_S = 120.0
REST = 0.05  # of a budget: not worth starting a worker for


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

    On GPUs: one of them on all families but collectives, then a rank on each of two, four, ... and
    all; several ``nodes`` do collectives only, on all. Shares of phases without a family go to the
    others.
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
        found = [Phase(families=single, threads=0, share=0.9 * (not nodes))]
        found += [
            Phase(families=together, threads=0, share=0.1 / len(groups), ranks=ranks)
            for ranks in groups
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
    torchrun: str = "",
    wanted: Path | None = None,
) -> int:
    """Sweep the families until the budget of this root is spent; returns new rows.

    ``wanted``: a file of points (``itercast points``); then these alone, in their order.

    The budget is the root's, not the run's: a resumed or repeated sweep spends what is left.
    ``torchrun``: arguments such as ``--nnodes=2 --rdzv-endpoint=host:29500``; the same sweep is
    then started on every node, and rows and budget are those of the node with rank 0.
    """
    swept = known_families(names)
    if wanted is not None:
        check_points(wanted)
    facts = card_facts(root, device)
    gpu = facts["hardware"]["name"]
    alone = device != "cpu" or "collective" not in swept or (os.cpu_count() or 1) == 1
    if not alone and not facts["hardware"]["contention"]:
        facts["hardware"]["contention"] = round(measure_contention(), 2)
    moved = store.compact(root, facts)
    points = wanted or captured_points_file(root, device, seed)
    for phase in phases(device, swept, bool(torchrun)):
        whole_s = budget_s * phase.share
        left_s = whole_s - spent_s(root, gpu, phase)
        if left_s < max(1.0, REST * whole_s) and not torchrun:  # other nodes wait for this one
            continue
        label = f"t{phase.threads}-r{phase.ranks}"
        order = WorkerOrder(
            root=str(root),
            run_id=f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{label}",
            device=device,
            gpu=gpu,
            families=phase.families,
            threads=phase.threads,
            budget_s=max(left_s, 1.0),
            seed=seed,
            ranks=phase.ranks,
            hardware=facts["hardware"],
            points=str(points),
            torchrun=torchrun,
            only=wanted is not None,
        )
        run_worker(order, progress)
        moved += store.compact(root, facts)
    return moved


def captured_points_file(root: Path, device: str, seed: int) -> Path:
    """Where captured points are; on a GPU box they are captured while the GPU is busy already."""
    if device == "cpu":
        return points_file(root, device, seed)
    threading.Thread(target=points_file, args=(root, device, seed), daemon=True).start()
    return points_path(root, device, seed)


def known_families(names: Sequence[str] | None) -> tuple[str, ...]:
    """The families named, all but those on demand where none is; ValueError for an unknown name."""
    known = families()
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown family {name!r}; known: {sorted(known)}")
    return tuple(names or (n for n, family in known.items() if not family.on_demand))


def card_facts(root: Path, device: str) -> dict[str, Any]:
    """What every card of this sweep says: machine, versions, day."""
    import torch  # lazy: cards can be read without torch

    gpu = measure_cpu() if device == "cpu" else cuda_gpu()
    earlier = store.read_hardware([root]).get(gpu.name)
    return {
        "what": "single-op times swept by itercast collect",
        "when": datetime.date.today().isoformat(),
        "licence": "Apache-2.0",
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__)}
        | (cuda_versions() if device == "cuda" else {}),
        "hardware": (earlier or gpu).to_dict(),
    }


def cuda_versions() -> dict[str, str]:
    """CUDA, cuDNN, NCCL, the GPU's identity and the commit, as far as they can be told."""
    import torch  # lazy, as above

    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu_uuid": torch.cuda.get_device_properties(0).uuid,
        "driver": driver_version(),
        "commit": commit,
    }
    return {name: str(value) for name, value in found.items() if value}


def cuda_gpu() -> Any:
    """The first CUDA device as a Gpu: from our hardware file, else from what torch tells."""
    import torch  # lazy: CPU sweeps must run where torch has no CUDA

    from microbench.hardware.cuda import gpu_of

    if not torch.cuda.is_available():
        raise ValueError("device 'cuda' is not available here; allowed: cpu")
    return gpu_of(torch.cuda.get_device_properties(0))


def run_worker(order: WorkerOrder, progress: Progress | None) -> None:
    """Run the process or the group of ranks; one that dies is started again while there is time.

    One that writes nothing for two minutes is killed: kernels can hang.
    """
    begin = grown = time.monotonic()
    process, restarts, rows = start_worker(order), 0, 0
    while True:
        time.sleep(0.2)
        now = time.monotonic()
        elapsed_s, found = now - begin, count_lines(order)
        if found > rows:
            rows, grown = found, now
        if progress:
            progress(rows, min(1.0, elapsed_s / order.budget_s))
        if process.poll() is None:
            if now - grown > STALLED_S and order.device == "cuda" and not order.together:
                process.kill()
            continue
        left_s = order.budget_s - elapsed_s
        if process.returncode == 0 or left_s < 2 or restarts == MAX_RESTARTS:
            return
        restarts, grown = restarts + 1, now
        process = start_worker(replace(order, budget_s=left_s))


def start_worker(order: WorkerOrder) -> subprocess.Popen[bytes]:
    """A worker process, or a group of them; it reads its order from its argument."""
    return start_ranks("microbench.worker", asdict(order), order.ranks, order.torchrun)


def count_lines(order: WorkerOrder) -> int:
    """Rows journalled so far."""
    journal = Path(order.root) / ".journal" / f"{order.run_id}.jsonl"
    return journal.read_bytes().count(b"\n") if journal.is_file() else 0
