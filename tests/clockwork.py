"""A device of clockwork and a family of points that do what they are told, for tests of sweeps."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from itercast.microbench.iterations import measure
from itercast.microbench.ops.family import Family, Workload
from itercast.microbench.sweep.orders import WorkerOrder
from itercast.microbench.timing.cuda_device import Launched

HARDWARE: dict[str, Any] = {"name": "toy", "peak_flops_per_s": {"fp32": 1e12}, "l2_bytes": 1e6}


class Killed(BaseException):
    """Stands for a process that ends without a word."""


EMPTY_US = 1.5  # between two events
TINY_US = 2.0
GAP_US = 0.5  # between two tiny kernels in a row
HOST_US = 5.0  # to launch anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """``does``: ok, or what goes wrong.

    oom, big or huge (takes most memory), unsupported, sticky (the device breaks), late (it shows at
    the next wait), kill, poison (kills when a tiny kernel runs after it), slow (starves behind
    sleeps for less than 20 us), starved (always), synchronises.
    """

    number: int
    does: str = "ok"
    dtype: str = "fp32"


@dataclass
class Clockwork:
    """A queue with a clock: a run takes its number in us, 100 more after a flush.

    ``sleeps_us`` are the sleeps before samples of toys, ``profiled`` the dtypes that were set when
    runs were profiled, ``profiler`` what it does: ok, kill or sticky.
    """

    name: str = "clockwork"
    arena_bytes: int = 1000
    waits: int = 0
    sticky: bool = False
    pending_error: bool = False
    poisoned: bool = False
    profiler: str = "ok"
    resets: int = 0
    held: int = 0
    in_a_row: int = 0
    running: Toy | None = None
    set: str = ""
    launched: list[int] = field(default_factory=list)
    sleeps_us: list[float] = field(default_factory=list)
    profiled: list[tuple[str, str]] = field(default_factory=list)
    reading: dict[str, Any] = field(default_factory=lambda: {"sm_clock_hz": 1e9})

    def settings(self, dtype: str) -> None:
        self.set = dtype

    def allocated_bytes(self) -> int:
        return self.held

    def tiny(self) -> None:
        if self.poisoned:
            raise Killed
        self.in_a_row += 1

    def _took_us(self, run: Callable[[], object]) -> float:
        self.running, self.in_a_row = None, 0
        took = run()
        row_us = self.in_a_row * TINY_US + max(0, self.in_a_row - 1) * GAP_US
        return EMPTY_US + row_us + (took if isinstance(took, float) else 0.0)

    def _does(self, does: str) -> bool:
        return self.running is not None and self.running.does == does

    def launch(self, run: Callable[[], object], behind_us: float = 0.0) -> Launched:
        took_us = self._took_us(run)
        if self.running:
            self.launched.append(self.running.number)
        blocked_us = behind_us + took_us if self._does("synchronises") else 0.0
        return Launched(events=took_us, host_us=HOST_US + blocked_us, starved=False)

    def sample(self, run: Callable[[], object], cold: bool, host_us: float) -> Launched:
        took_us = self._took_us(run)
        if self.running:
            self.sleeps_us.append(host_us)
        starved = self._does("synchronises") or self._does("starved")
        if self._does("slow") and host_us < 20:
            starved, took_us = True, took_us + 50
        return Launched(events=took_us + 100 * cold, host_us=HOST_US, starved=starved)

    def elapsed_us(self, launched: Launched) -> float:
        if self.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return float(launched.events)

    def wait(self) -> None:
        self.waits += 1
        if self.pending_error:
            self.sticky = True
        if self.sticky:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def broken(self) -> bool:
        return self.sticky

    def kernels(self, runs: Sequence[Callable[[], object]]) -> list[list[tuple[str, float]]]:
        if self.profiler == "kill":
            raise Killed
        for run in runs:
            run()
            self.profiled.append((self.running.dtype if self.running else "", self.set))
        self.sticky = self.profiler == "sticky"
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
        device.running = p
        if p.does == "unsupported":
            raise NotImplementedError("no kernel for this")
        if p.does == "sticky":
            device.sticky = True
            raise RuntimeError("CUDA error: device-side assert triggered")
        if p.does == "late":
            device.pending_error = True
        if p.does == "kill":
            raise Killed
        if p.does == "poison":
            device.poisoned = True
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


def order(
    root: Path, *names: str, budget_s: float = 60.0, run_id: str = "run", begin_s: float = 0.0
) -> WorkerOrder:
    """An order to sweep toy families."""
    return WorkerOrder(
        root=str(root),
        run_id=run_id,
        device="cpu",
        gpu="toy",
        families=names,
        threads=0,
        budget_s=budget_s,
        seed=0,
        ranks=1,
        hardware=HARDWARE,
        points=str(root / "none.json"),
        begin_s=begin_s,
    )


def ticking(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The clock of iterations; it advances by 0.1 s whenever it is read. Its ``ns`` can be set."""
    clock = {"ns": 0}

    def read() -> int:
        clock["ns"] += 10**8
        return clock["ns"]

    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter_ns=read))
    return clock


def event(cat: str, ts: float, dur: float, name: str = "x", **args: Any) -> dict[str, Any]:
    """A slice of a profiler's trace, ``dur`` us long."""
    return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "args": args}
