"""What a program keeps in host memory: its copies, and what a CPU does with it.

A capture finds all tensors on the CPU, where torch copies nothing. So the copies that torch would
make on a GPU are logged here: by ``cpu``, ``to``, ``cuda`` and ``copy_``, by ``save_on_cpu``, and
by FSDP (``CPUOffloadPolicy``, ``CPUOffload``), which copies shards from the host before gathering
them, and gradients to it after scattering.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.overrides import TorchFunctionMode

from itercast.capture.programs.log import ProgramLog

CPU = torch.device("cpu")
ALL_GATHER_INPUTS: Any = vars(FSDPParam)["all_gather_inputs"]
PRE_UNSHARD: Any = vars(FlatParamHandle)["pre_unshard"]
FLAT_TO: Any = vars(FlatParamHandle)["flat_param_to"]
MOVES = (torch.Tensor.cpu, torch.Tensor.to)


class _Copies(TorchFunctionMode):
    """Tells a log which tensors are copied to the host and back, and whether the host waits.

    ``reducing``: FSDP2 scatters gradients and moves them to the host.
    """

    def __init__(self, log: ProgramLog) -> None:
        super().__init__()
        self.log, self.reducing = log, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch; log the copy that it would be on a machine with a GPU."""
        kwargs = kwargs or {}
        if self.reducing and func is torch.Tensor.to and args[1:] == (CPU,):
            moved = func(*args, **kwargs)
            return self.copied("d2h", moved, bool(kwargs.get("non_blocking")))
        moves_nothing = self.log.reads_copies or (func not in MOVES and not kwargs)
        if moves_nothing or _caller() == "torch":  # torch finds all tensors on the CPU
            return func(*args, **kwargs)
        place = "cpu" if func is torch.Tensor.cpu else _place((*args[1:], kwargs.get("device")))
        result, log = func(*args, **kwargs), self.log
        if not isinstance(result, torch.Tensor):
            return result
        on_gpu = bool(args) and isinstance(args[0], torch.Tensor) and log.gpu_memory.holds(args[0])
        if func in MOVES and place == "cpu" and on_gpu:
            return self.copied("d2h", result, bool(kwargs.get("non_blocking")))
        if func in MOVES and place == "cuda" and log.host_memory.holds(args[0]):
            return self.copied("h2d", result, bool(kwargs.get("non_blocking")))
        if func not in MOVES and (kwargs.get("pin_memory") or (place == "cpu" and on_gpu)):
            log.keep_on_host(result)
        return result

    def copied(self, way: str, tensor: Any, non_blocking: bool) -> Any:
        """Log a copy of a tensor to the GPU ("h2d") or to host memory ("d2h"), and return it."""
        log = self.log
        log.paused += 1
        copy = tensor.clone()
        log.paused -= 1
        if way == "h2d":
            log.host_memory.remove(copy)
            log.gpu_memory.put(copy)
        else:
            log.keep_on_host(copy)
        log.copied(way, copy, non_blocking=non_blocking)
        return copy


def _caller() -> str:
    """The package whose code calls torch: the first on the stack that is not ours."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("itercast."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _place(arguments: Any) -> str:
    """The kind of device that arguments of a call name; "" where they name none."""
    for value in arguments:
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, str):
            return value.partition(":")[0]
    return ""


@contextmanager
def host_memory(log: ProgramLog) -> Iterator[None]:
    """Log the copies of tensors that lie in host memory."""
    copies, original_cuda = _Copies(log), torch.Tensor.cuda

    def cuda(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not log.host_memory.holds(tensor):
            return original_cuda(tensor, *args, **kwargs)
        return copies.copied("h2d", tensor, bool(kwargs.get("non_blocking")))

    def save_on_cpu_init(hooks: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
        """As ``save_on_cpu``'s constructor; whether a tensor is on the GPU is asked of the log."""

        def pack(tensor: Any) -> Any:
            on_gpu = log.gpu_memory.holds(tensor)
            return copies.copied("d2h", tensor, non_blocking=False) if on_gpu else tensor

        def unpack(tensor: Any) -> Any:
            on_host = log.host_memory.holds(tensor)
            return copies.copied("h2d", tensor, pin_memory) if on_host else tensor

        saved_tensors_hooks.__init__(hooks, pack, unpack)

    with (
        patch.object(torch.Tensor, "cuda", cuda),
        patch.object(save_on_cpu, "__init__", save_on_cpu_init),
        shards_of_fsdp(copies),
        copies,
    ):
        yield


@contextmanager
def shards_of_fsdp(copies: _Copies) -> Iterator[None]:
    """Log the copies of shards and of gradients that FSDP keeps in host memory."""
    log = copies.log

    def to_gpu(shard: Any) -> None:
        log.keep_on_host(shard)
        log.copied("h2d", shard, non_blocking=True)

    def all_gather_inputs(parameter: Any) -> Any:
        if parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED:
            to_gpu(parameter._sharded_param_data)
        return ALL_GATHER_INPUTS.fget(parameter)

    def all_gather(*args: Any, **kwargs: Any) -> Any:
        with log.reading_copies():
            return foreach_all_gather(*args, **kwargs)

    def reduce_scatter(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        copies.reducing = any(p.offload_to_cpu for p in parameters)
        try:
            return foreach_reduce(parameters, *args, **kwargs)
        finally:
            copies.reducing = False

    def pre_unshard(handle: Any) -> Any:
        if handle._offload_params and (
            handle._uses_param_mixed_precision or handle.needs_unshard()
        ):
            to_gpu(handle.flat_param._local_shard)
        with log.reading_copies():
            return PRE_UNSHARD(handle)

    def flat_to(handle: Any, *where: Any, **how: Any) -> None:
        """As ``flat_param_to``; whole parameters are copied to the host, for a state dict."""
        if where == (CPU,) and not handle._offload_params:
            handle.flat_param.data = copies.copied("d2h", handle.flat_param.data, False)
        FLAT_TO(handle, *where, **how)

    def offload_gradient(state: Any, handle: Any, gradient: Any) -> None:
        if handle._offload_params:
            log.copied("d2h", handle.flat_param._cpu_grad, non_blocking=True)
            log.keep_on_host(handle.flat_param._cpu_grad)

    with (
        patch.object(FSDPParam, "all_gather_inputs", property(all_gather_inputs)),
        patch.object(groups, "foreach_all_gather", all_gather),
        patch.object(groups, "foreach_reduce", reduce_scatter),
        patch.object(FlatParamHandle, "pre_unshard", pre_unshard),
        patch.object(FlatParamHandle, "flat_param_to", flat_to),
        patch.object(fsdp1, "_offload_grad", offload_gradient),
    ):
        yield
