"""DDP's reducer in Python, by the rules of torch's own in C++, which reads the data of gradients.

Source: torch/csrc/distributed/c10d/reducer.cpp. Buckets are filled in the order in which gradients
are ready, as from the second step on; a full bucket is summed over the ranks beside the rest of
backward, and gradients are copied out of the buckets when all have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

BROADCAST_BYTES = 250 * 2**20
ASSIGN: Any = vars(dist)["_compute_bucket_assignment_by_size"]  # torch's own rule


class Bucket:
    """Gradients that are summed in one message."""

    def __init__(self, parameters: Sequence[Any]) -> None:
        self.parameters = list(parameters)
        self.missing = {id(p) for p in self.parameters}
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = dict(zip(map(id, self.parameters), self.buffer.split(sizes), strict=True))
        self.sent: Any = None


class Reducer:
    """Stands in for ``torch.distributed.Reducer`` on tensors that have no data."""

    def __init__(
        self,
        parameters: Sequence[Any],
        bucket_indices: Sequence[Sequence[int]],
        bucket_limits: Sequence[int],
        group: Any,
        sparse: Sequence[bool] = (),
        bucket_bytes: int = 25 * 2**20,
        find_unused: bool = False,
        gradients_are_views: bool = False,
        names: Any = None,
        first_bucket_bytes: int = 2**20,
        *others: Any,
    ) -> None:
        if any(sparse):
            raise NotImplementedError("DDP of embeddings with sparse gradients: use sparse=False")
        self.parameters, self.group = list(parameters), group
        self.limits = [first_bucket_bytes, bucket_bytes]
        self.views_only = gradients_are_views
        self.layout = [[self.parameters[i] for i in indices] for indices in bucket_indices]
        self.ready: list[Any] = []
        self.rebuilt = find_unused  # such buckets keep their first layout
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

    def prepare_for_backward(self, outputs: Sequence[Any]) -> None:
        """Begin a step whose gradients are summed over the ranks."""
        if not self.buckets:
            self.buckets = [Bucket(parameters) for parameters in self.layout]
        for bucket in self.buckets:
            bucket.missing, bucket.sent = {id(p) for p in bucket.parameters}, None
        self.syncing, self.queued = True, False
        self.ready = []

    def _gradient_ready(self, parameter: Any) -> None:
        if not self.syncing:  # in ``no_sync``
            return
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.ready.append(parameter)
        bucket = next(b for b in self.buckets if id(parameter) in b.views)
        self._copy_in(bucket, parameter)
        bucket.missing.discard(id(parameter))
        self._send_full()

    def _copy_in(self, bucket: Bucket, parameter: Any) -> None:
        """Put a gradient into its bucket, divided by the number of ranks in the same kernel."""
        view = bucket.views[id(parameter)].view_as(parameter)
        with torch.no_grad():
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, 1 / self.group.size(), out=view)
                if self.views_only:
                    parameter.grad = view

    def _send_full(self) -> None:
        """Sum full buckets over the ranks, in their order."""
        for bucket in self.buckets:
            if bucket.missing:
                return
            if bucket.sent is None:
                bucket.sent = dist.all_reduce(bucket.buffer, group=self.group, async_op=True)

    def _finish(self) -> None:
        """When backward is done: fill buckets of unused parameters, wait for all, copy out."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                if id(parameter) in bucket.missing:
                    self._copy_in(bucket, parameter)
            bucket.missing = set()
        self._send_full()
        self.syncing = False
        for bucket in self.buckets:
            bucket.sent.wait()
            for parameter in bucket.parameters:
                if parameter.grad is not None and not self.views_only:
                    with torch.no_grad():
                        parameter.grad.copy_(bucket.views[id(parameter)].view_as(parameter))

    def prepare_for_forward(self) -> None:
        """Begin a forward pass."""

    def _set_static_graph(self) -> None:
        """The captured graph is the same in every step anyway."""

    def set_logger(self, logger: Any) -> None:
        """Torch's statistics are not kept."""


class Silent:
    """Stands in for ``torch.distributed.Logger``: takes every call and keeps nothing."""

    def __init__(self, reducer: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def broadcast_coalesced(
    group: Any, tensors: Sequence[Any], limit_bytes: int = BROADCAST_BYTES, source: int = 0
) -> None:
    """Send tensors of one rank to all, those of a dtype joined up to a size."""
    indices, _ = ASSIGN(tensors, [limit_bytes])
    for bucket in indices:
        joined = torch.cat([tensors[i].reshape(-1) for i in bucket])
        dist.broadcast(joined, group=group, group_src=source)
        parts = joined.split([tensors[i].numel() for i in bucket])
        for i, part in zip(bucket, parts, strict=True):
            tensors[i].copy_(part.view_as(tensors[i]))


@contextmanager
def python_reducer() -> Iterator[None]:
    """Let DDP reduce gradients that have no data inside the context."""
    from torch.nn.parallel import distributed

    nothing = {"_verify_param_shape_across_processes": lambda *args, **kwargs: True}
    with ExitStack() as stack:
        for name, value in (("Reducer", Reducer), ("Logger", Silent)):
            stack.enter_context(patch.object(dist, name, value))
        stack.enter_context(patch.object(dist, "_broadcast_coalesced", broadcast_coalesced))
        stack.enter_context(patch.dict(vars(distributed), nothing))
        yield
