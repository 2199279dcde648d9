"""Lets a program run as one rank of many: the other ranks and their messages do not exist."""

from __future__ import annotations

import inspect
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._meta_registrations as _meta_registrations
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _collective_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.reducer import python_reducer

# Methods of a process group that return the handle of a collective, whatever torch calls them.
LAUNCHES = tuple(
    name
    for name, method in vars(dist.ProcessGroup).items()
    if "-> c10d::Work" in (method.__doc__ or "")
)
# Collectives of several tensors, for which torch has no kernels on fake ones.
COALESCED = (
    *("allreduce_coalesced_", "allgather_coalesced_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"),
)
C10D = torch.library.Library("c10d", "IMPL")
for op in COALESCED:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{op}", "Meta"):
        C10D.impl(op, lambda *args: FakeWork().boxed(), "Meta")


@contextmanager
def one_rank_of(
    world_size: int, rank: int, log: ProgramLog, *, lasting: bool = False
) -> Iterator[None]:
    """Make this process rank ``rank`` of ``world_size`` inside the context, as torchrun would.

    ``init_process_group`` of any backend makes groups that send nothing, and that end with the
    context unless they are ``lasting``. ``log`` is told of waits for a collective's handle, and of
    memory that a storage gains or loses.
    """
    if dist.is_initialized():
        raise ValueError("a process group exists already: capture before init_process_group")
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % 8}
    texts = {name: str(value) for name, value in variables.items()}
    texts |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    texts["LOCAL_WORLD_SIZE"] = str(min(8, world_size))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, texts))
        own_random = random.Random()  # the program's numbers are not drawn to number messages
        stack.enter_context(patch.object(_meta_registrations, "random", own_random))
        stack.enter_context(_groups_that_send_nothing(world_size, rank, log))
        stack.enter_context(_log_waits_for_handles(log))
        stack.enter_context(_log_resized_storages(log))
        stack.enter_context(_meshes_hold_real_ranks(log))
        stack.enter_context(python_reducer())
        try:
            yield
        finally:
            _clear_sharding_prop_cache()  # its results name groups of this rank
            if dist.is_initialized() and not lasting:
                dist.destroy_process_group()


@contextmanager
def _groups_that_send_nothing(world_size: int, rank: int, log: ProgramLog) -> Iterator[None]:
    """Make all process groups those of torch's backend "fake", and all stores local."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    init, new_group = dist.init_process_group, dist.new_group

    def fake_init(*args: Any, **kwargs: Any) -> None:
        log.grouped = True
        with _disable_current_modes():
            init("fake", store=own_store(), rank=rank, world_size=world_size)

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return new_group(*args, **{**kwargs, "backend": "fake"})

    def own_store(*args: Any, **kwargs: Any) -> Any:
        """A store that never waits: only this rank sets keys."""
        store: Any = torch._C._distributed_c10d.HashStore()
        store.set_timeout(timedelta(milliseconds=1))
        return store

    def barrier(group: Any = None, *args: Any, **kwargs: Any) -> None:
        dist.barrier(group)

    new: dict[str, Any] = {"init_process_group": fake_init, "new_group": fake_group}
    c10d = dist.distributed_c10d
    with ExitStack() as stack:
        stack.enter_context(patch.object(c10d, "_is_barrier_after_init", lambda: 0))
        for name, function in (new | {"TCPStore": own_store, "monitored_barrier": barrier}).items():
            stack.enter_context(replaced(name, function))
        yield


@contextmanager
def replaced(name: str, function: Any) -> Iterator[None]:
    """Put a function in the place of ``torch.distributed``'s, in all modules that imported it."""
    original = getattr(dist, name)
    with ExitStack() as stack:
        for module_name, module in list(sys.modules.items()):
            is_torchs = module_name.startswith("torch.distributed")
            if is_torchs and vars(module).get(name) is original:
                stack.enter_context(patch.object(module, name, function))
        yield


@contextmanager
def _log_waits_for_handles(log: ProgramLog) -> Iterator[None]:
    """Tell the log when the current stream waits for a collective's handle."""
    group = dist.ProcessGroup
    # By the ids of handles that are alive: the point at which the message ends, and its tensors.
    points: dict[int, tuple[int, Any]] = {}

    def launch_and_note(method: Callable[..., Any]) -> Callable[..., Any]:
        """The method of a collective, which also notes the message's end in ``points``."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            log.last_work = None
            work = method(*args, **kwargs)
            if log.last_work is not None and work is not None:
                points[id(work)] = (log.last_work, args[1] if len(args) > 1 else None)
                weakref.finalize(work, points.pop, id(work), None).atexit = False
            return work

        return launch

    def wait_and_log(method: Callable[..., Any]) -> Callable[..., Any]:
        """A handle's ``wait``, which also logs that the current stream waits; once for each."""

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if (noted := points.pop(id(work), None)) is not None:
                log.wait(log.stream, noted[0])
            return method(work, *args, **kwargs)

        return wait

    launches: dict[str, Any] = {name: launch_and_note(getattr(group, name)) for name in LAUNCHES}
    launches["monitored_barrier"] = lambda of, *args, **kwargs: of.barrier()  # has no fake kernel
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(group, **launches))
        for handle in (dist.Work, FakeWork):
            methods: dict[str, Any] = {"wait": wait_and_log(handle.wait)}
            methods["get_future"] = lambda work: Arriving(log, work, *points[id(work)])
            stack.enter_context(patch.multiple(handle, **methods))
        yield


class Arriving:
    """The future of a collective, as NCCL's: callbacks run after it, on a stream of their own.

    ``point``: the point of the log from which on ``result`` is there.
    """

    def __init__(self, log: ProgramLog, work: Any, point: int, result: Any) -> None:
        self.log, self.work, self.point, self.result = log, work, point, result

    def then(self, callback: Callable[[Any], Any]) -> Arriving:
        """Run ``callback`` on another stream than the program's, after the collective."""
        before, self.log.stream = self.log.stream, self.log.stream_of("then")
        self.log.wait(self.log.stream, self.point)
        result = callback(self)
        point, self.log.stream = self.log.record(self.log.stream), before
        return Arriving(self.log, self.work, point, result)

    def wait(self) -> Any:
        """Let the current stream wait for the result."""
        self.log.wait(self.log.stream, self.point)
        return self.result

    def value(self) -> Any:
        """The result; what reads it waits already."""
        return self.result

    def done(self) -> bool:
        """Whether the result is there; a program that asks is told so."""
        return True


def _log_resized_storages(log: ProgramLog) -> AbstractContextManager[object]:
    """Tell the log when storages are resized, as FSDP does to free gathered parameters."""
    original_resize = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = original_resize(storage, size)
        log.resized(storage._cdata, size)
        return result

    return patch.object(torch.UntypedStorage, "resize_", resize)


def _without_modes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method to run on real tensors on the CPU, unlogged."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.device("cpu"):
            return method(*args, **kwargs)

    return call


MESH_METHODS = (
    *("__getitem__", "_flatten", "_unflatten", "get_group", "get_coordinate"),
    *("get_local_rank", "get_all_groups", "from_group", "_get_all_submeshes"),
)


@contextmanager
def _meshes_hold_real_ranks(log: ProgramLog) -> Iterator[None]:
    """Make the rank numbers in a ``DeviceMesh`` real tensors on the CPU.

    A mesh of GPUs still changes a tensor's sharded dim by all_to_all, as on GPUs.
    """
    from torch.distributed.tensor import placement_types

    original_init, original_alltoall = DeviceMesh.__init__, _collective_utils.shard_dim_alltoall
    on_gpus: weakref.WeakSet[Any] = weakref.WeakSet()

    def real(ranks: Any) -> Any:
        """The numbers that the program filled in, or those that ``init_device_mesh`` counts up."""
        values = log.routing.known_values(ranks)
        return torch.arange(ranks.numel()).view(ranks.shape) if values is None else values

    def init(mesh: Any, /, device_type: str, *args: Any, **kwargs: Any) -> None:
        """All devices are the CPU; the ranks are real numbers again."""
        with _disable_current_modes(), torch.device("cpu"):
            args, kwargs = tree_map_only(FakeTensor, real, (args, kwargs))
            original_init(mesh, "cpu", *args, **kwargs)
            if device_type != "cpu" or mesh._get_root_mesh() in on_gpus:
                on_gpus.add(mesh)

    def alltoall(tensor: Any, gather_dim: int, shard_dim: int, mesh: Any, axis: int) -> Any:
        """Change the dim along which a tensor is sharded, by all_to_all as on GPUs."""
        if mesh not in on_gpus:
            return original_alltoall(tensor, gather_dim, shard_dim, mesh, axis)
        parts = [p.contiguous() for p in tensor.chunk(mesh.size(axis), shard_dim)]
        arrived = [torch.empty_like(p) for p in parts]
        dist.all_to_all(arrived, parts, group=mesh.get_group(axis))
        return torch.cat(arrived, gather_dim)

    shapes = "_propagate_tensor_meta_non_cached"  # found on tensors of its own, not the program's
    with ExitStack() as stack:
        propagate = _without_modes(getattr(ShardingPropagator, shapes))
        stack.enter_context(patch.object(ShardingPropagator, shapes, propagate))
        stack.enter_context(patch.object(DeviceMesh, "__init__", init))
        for name in MESH_METHODS:
            method = _without_modes(getattr(DeviceMesh, name))
            static = isinstance(inspect.getattr_static(DeviceMesh, name), staticmethod)
            method = staticmethod(method) if static else method
            stack.enter_context(patch.object(DeviceMesh, name, method))
        for place in (_collective_utils, placement_types):
            if hasattr(place, "shard_dim_alltoall"):
                stack.enter_context(patch.object(place, "shard_dim_alltoall", alltoall))
        yield
