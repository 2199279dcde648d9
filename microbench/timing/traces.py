"""Records and reads traces of torch.profiler: nested ops, kernels, and which op launched which."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from itercast.microbench.store import Facts

OPS = ("cpu_op", "Operator", "operator", "user_annotation")
KERNELS = ("kernel", "Kernel", "gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime")


@dataclass(frozen=True, slots=True)
class Span:
    """An op or a launch on the host; ``external`` is the id that joins them, or -1."""

    name: str
    thread: str
    start_us: float
    duration_us: float
    external: int
    args: Facts


class Kernel(NamedTuple):
    """A kernel, copy or fill; ``correlation`` is the id of its launch, or -1."""

    name: str
    duration_us: float
    external: int
    correlation: int


@dataclass(slots=True)
class Trace:
    """Events of a trace by kind; launches by correlation id."""

    device: str = ""
    cuda: str = ""
    distributed: Facts = field(default_factory=dict)
    ops: list[Span] = field(default_factory=list)
    launches: dict[int, Span] = field(default_factory=dict)
    kernels: list[Kernel] = field(default_factory=list)
    malformed: int = 0


def record(run: Callable[[], object], *, on_gpu: bool, shapes: bool = False) -> Trace:
    """Profile a run; ``shapes``: ops have those of their inputs."""
    from torch import profiler  # lazy: traces are read where torch is absent

    kinds = [profiler.ProfilerActivity.CPU]
    kinds += [profiler.ProfilerActivity.CUDA] if on_gpu else []
    with profiler.profile(activities=kinds, record_shapes=shapes) as session:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        session.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text(errors="replace")))


def parse(document: Any) -> Trace:
    """Parse a Chrome trace, whoever wrote it; ValueError where it is none."""
    events = document.get("traceEvents") if isinstance(document, Mapping) else None
    if not isinstance(events, list):
        raise ValueError("no list of traceEvents")
    trace = Trace(cuda=_text(document.get("cuda_runtime_version")))
    devices = document.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    trace.device = _text(first.get("name")) if isinstance(first, Mapping) else ""
    ranks = document.get("distributedInfo")
    trace.distributed = ranks if isinstance(ranks, Mapping) else {}
    for event in events:
        _event(trace, event)
    if not trace.ops and not trace.kernels:
        raise ValueError("no ops and no kernels in the trace")
    return trace


def _event(trace: Trace, event: Any) -> None:
    """Add one event to its kind; malformed events are counted."""
    if not isinstance(event, Mapping):
        trace.malformed += 1
        return
    kind = event.get("cat")
    if event.get("ph") != "X" or not isinstance(kind, str):
        return
    if kind not in OPS and kind not in KERNELS and kind not in LAUNCHES:
        return
    args = event.get("args") or {}
    start, duration = event.get("ts"), event.get("dur", 0)
    numbers = all(isinstance(v, int | float) and abs(v) < 1e18 for v in (start, duration))
    if not isinstance(args, Mapping) or not numbers or duration < 0:
        trace.malformed += 1
        return
    external, correlation = _identity(args, "External id"), _identity(args, "correlation")
    name = _text(event.get("name"))
    if kind in KERNELS:
        trace.kernels.append(Kernel(name, float(duration), external, correlation))
        return
    thread = f"{_text(event.get('pid'))}/{_text(event.get('tid'))}"
    span = Span(name, thread, float(start), float(duration), external, args)  # type: ignore[arg-type]
    if kind in OPS:
        trace.ops.append(span)
    elif correlation >= 0:
        trace.launches[correlation] = span


def _text(value: Any) -> str:
    """Text or a number as text; empty for other values."""
    return str(value) if isinstance(value, str | int | float) else ""


def _identity(args: Facts, key: str) -> int:
    """A positive id of this name, also in lower case; -1 without one."""
    value = args.get(key, args.get(key.lower()))
    return value if isinstance(value, int) and value > 0 else -1


def join(trace: Trace, owns: Callable[[str], bool]) -> tuple[dict[int, float], int]:
    """Assigns kernels to ops: kernel time by index of the op, and the number of unassigned kernels.

    A kernel belongs to the op with its external id, or with that of its launch, or to the innermost
    op around its launch. Where several nested ops surround it, the outermost one for which ``owns``
    is true gets the time; the innermost if ``owns`` is true for none.
    """
    owner = _owners(trace, owns)
    by_external = {op.external: index for index, op in enumerate(trace.ops) if op.external >= 0}
    inside = _innermost(trace)
    total: dict[int, float] = defaultdict(float)
    orphans = 0
    for kernel in trace.kernels:
        launch = trace.launches.get(kernel.correlation)
        index = by_external.get(kernel.external)
        if index is None and launch is not None:
            index = by_external.get(launch.external, inside.get(kernel.correlation))
        if index is None:
            orphans += 1
        else:
            total[owner[index]] += kernel.duration_us
    return dict(total), orphans


def host_times(trace: Trace, owns: Callable[[str], bool]) -> dict[int, float]:
    """Time on the host, by index, of each outermost op for which ``owns`` is true."""
    owner = _owners(trace, owns)
    return {
        index: op.duration_us
        for index, op in enumerate(trace.ops)
        if owner[index] == index and owns(op.name) and op.duration_us > 0
    }


def _nested(spans: list[tuple[int, Span]]) -> list[tuple[int, int]]:
    """(index of a span, index of the innermost span around it or -1), by thread and start."""
    pairs = []
    open_spans: list[tuple[int, float, str]] = []
    order = sorted(spans, key=lambda s: (s[1].thread, s[1].start_us, -s[1].duration_us))
    for index, span in order:
        while open_spans and (
            open_spans[-1][2] != span.thread or open_spans[-1][1] <= span.start_us
        ):
            open_spans.pop()
        pairs.append((index, open_spans[-1][0] if open_spans else -1))
        open_spans.append((index, span.start_us + span.duration_us, span.thread))
    return pairs


def _owners(trace: Trace, owns: Callable[[str], bool]) -> list[int]:
    """For every op, the index of the op that gets the time of its kernels."""
    owner = list(range(len(trace.ops)))
    for index, outer in _nested(list(enumerate(trace.ops))):
        if outer >= 0 and owns(trace.ops[owner[outer]].name):
            owner[index] = owner[outer]
    return owner


def _innermost(trace: Trace) -> dict[int, int]:
    """By correlation id, the index of the innermost op around each launch without external id."""
    count = len(trace.ops)
    lacking = [(c, s) for c, s in trace.launches.items() if s.external < 0]
    if not lacking:
        return {}
    spans = [*enumerate(trace.ops), *((count + i, s) for i, (_, s) in enumerate(lacking))]
    parents = dict(_nested(spans))
    innermost = {}
    for i, (correlation, _) in enumerate(lacking):
        index = parents[count + i]
        while index >= count:
            index = parents[index]
        if index >= 0:
            innermost[correlation] = index
    return innermost
