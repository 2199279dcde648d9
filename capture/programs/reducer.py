"""DDP's reducer in Python, by the rules of torch's own in C++, which reads the data of gradients.

Source: torch/csrc/distributed/c10d/reducer.cpp. Buckets are filled in the order in which gradients
are ready, as from the second step on; a full bucket is summed over the ranks beside the rest of
backward, and gradients are copied out of the buckets when all have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DDPLoggingData
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

BROADCAST_BYTES = 250 * 2**20
ASSIGN: Any = vars(dist)["_compute_bucket_assignment_by_size"]  # torch's own rule


class Bucket:
    """Gradients that are summed in one message."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.missing = {id(p) for p in self.parameters}  # whose gradients are not in ``buffer`` yet
        first, total = self.parameters[0], sum(p.numel() for p in self.parameters)
        self.buffer = torch.empty(total, dtype=first.dtype, device=first.device)
        self.views = self.views_of(self.buffer)  # gradients by id of the parameter
        self.sent: Any = None  # the handle of the message

    def views_of(self, buffer: Tensor) -> dict[int, Tensor]:
        """The gradients in a buffer, by the ids of their parameters."""
        parts = buffer.split([p.numel() for p in self.parameters])
        pairs = zip(self.parameters, parts, strict=True)
        return {id(p): part.view_as(p) for p, part in pairs}


class GradBucket:
    """What a communication hook is given, as ``torch.distributed.GradBucket``."""

    def __init__(self, bucket: Bucket, index: int, last: bool) -> None:
        self.bucket, self._index, self.last = bucket, index, last

    def buffer(self) -> Tensor:
        """All gradients, as one tensor."""
        return self.bucket.buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Take another tensor for that."""
        self.bucket.buffer, self.bucket.views = buffer, self.bucket.views_of(buffer)

    def gradients(self) -> list[Tensor]:
        """The gradients, which are views of the buffer."""
        return list(self.bucket.views.values())

    def parameters(self) -> list[Tensor]:
        """Their parameters."""
        return self.bucket.parameters

    def index(self) -> int:
        """The number of the bucket in the order in which they are sent."""
        return self._index

    def is_last(self) -> bool:
        """Whether no bucket follows."""
        return self.last


class Reducer:
    """Stands in for ``torch.distributed.Reducer`` on tensors that have no data."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        bucket_indices: Sequence[Sequence[int]],
        bucket_limits: Sequence[int],
        group: dist.ProcessGroup,
        sparse: Sequence[bool] = (),
        bucket_bytes: int = 25 * 2**20,
        find_unused: bool = False,
        gradients_are_views: bool = False,
        names: object = None,
        first_bucket_bytes: int = 2**20,
        *others: object,
    ) -> None:
        if any(sparse):
            raise NotImplementedError("DDP of embeddings with sparse gradients: use sparse=False")
        self.parameters, self.group = list(parameters), group
        self.limits = [first_bucket_bytes, bucket_bytes]
        self.views_only = gradients_are_views
        self.layout = [[self.parameters[i] for i in indices] for indices in bucket_indices]
        self.ready: list[Tensor] = []
        self.rebuilt = self.find_unused = find_unused  # such buckets keep their first layout
        self.hook: Any = None  # of communication: a bucket -> the future of its sum
        self.used: Any = None  # the handle of the message that says which parameters are used
        self.counted: Any = None  # the handle of the message that counts ranks with data (``Join``)
        self.syncing = False
        self.buckets: list[Bucket] = []
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_ready)

    def _rebuild_buckets(self) -> bool:
        """Lay out the buckets anew, once, in the order in which gradients were ready."""
        if self.rebuilt or not self.ready:
            return False
        self.rebuilt = True
        indices, _ = ASSIGN(
            self.ready, self.limits, [False] * len(self.ready), list(range(len(self.ready)))
        )
        self.layout = [[self.ready[i] for i in bucket] for bucket in indices]
        self.buckets = []
        return True

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Begin a step whose gradients are summed over the ranks."""
        if not self.buckets:
            self.buckets = [Bucket(parameters) for parameters in self.layout]
        for bucket in self.buckets:
            bucket.missing, bucket.sent = {id(p) for p in bucket.parameters}, None
        self.syncing, self.queued, self.used = True, False, None
        self.ready = []
        if self.find_unused:
            used = reached(outputs)
            self._fill(lambda parameter: id(parameter) not in used)

    def _gradient_ready(self, parameter: Tensor) -> None:
        """Put a parameter's gradient into its bucket, and send buckets that are full."""
        if not self.syncing:  # in ``no_sync``
            return
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if self.counted is not None:
                self.counted.wait()
        self.ready.append(parameter)
        bucket = next(b for b in self.buckets if id(parameter) in b.views)
        self._copy_in(bucket, parameter)
        bucket.missing.discard(id(parameter))
        self._send_full()

    def _copy_in(self, bucket: Bucket, parameter: Tensor) -> None:
        """Put a gradient into its bucket, divided by the number of ranks in the same kernel."""
        view = bucket.views[id(parameter)]
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.untyped_storage()._cdata == view.untyped_storage()._cdata:
                if self.hook is None:
                    view.div_(self.group.size())
            elif self.hook is None:
                torch.mul(parameter.grad, 1 / self.group.size(), out=view)
            else:
                view.copy_(parameter.grad)
            if self.views_only and parameter.grad is not None:
                parameter.grad = view

    def _send_full(self) -> None:
        """Sum full buckets over the ranks, in their order."""
        for index, bucket in enumerate(self.buckets):
            if bucket.missing:
                return
            if bucket.sent is None and self.hook:
                last = index == len(self.buckets) - 1
                bucket.sent = self.hook(GradBucket(bucket, index, last))
            elif bucket.sent is None:
                bucket.sent = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)
        if self.find_unused and self.used is None:
            used = torch.ones(len(self.parameters), dtype=torch.int32)
            self.used = dist.all_reduce(used, group=self.group, async_op=True)

    def _fill(self, is_unused: Callable[[Tensor], bool]) -> None:
        """Fill the places of parameters that get no gradient."""
        filled = []
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if id(parameter) in bucket.missing and is_unused(parameter):
                    self._copy_in(bucket, parameter)
                    bucket.missing.discard(id(parameter))
                    filled.append(parameter)
        self.ready = filled + self.ready
        self._send_full()

    def _finish(self) -> None:
        """End backward: fill places of unused parameters, wait for all sums, copy them to grads."""
        self._fill(lambda parameter: True)
        self.syncing = False
        for bucket in self.buckets:
            summed = bucket.sent.wait()
            views = bucket.views_of(summed) if self.hook else bucket.views
            for parameter in bucket.parameters:
                view = views[id(parameter)]
                needs_copy = not self.views_only or view is not bucket.views[id(parameter)]
                if parameter.grad is not None and needs_copy and _apart(parameter.grad, view):
                    with torch.no_grad():
                        parameter.grad.copy_(view)
        if self.used is not None:
            self.used.wait()

    def _set_forward_pass_work_handle(self, work: Any, static_size: bool) -> None:
        """Take the message of a forward pass that counts the ranks with data (``Join``)."""
        self.counted = None if static_size else work

    def prepare_for_forward(self) -> None:
        """Begin a forward pass."""

    def _set_static_graph(self) -> None:
        """Let buckets be rebuilt and send no message on which parameters are used."""
        self.rebuilt = self.find_unused = False

    def _delay_all_reduce(self) -> None:
        """Do nothing: torch delays sums in the first step of a static graph, not in a later one."""

    def set_logger(self, logger: object) -> None:
        """Torch's statistics are not kept."""


def _apart(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have memory of their own."""
    return bool(first.untyped_storage()._cdata != second.untyped_storage()._cdata)


def edges(outputs: Sequence[Tensor], beyond: range = range(0)) -> list[tuple[Any, int]]:
    """Edges of autograd's graph from which outputs are computed: (node, number of its result).

    The search goes from the outputs towards the leaves. It does not go on from nodes whose sequence
    number is in ``beyond``, or that stand for a repeated pass of a model.
    """
    seen: dict[tuple[Any, int], None] = {}
    waiting = [(t.grad_fn, t.output_nr) for t in outputs]
    while waiting:
        edge = waiting.pop()
        node = edge[0]
        if node is None or edge in seen:
            continue
        seen[edge] = None
        if node._sequence_nr() not in beyond and not getattr(node, "is_model", False):
            waiting += node.next_functions
    return list(seen)


def reached(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The parameters that outputs depend on, by their ids."""
    parameters = dict[int, Tensor]()
    for node, _ in edges(outputs):
        parameters |= getattr(node, "reaches", {})  # of one that stands for a repeated pass
        if hasattr(node, "variable"):
            parameters[id(node.variable)] = node.variable
    return parameters


def register_hook(reducer: Reducer, state: object, hook: Callable[..., Any]) -> None:
    """As ``torch.distributed._register_comm_hook``."""
    reducer.hook = partial(hook, state)


def register_builtin_hook(reducer: Reducer, kind: Enum) -> None:
    """As ``torch.distributed._register_builtin_comm_hook``."""
    fp16 = kind.name == "FP16_COMPRESS"
    hook = default_hooks.fp16_compress_hook if fp16 else default_hooks.allreduce_hook
    register_hook(reducer, reducer.group, hook)


class Silent:
    """Stands in for ``torch.distributed.Logger``: takes every call and keeps nothing."""

    def __init__(self, reducer: Reducer) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def _get_ddp_logging_data(self) -> Any:
        """Torch's statistics, without any."""
        return DDPLoggingData()


def broadcast_coalesced(
    group: dist.ProcessGroup,
    tensors: Sequence[Tensor],
    limit_bytes: int = BROADCAST_BYTES,
    source: int = 0,
) -> None:
    """Send tensors of one rank to all ranks, joined by dtype into messages up to a size."""
    indices, _ = ASSIGN(tensors, [limit_bytes])
    for bucket in indices:
        joined = torch.cat([tensors[i].reshape(-1) for i in bucket])
        dist.broadcast(joined, group=group, group_src=source)
        parts = joined.split([tensors[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            tensors[i].copy_(part.view_as(tensors[i]))


@contextmanager
def python_reducer() -> Iterator[None]:
    """Let DDP use the classes and functions above inside the context, in place of those in C++."""
    from torch.nn.parallel import distributed

    ours: dict[str, Any] = {
        "Reducer": Reducer,
        "Logger": Silent,
        "_broadcast_coalesced": broadcast_coalesced,
        "_register_comm_hook": register_hook,
        "_register_builtin_comm_hook": register_builtin_hook,
    }
    check = "_verify_param_shape_across_processes"
    with (
        patch.multiple(dist, **ours),
        patch.object(distributed, check, lambda *args, **kwargs: True),
    ):
        yield
