"""What FSDP keeps in host memory: its copies, and what a CPU does with it.

FSDP2's ``CPUOffloadPolicy``, FSDP1's ``CPUOffload``. A capture finds all tensors on the CPU, where
torch copies nothing. So copies are told to the log as torch makes them on a GPU: shards before they
are gathered, gradients after they are scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather, foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.overrides import TorchFunctionMode

from itercast.capture.programs.log import ProgramLog

INPUTS: Any = vars(FSDPParam)["all_gather_inputs"]
PRE_UNSHARD: Any = vars(FlatParamHandle)["pre_unshard"]


class _ToHost(TorchFunctionMode):
    """Tells a log which tensors are copied to the host, and whether the host waits for it."""

    def __init__(self, log: ProgramLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and args[1:] == (torch.device("cpu"),):
            self.log.copied("d2h", made)
            if not (kwargs or {}).get("non_blocking"):
                self.log.host_wait(self.log.record(self.log.stream))
        return made


@contextmanager
def offloaded_shards(log: ProgramLog) -> Iterator[None]:
    """Log the copies of shards and of gradients that lie in host memory."""

    def inputs(parameter: Any) -> Any:
        if parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED:
            log.copied("h2d", parameter._sharded_param_data)
        return INPUTS.fget(parameter)

    def gather(*args: Any, **kwargs: Any) -> Any:
        with log.reading_copies():
            return foreach_all_gather(*args, **kwargs)

    def reduce(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(p.offload_to_cpu for p in parameters):
            return foreach_reduce(parameters, *args, **kwargs)
        with _ToHost(log):
            return foreach_reduce(parameters, *args, **kwargs)

    def pre_unshard(handle: Any) -> Any:
        if handle._offload_params and (
            handle._uses_param_mixed_precision or handle.needs_unshard()
        ):
            log.copied("h2d", handle.flat_param._local_shard)
        with log.reading_copies():
            return PRE_UNSHARD(handle)

    def offload(state: Any, handle: Any, gradient: Any) -> None:
        if handle._offload_params:
            log.copied("d2h", handle.flat_param._cpu_grad)

    with (
        patch.object(FSDPParam, "all_gather_inputs", property(inputs)),
        patch.object(groups, "foreach_all_gather", gather),
        patch.object(groups, "foreach_reduce", reduce),
        patch.object(FlatParamHandle, "pre_unshard", pre_unshard),
        patch.object(fsdp1, "_offload_grad", offload),
    ):
        yield
