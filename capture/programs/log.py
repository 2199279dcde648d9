"""Logs one rank's op calls, collectives and waits in the order in which a program launches them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from traceback import StackSummary, extract_stack
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from itercast.capture.collectives import (
    CollectiveCall,
    by_name,
    collective_of,
    in_parts,
    is_collective,
    tensors_in,
)
from itercast.capture.opcall import OpCall, changed
from itercast.capture.programs.gpus.devices import GpuMemory, parts
from itercast.capture.programs.kernels.fused import FUSED_ATTENTION, log_attention
from itercast.capture.programs.kernels.libraries import as_of_torch, without_outliers
from itercast.capture.programs.program import (
    BATCH,
    COLLECTIVE,
    FIRST_GROUP_STREAM,
    HOST,
    HOST_COPY,
    HOST_WAIT,
    ON_CPU,
    RECORD,
    WAIT,
)
from itercast.capture.recorder.autocast import in_tf32
from itercast.capture.recorder.facts import note_message
from itercast.capture.recorder.fake import asked_of, below_transforms
from itercast.capture.recorder.log import DTYPES, SILENT, OpLog
from itercast.capture.recorder.replaced.remembered import is_plain, view_of, views_one
from itercast.capture.recorder.routing import Routing
from itercast.capture.recorder.sparse import values_of
from itercast.capture.recorder.watch import MadeBy

TORCHS = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler", "quantized")
COPY = "aten.copy_.default"
EAGER_PYTHON = ("module_call", "view_op", "autograd_node")  # host events of ops run one by one
LOSS = (torch.ops.aten._log_softmax.default,)  # of logits cut by vocabulary
COPIES = (
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
)
WAITED = torch.ops._c10d_functional.wait_tensor.default  # returns what it is given
FROM_ONE = ("broadcast", "scatter")  # messages in which one rank has what others get


class ProgramLog(OpLog):
    """Logs a program's launches; ``live_bytes`` is the memory of tensors that are alive.

    ``peak_bytes`` and ``least_bytes``: the most and the least that it was since the last ``reset``,
    ``graph_bytes``: what CUDA graphs keep of it that was free again at the end of their capture.
    ``measuring``: objects whose ``highest_bytes`` is kept up to date. ``repeats``: some passes that
    are like others are repeated in the log and not run.
    """

    routing: Routing

    def __init__(self, *, repeats: bool = True) -> None:
        self.repeats = repeats
        self.guesses: dict[str, StackSummary] = {}  # what was guessed of data, where it was first
        super().__init__(Routing(self.guesses), in_tf32)
        self.after_graph: list[Callable[[], None]] | None = None  # while a CUDA graph is captured
        self.ended: Callable[[str, Any], None] = lambda kind, owner: None  # called: may be a step
        self.ran: Any = None  # what a model whose forward ends was given, and returned
        self.gpu_memory = GpuMemory(lambda: self.stream)
        self.host_memory, self.reads_copies = GpuMemory(), False  # what a program keeps there
        self.loaded = GpuMemory()  # batches of DataLoaders
        self.recomputing, self.points, self.updates = False, count(), 0  # ``updates``: optimizers'
        self.live_bytes = self.peak_bytes = self.least_bytes = self.graph_bytes = 0
        self.measuring = list[Any]()
        self.grouped = False  # whether the program made a process group
        self.over = False  # what is freed when all steps are over is not of the last one
        self._awaiting: set[int] = set()  # memory of parameters that a backward pass reached
        self._group_streams: dict[Any, int] = {}
        self.arrives: dict[int, int] = {}  # storage -> point at which a collective has filled it
        self.sizes: dict[int, int] = {}  # storage's number -> bytes, while it is alive
        self.numbers = count()
        self.last_work: int | None = None  # point of the last collective that was not blocking
        self.compiled, self.compiled_calls = MadeBy(), count(1)  # of compiled functions
        self._eager: set[int] = set()  # calls whose ops are not fused
        self._graphed: set[int] = set()  # calls that launch a CUDA graph in each phase
        self.foreach_event: tuple[str, int] | None = None  # of an update of lists of DTensors

    def reset(self) -> None:
        """Forget the launches so far; memory in use stays counted."""
        super().reset()
        self.peak_bytes = self.least_bytes = self.live_bytes
        self.arrives = {}

    def storage(self, tensor: Any, number: int | None = None) -> int:
        """The number of the memory behind a tensor, whose bytes count until it is freed.

        For a sparse tensor it is the memory of its values; on the meta device it has no bytes.
        ``number``: to use for new memory, instead of the next free number.
        """
        memory = values_of(tensor).untyped_storage()
        key = memory._cdata
        if key not in self._storages:
            self._storages[key] = next(self.numbers) if number is None else number
            weakref.finalize(memory, self._freed, key)
            self.resized(key, memory.nbytes() if parts(tensor) else 0)
        return self._storages[key]

    def resized(self, key: int, nbytes: int) -> None:
        """Count the bytes of a storage that was made or resized."""
        if key not in self._storages:
            return
        number = self._storages[key]
        self.take(nbytes - self.sizes.get(number, 0))
        self.sizes[number] = nbytes

    def take(self, nbytes: int, extra_bytes: int = 0) -> None:
        """Count bytes taken, or given back where negative; ``extra_bytes``: more, meanwhile."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + extra_bytes)
        self.least_bytes = min(self.least_bytes, self.live_bytes)
        for meter in self.measuring:
            meter.highest_bytes = max(meter.highest_bytes, self.live_bytes + extra_bytes)

    def _freed(self, key: int) -> None:
        """Forget a storage whose last tensor is gone."""
        number = self._storages.pop(key)
        self.live_bytes -= self.sizes.pop(number, 0)
        if not self.over:
            self.least_bytes = min(self.least_bytes, self.live_bytes)
        self.arrives.pop(number, None)

    def _alias(self, tensor: Any, result: Any) -> None:
        """Do nothing: autograd's sums keep memory of their own here, until they are freed."""

    def record(self, stream: int) -> int:
        """Number the point that a stream has reached."""
        point = next(self.points)
        self._mark(RECORD, point, stream)
        return point

    def wait(self, stream: int, point: int) -> None:
        """Let a stream wait for a point of another one."""
        self._mark(WAIT, point, stream)

    def host_wait(self, point: int) -> None:
        """Let the host wait for a point."""
        self._mark(HOST_WAIT, point, self.stream)

    def batch(self) -> None:
        """Let the host take a batch from a DataLoader."""
        self._mark(BATCH, (), self.stream)

    def copied(self, way: str, tensor: Any, *, non_blocking: bool = False) -> None:
        """Log a copy to the GPU ("h2d") or to host memory ("d2h"), for which the host waits."""
        self._mark(HOST_COPY, (way, tensor.numel() * tensor.element_size()), self.stream)
        if not non_blocking:
            self.host_wait(self.record(self.stream))

    def keep_on_host(self, tensor: Any) -> None:
        """Keep a tensor in host memory: it takes none of the GPU's, ops on it are the CPU's."""
        self.storage(tensor)
        self.host_memory.add(tensor)
        self.gpu_memory.remove(tensor)
        self.resized(tensor.untyped_storage()._cdata, 0)

    @contextmanager
    def reading_copies(self) -> Iterator[None]:
        """Let ops inside read copies on the GPU of tensors in host memory, not run on the CPU."""
        before, self.reads_copies = self.reads_copies, True
        try:
            yield
        finally:
            self.reads_copies = before

    def read_by_host(self, tensor: Any) -> None:
        """Log that the host reads numbers, for which it waits unless they are in its memory."""
        if not self.host_memory.holds(tensor):
            super().read_by_host(tensor)

    def python(self, event: str, tensors: int = 1) -> None:
        """Log Python of a parallel wrapper that no op stands for."""
        self.calls.append(
            OpCall(op=HOST, args=(event, tensors), phase=self.phase, stream=self.stream)
        )

    @contextmanager
    def whole(self, *, fused: bool = True, graphed: bool = False) -> Iterator[None]:
        """Log the ops inside, and those of their backward, as one call of a compiled function.

        The compiled function launches the kernels, so that host events of modules, views and
        autograd inside are not counted. ``graphed``: it launches one CUDA graph for each phase. Not
        ``fused``: a CUDA graph without a compiler, whose ops stay kernels of their own.
        """
        if self.compiled.running:
            yield
            return
        number = next(self.compiled_calls)
        counted = dict(self.host)
        self._eager |= set() if fused else {number}
        self._graphed |= {number} if graphed else set()
        try:
            with self.compiled.stretch(number):
                yield
        finally:
            passes = 2 if torch.is_grad_enabled() else 1
            self.host |= {name: counted[name] for name in EAGER_PYTHON}
            if fused:
                event = "graphed_call" if graphed else "compiled_call"
                self.host[event] = self.host.get(event, 0) + passes

    def add(self, op: str, args: Any, kwargs: Any, output: Any) -> None:
        """Log one call: a copy, work of the CPU (on tensors in host memory), or the GPU's."""
        reads_host = self.host_memory and not self.reads_copies
        tensors = tensors_in((args, kwargs)) if reads_host else []
        on_host = list(map(self.host_memory.holds, tensors))
        if op == COPY and any(on_host) and any(map(self.gpu_memory.holds, tensors)):
            non_blocking = bool(args[2:] or kwargs.get("non_blocking"))
            self.copied("d2h" if on_host[0] else "h2d", args[0], non_blocking=non_blocking)
            return
        super().add(op, args, kwargs, output)
        if self.recomputing:
            self.calls[-1] = replace(self.calls[-1], recomputed=True)
        if any(on_host) and not any(t.dim() and self.gpu_memory.holds(t) for t in tensors):
            self.calls[-1] = replace(self.calls[-1], stream=ON_CPU)
            for result in tensors_in(output):
                self.keep_on_host(result)
        self._note_compiled()

    def _note_compiled(self) -> None:
        """Note in the last call which call of a compiled function it belongs to, if to one."""
        if number := self.compiled.number():
            compiled = 0 if number in self._eager else number
            graph = 2 * number + (self.phase == "backward") if number in self._graphed else 0
            self.calls[-1] = replace(self.calls[-1], compiled=compiled, graphed=graph)

    def awaits_update(self, parameters: Iterable[Any]) -> None:
        """Take the next write to one of these parameters, made outside modules, backward and
        optimizers, as an update that the program makes by hand.
        """
        leaves = (getattr(p, "_local_tensor", p) for p in parameters if p.is_leaf)
        self._awaiting = {below_transforms(p).untyped_storage()._cdata for p in leaves}

    def _updates(self, func: Any, written: Any) -> bool:
        """Whether an op is the first of an update that a program makes by hand."""
        if self.phase != "forward" or self.module or not func._schema.is_mutable:
            return False
        memory = (t.untyped_storage()._cdata for t in tree_leaves(written) if type(t) is FakeTensor)
        return not self._awaiting.isdisjoint(memory)

    def _mark(self, op: str, value: Any, stream: int) -> None:
        """Log one of ``MARKS``, with a value or a tuple of values."""
        args = value if isinstance(value, tuple) else (value,)
        self.calls.append(OpCall(op=op, args=args, phase=self.phase, stream=stream))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and log an op below autograd; views and questions about tensors take short cuts."""
        if func.namespace == "prim" and not any(map(is_traceable_wrapper_subclass_type, types)):
            return asked_of(func, args, kwargs or {})
        if views_one(func) and is_plain(args[0], self.routing.facts):
            if func._schema.name not in SILENT:
                self.count_view()
            return view_of(func, args, kwargs or {})
        if self._awaiting and self._updates(func, args[:1]):
            self._awaiting = set()
            self.ended("update", None)
        output = self._dispatched(func, types, args, kwargs)
        if output is not NotImplemented and func.namespace != "prim":
            with torch._C.DisableTorchFunction():  # modes that watch a program slow questions down
                if not (self.host_memory and any(map(self.host_memory.holds, tensors_in(output)))):
                    self.gpu_memory.follow(args, output)
                if func in COPIES:
                    self.loaded.follow(args, output)
        return output

    def count_view(self, *, views: int = 1) -> None:
        """Count a view; in backward of a compiled function there are none."""
        super().count_view(views=0 if self.compiled.number() else views)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, and log it as torch's own, FSDP's, a library's, or a message."""
        if any(map(is_traceable_wrapper_subclass_type, types)):
            self._count_dispatch(func, types)
            return NotImplemented  # DTensor and others call us again with what they wrap
        kwargs = kwargs or {}
        if func.namespace == "fsdp":
            return self._copied(func, args, kwargs)
        log_foreign = None if func.namespace in TORCHS else as_of_torch(func)
        if log_foreign:
            arguments = by_name(func, args, kwargs)
            output = without_outliers(func, arguments)
            guess = log_foreign(self, arguments, output)
            self.guesses.setdefault(guess.format(func.namespace), extract_stack())
            return output
        if not is_collective(func) and func not in FUSED_ATTENTION:
            return super().__torch_dispatch__(func, types, args, kwargs)
        output = func(*args, **kwargs)
        if func in FUSED_ATTENTION:
            log_attention(self, func, args, kwargs, output)
            return output
        call = collective_of(func, args, kwargs, output)
        if call is None:  # ``wait_tensor`` and other helpers send nothing
            self._wait_until_filled(args[:1])
            output = args[0] if func is WAITED else output
        else:
            self._launch(call)
        note_message(self.routing and self.routing.facts, func, args, kwargs, output)
        return output

    def _count_dispatch(self, func: Any, types: Any) -> None:
        """Log the Python of an op on tensors that wrap others, as DTensor does.

        Compiled functions and nested tensors have none. An optimizer's update of a list of tensors
        is one event over all of them; an update in a loop is one for each op.
        """
        updates = self.phase == "optimizer"
        if updates and func.__name__.startswith(("_foreach_", "_fused_")):
            if self.foreach_event is not None:
                self.python(*self.foreach_event)
            self.foreach_event = None
        elif updates:
            self.python("dtensor_update")
        elif not self.compiled.number() and NestedTensor not in types:
            self.python("tp_loss" if func in LOSS else "dtensor_op")

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one of FSDP's copies into or out of its buffer, and log it as one kernel.

        ``of``, in the logged call: empty views of the parts, so that the call touches their memory
        but counts bytes once. FSDP's hooks are never compiled: no compiled function has the call.
        """
        output = func(*args, **kwargs)
        tensors = tensors_in((args[0], kwargs))
        is_copy_in = func is torch.ops.fsdp.all_gather_copy_in.default
        buffer = output[0] if is_copy_in else max(tensors, key=torch.Tensor.numel)
        super().add(COPY, (buffer, buffer), {"of": [t for t in tensors if t is not buffer]}, buffer)
        call = self.calls[-1]  # views of specs, as those of fake tensors take far longer
        of = tuple(changed(spec, shape=(0,), stride=(1,)) for spec in call.kwargs["of"])
        self.calls[-1] = changed(call, kwargs={"of": of})
        return output

    def _wait_until_filled(self, tensors: Any) -> None:
        """Let the current stream wait for the collective that fills a tensor, if one still does."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                point = self.arrives.pop(self.storage(tensor), None)
                if point is not None:
                    self.wait(self.stream, point)

    def stream_of(self, queue: Any) -> int:
        """The number of the stream of a queue: a group's collectives, or callbacks after them."""
        return self._group_streams.setdefault(queue, len(self._group_streams) + FIRST_GROUP_STREAM)

    def _launch(self, call: CollectiveCall) -> None:
        """Log a collective: one that does not block runs on its group's stream, between marks."""
        self.names = DTYPES
        read, written = (tuple(map(self.describe, ts)) for ts in (call.read, call.written))
        sizes = [t.numel() * t.element_size() for t in call.buffers]
        facts = {"kind": call.kind, "ranks": call.ranks, "peer": call.peer, "bytes": sum(sizes)}
        facts["rank"] = dist.get_rank()
        if call.kind in FROM_ONE and any(map(self.loaded.holds, call.read)):
            facts["loaded"] = True
        if self.compiled.number() and in_parts(call):
            facts["in_parts"] = True
        stream = self.stream
        if not call.blocking:
            stream = self.stream_of((call.group, call.kind if call.peer >= 0 else "", call.peer))
            self.wait(stream, self.record(self.stream))
        self.calls.append(
            OpCall(
                op=COLLECTIVE,
                args=read,
                kwargs=facts,
                outputs=written,
                phase=self.phase,
                stream=stream,
            )
        )
        self._note_compiled()
        self.last_work = None
        if not call.blocking:
            point = self.record(stream)
            self.arrives |= {t.storage: point for t in written}
            self.last_work = point
