"""Runs the chunks of a plan as Ray tasks, again where a task or its node died, until a deadline.

Tasks get and return JSON as bytes, which Ray carries without pickling. This process loads nothing
from the cluster but those bytes; a task that failed is reported in one line.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from itercast.extras.fleet.chunk import DONE, LATE, REFUSED, THROTTLED, ChunkOrder
from itercast.extras.fleet.chunks import HOST, TOGETHER, Chunk, Plain, gpus_of
from itercast.extras.fleet.plan import FleetPlan, Machines
from itercast.extras.fleet.task import begun_chunks, over_nodes, run_chunk
from itercast.extras.roots.urls import OF_ROOT, Root, send_cards
from itercast.microbench.store import Row

log = logging.getLogger(__name__)
LOCAL = "local"  # address: a cluster of this machine alone, started and ended with the plan
MAX_TRIES = 6  # of a chunk whose task or node died
POLL_S = 0.5
ASK_S = 30.0  # for what nodes have begun
LATE_S = 90.0  # after the deadline; tasks end themselves before it
NODE_DIED = "Ray's node on this machine died; the same command continues the plan"
OnEnd = Callable[[Chunk, Plain], None]


def with_ray() -> Any:
    """The module ray; ValueError says what to install. It prints nothing of dead nodes."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # else their logs; we say it in a line
    try:
        import ray  # lazy: all else works without it
    except ImportError as exc:
        raise ValueError("this needs Ray: pip install 'itercast[fleet]'") from exc
    return ray


@contextmanager
def connected(address: str, resources: Mapping[str, float] = MappingProxyType({})) -> Iterator[Any]:
    """Ray's module, connected to a cluster: ``auto``, an address, or one made here (``local``).

    The local one listens on 127.0.0.1 only, and has these custom ``resources``. ValueError where no
    cluster answers.
    """
    ray = with_ray()
    options: Row = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == LOCAL:
        options |= {"address": "local", "include_dashboard": False, "resources": dict(resources)}
        options |= {"_node_ip_address": "127.0.0.1", "_system_config": {"worker_niceness": 0}}
    else:
        options |= {"address": address}
    try:
        ray.init(**options)
    except Exception as exc:  # of many kinds
        reason = " ".join(str(exc).split())[:200]
        raise ValueError(f"address {address!r}: no Ray cluster there ({reason})") from exc
    try:
        yield ray
    finally:
        ray.shutdown()


@dataclass(slots=True, kw_only=True)
class Waiting:
    """A chunk to measure; ``tries``: how often its task died.

    ``moved``: it was on another machine before; ``avoid``: nodes that it must not go to.
    """

    chunk: Chunk
    tries: int = 0
    moved: bool = False
    avoid: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Driver:
    """One run of a plan: chunks that wait, tasks that run; ``on_end`` gets each result."""

    plan: FleetPlan
    ray: Any
    on_end: OnEnd
    until: float
    waiting: dict[str, deque[Waiting]] = field(default_factory=dict)
    running: dict[Any, Waiting] = field(default_factory=dict)
    begun: dict[str, str] = field(default_factory=dict)  # node that has a chunk's journal

    def run(self, chunks: Sequence[Chunk]) -> Counter[str]:
        """Measure the chunks; returns how many ended in which state."""
        for chunk in chunks:
            self.waiting.setdefault(chunk.machines, deque()).append(Waiting(chunk=chunk))
        ends: Counter[str] = Counter()
        self._ask_nodes()
        try:
            while any(self.waiting.values()) or self.running:
                if time.time() > self.until + LATE_S:
                    break
                self._start()
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_S)
                for task in done:
                    ends[self._take_result(self.running.pop(task), task)] += 1
        finally:
            for task in self.running:
                self.ray.cancel(task, force=True)
        left = [*self.running.values(), *(w for entries in self.waiting.values() for w in entries)]
        for waiting_chunk in left:
            self.on_end(waiting_chunk.chunk, {"state": LATE, "reason": "the deadline has passed"})
        ends += Counter({LATE: len(left)})  # without zeros
        del ends[""]
        return ends

    def _ask_nodes(self) -> None:
        """Ask which nodes have begun chunks, so that these chunks continue there."""
        ask = self.ray.remote(begun_chunks)
        node_of_task = {}
        for node in self._alive():
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": self._on(node)}
            node_of_task[ask.options(**options).remote()] = node
        answered, _ = self.ray.wait(
            list(node_of_task), num_returns=len(node_of_task), timeout=ASK_S
        )
        for task in answered:
            try:
                self.begun |= dict.fromkeys(json.loads(self.ray.get(task)), node_of_task[task])
            except self.ray.exceptions.RayError:  # the node died just now
                continue

    def _alive(self) -> list[str]:
        return [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]

    def _on(self, node: str) -> Any:
        """Ray's strategy for a task on this node, or on another one where it is gone."""
        return self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)

    def _start(self) -> None:
        """Start tasks where a machine of their kind is free."""
        for kind in self.plan.machines:
            waiting = self.waiting.get(kind.name, deque())
            chunks = (w.chunk for w in self.running.values() if w.chunk.machines == kind.name)
            used = sum(gpus_of(kind, chunk) for chunk in chunks)
            while waiting and (not used or used + gpus_of(kind, waiting[0].chunk) <= kind.count):
                entry = waiting.popleft()
                used += gpus_of(kind, entry.chunk)
                self.running[self._task(kind, entry)] = entry

    def _task(self, kind: Machines, entry: Waiting) -> Any:
        """The Ray task of a chunk."""
        chunk = entry.chunk
        order = ChunkOrder(
            chunk=chunk,
            root=self.plan.root,
            work="",
            gpu=kind.gpu,
            cores=kind.cores,
            until=self.until,
            last=entry.moved,
        )
        plain = {**asdict(order), "python": kind.python}
        options = task_options(kind, chunk)
        if chunk.kind == TOGETHER and kind.nodes > 1:
            request = {"order": plain, "options": options, "nodes": kind.nodes}
            lead = self.ray.remote(over_nodes).options(num_cpus=0, max_retries=0)
            return lead.remote(json.dumps(request).encode())
        if entry.avoid:
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(entry.avoid)})"}
        elif chunk.name in self.begun:
            options["scheduling_strategy"] = self._on(self.begun[chunk.name])
        task = self.ray.remote(run_chunk).options(**options)
        return task.remote(json.dumps(plain).encode())

    def _take_result(self, entry: Waiting, task: Any) -> str:
        """Handle a finished task; returns the chunk's state, '' where it is to be measured again.

        OSError where this machine's own part of Ray has died.
        """
        chunk = entry.chunk
        try:
            result: Plain = json.loads(self.ray.get(task))
        except self.ray.exceptions.LocalRayletDiedError as exc:  # nothing can run any more
            raise OSError(NODE_DIED) from exc
        except self.ray.exceptions.RayError as exc:
            result = {"state": "failed", "reason": f"{type(exc).__name__}: its task or node died"}
        state = result["state"]
        retry = ""
        if state in (REFUSED, THROTTLED) and not entry.moved:
            node, alive = result.get("node", ""), self._alive()
            avoided = (node,) if node in alive and len(alive) > 1 else ()
            entry.moved, entry.avoid = True, avoided
            retry = "goes elsewhere"
        elif state == "failed" and entry.tries < MAX_TRIES and time.time() < self.until:
            entry.tries += 1
            retry = "is tried again"
            self._ask_nodes()
        if retry:
            log.warning("%s %s %s: %s", chunk.machines, chunk.name, retry, result.get("reason"))
            self.waiting[chunk.machines].appendleft(entry)
            return ""
        self.on_end(chunk, result)
        return str(state)


def task_options(kind: Machines, chunk: Chunk) -> Row:
    """Ray's options for the task of a chunk: CPUs and GPUs of one node, custom resources.

    Ray repeats no task: the driver does.
    """
    all_cores = kind.device == "cpu" or chunk.kind == HOST
    gpus = kind.gpus_per_node if chunk.kind == TOGETHER else 1
    options: Row = {
        "num_cpus": kind.cores if all_cores else 1,
        "num_gpus": 0 if kind.device == "cpu" else gpus,
        "resources": dict(kind.resources),
        "max_retries": 0,
    }
    if kind.accelerator:
        options["accelerator_type"] = kind.accelerator
    if kind.image:
        options["runtime_env"] = {"image_uri": kind.image}
    return options


def run_fleet(
    plan: FleetPlan, chunks: Sequence[Chunk], address: str, on_end: OnEnd
) -> Counter[str]:
    """Measure the chunks of a plan whose results are not in its folder or bucket yet.

    Returns how many chunks ended in which state; ``on_end`` is called with each and its result. In
    the end, after errors too, a summary (card.yaml) of what was measured is written there.
    """
    named = {k: v * m.count for m in plan.machines for k, v in m.resources.items()}
    with connected(address, named) as ray:
        until = time.time() + plan.deadline_s
        try:
            return Driver(plan=plan, ray=ray, on_end=on_end, until=until).run(chunks)
        finally:
            write_cards(plan.root)


def write_cards(where: str) -> None:
    """Write the cards of all finished chunks, also of those of a run that was killed."""
    names = Root(where).names()
    done = {Path(n).stem for n in names if n.startswith(".fleet/")}
    parts = {n for n in names if OF_ROOT.fullmatch(n) and n.endswith(".parquet")}
    folders = {n.rpartition("/")[0] for n in parts if Path(n).stem.removeprefix("part-") in done}
    if folders:
        send_cards(where, folders)


def results(plan: FleetPlan) -> dict[str, Plain]:
    """Results of finished chunks by name, as the root has them."""
    root = Root(plan.root)
    names = {n for n in root.names(".fleet") if n.endswith(".json") and n.count("/") == 1}
    results_by_chunk = {}
    for name in sorted(names):
        result = json.loads(root.get(name))
        if isinstance(result, dict) and result.get("state") == DONE:
            results_by_chunk[Path(name).stem] = result
    return results_by_chunk
