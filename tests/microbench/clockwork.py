"""A device of clockwork and a family of points that do what they are told, for tests of sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from microbench.collect import WorkerOrder
from microbench.ops.family import Family, Workload

HARDWARE: dict[str, Any] = {
    "name": "toy",
    "peak_flops_per_s": {"fp32": 1e12},
    "l2_bytes": 1e6,
}


class Killed(BaseException):
    """Stands for a process that ends without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """``does``: ok, oom, big or huge (takes most memory), unsupported, sticky, late or kill."""

    number: int
    does: str = "ok"
    dtype: str = "fp32"


@dataclass
class Clockwork:
    """A queue with a clock: a run takes its number in us, 100 more after a flush."""

    name: str = "clockwork"
    arena_bytes: int = 1000
    waits: int = 0
    sticky: bool = False
    pending_error: bool = False
    resets: int = 0
    held: int = 0
    seen: list[str] = field(default_factory=list)
    reading: dict[str, Any] = field(default_factory=lambda: {"sm_clock_hz": 1e9})

    def settings(self, dtype: str) -> None:
        self.seen.append(dtype)

    def held_bytes(self) -> int:
        return self.held

    def launch(self, run: Callable[[], object]) -> tuple[float, Any]:
        return 5.0, run()

    def sample(self, run: Callable[[], object], cold: bool, launch_us: float) -> Any:
        took = run()
        took = took if isinstance(took, float) else 1.0
        return took + 100.0 if cold else took

    def elapsed_us(self, launched: Any) -> float:
        return float(launched)

    def wait(self) -> None:
        self.waits += 1
        if self.pending_error:
            self.sticky = True
        if self.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(self) -> bool:
        return self.sticky

    def kernels(self, runs: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
        return [[("toy_kernel", 2.0), ("toy_kernel", 3.0)] for _ in runs]

    def conditions(self) -> dict[str, Any]:
        return dict(self.reading)

    def reset(self) -> None:
        self.resets += 1


class Block:
    """Memory of the device, given back with the last reference."""

    def __init__(self, device: Clockwork, size: int) -> None:
        self.device, self.size = device, 0
        if device.held + size > device.arena_bytes:
            raise RuntimeError("CUDA out of memory")
        self.size = size
        device.held += size

    def __del__(self) -> None:
        self.device.held -= self.size


def toy_family(device: Clockwork, points: Sequence[Toy], name: str = "toy") -> Family:
    """The points, built on that device."""

    def build(p: Toy, where: str) -> Workload:
        assert where == device.name
        if p.does == "oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        block = Block(device, {"big": 600, "huge": 900}.get(p.does, 3))
        return Workload(run=lambda: act(p, block))

    def act(p: Toy, block: Block) -> float:
        if p.does == "unsupported":
            raise NotImplementedError("no kernel for this")
        if p.does == "sticky":
            device.sticky = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        if p.does == "late":
            device.pending_error = True
        if p.does == "kill":
            raise Killed
        return float(p.number)

    def sweep() -> Iterator[Toy]:
        yield from points

    return Family(
        name=name,
        params=Toy,
        sweep=sweep,
        build=build,
        flops=lambda p: 1.0,
        bytes_moved=lambda p: 1.0,
        features=lambda p, gpu: {},
        answers={},
    )


def order(root: Path, *names: str, budget_s: float = 60.0) -> WorkerOrder:
    """An order to sweep toy families."""
    return WorkerOrder(
        root=str(root),
        run_id="run",
        device="cpu",
        gpu="toy",
        families=names,
        threads=0,
        budget_s=budget_s,
        seed=0,
        ranks=1,
        hardware=HARDWARE,
        points=str(root / "none.json"),
    )
