"""What FSDP2's ``CPUOffloadPolicy`` keeps in host memory: its copies, and what a CPU does with it.

A capture finds all tensors on the CPU, where torch copies nothing. So copies are told to the log as
torch makes them on a GPU: shards before they are gathered, gradients after they are scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.overrides import TorchFunctionMode

from itercast.capture.programs.log import ProgramLog

INPUTS: Any = vars(FSDPParam)["all_gather_inputs"]


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
    """Log the copies of shards and of gradients that lie in host memory, and sums of these."""

    def inputs(parameter: Any) -> Any:
        if parameter.offload_to_cpu and parameter.sharded_state == ShardedState.SHARDED:
            log.copied("h2d", parameter._sharded_param_data)
        return INPUTS.fget(parameter)

    def reduce(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(p.offload_to_cpu for p in parameters):
            return foreach_reduce(parameters, *args, **kwargs)
        with _ToHost(log), log.adding_on_host():
            return foreach_reduce(parameters, *args, **kwargs)

    with (
        patch.object(FSDPParam, "all_gather_inputs", property(inputs)),
        patch.object(groups, "foreach_reduce", reduce),
    ):
        yield
