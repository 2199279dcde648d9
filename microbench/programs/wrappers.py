"""Logs the Python of torch's parallel wrappers while a program is captured.

FSDP2's hooks of a layer, a pipeline's schedule of a micro-batch, and checkpoints take host time
that no op stands for. DTensor's dispatch is logged by ``ProgramLog``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.utils import checkpoint

from itercast.microbench.programs.log import ProgramLog


def _layer(group: Any) -> tuple[str, int]:
    kept = not group._reshard_after_forward
    return ("fsdp_layer_kept" if kept else "fsdp_layer", len(group.fsdp_params))


def _micro_batch(stage: Any) -> tuple[str, int]:
    return ("pipeline_micro", 1)


def _recomputed(frame: Any) -> tuple[str, int]:
    return ("checkpoint_layer", max(1, len(frame.weak_holders)))


METHODS: tuple[tuple[Any, str, Callable[[Any], tuple[str, int]]], ...] = (
    (FSDPParamGroup, "pre_forward", _layer),
    (FSDPParamGroup, "pre_backward", _layer),
    (_PipelineStageBase, "forward_one_chunk", _micro_batch),
    (_PipelineStageBase, "backward_one_chunk", _micro_batch),
    (checkpoint._CheckpointFrame, "check_recomputed_tensors_match", _recomputed),
)


@contextmanager
def logged_wrappers(log: ProgramLog) -> Iterator[None]:
    """Log an event whenever one of ``METHODS`` is called inside the context."""

    def logging(method: Callable[..., Any], event: Callable[[Any], tuple[str, int]]) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.python(*event(self))
            return method(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name, event in METHODS:
            patched = logging(getattr(owner, name), event)
            stack.enter_context(patch.object(owner, name, patched))
        yield
