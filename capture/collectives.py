"""Reads the calls of ``torch.distributed`` that reach the dispatcher as collectives.

Sizes are those of the whole buffer, as nccl-tests counts them:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
CALL = re.compile(
    "_?(all_?reduce|all_?gather|reduce_scatter|all_?to_?all|broadcast|reduce|gather|scatter|barrier"
    "|i?send|i?recv)(_base|_into_tensor|_tensor|_single|_coalesced|_out)*_?"
)
KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
KINDS |= {"isend": "send", "irecv": "recv"}
WRITES_WHOLE = ("all_gather", "scatter", "recv")  # the whole buffer is written, else it is read
REDUCTIONS: Any = dist.ReduceOp.RedOpType
WRITTEN = ("output_tensors", "output_tensor", "output", "outputs", "output_lists", "out")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """A call of a collective, or of a message to one rank (kinds send and recv).

    ``buffers`` hold the whole buffer; ``read`` and ``written`` are the tensors that it reads and
    writes. ``ranks``: of its group, in order; ``peer``: the other rank of a message. ``blocking``:
    the launching stream waits for it.
    """

    kind: str
    buffers: tuple[Any, ...]
    read: tuple[Any, ...]
    written: tuple[Any, ...]
    group: str
    ranks: tuple[int, ...]
    peer: int = -1
    blocking: bool = False


def is_collective(func: Any) -> bool:
    """Whether an op is one of ``torch.distributed``'s."""
    return func.namespace in NAMESPACES


def collective_of(func: Any, args: Any, kwargs: Any, result: Any) -> CollectiveCall | None:
    """The collective that a call launches; None for ``wait_tensor`` and other helpers.

    ``func``: the op; ``result``: what it returned. NotImplementedError for an unknown collective.
    Ops differ in how they name and order tensors: some write arguments (``WRITTEN``), some return
    new tensors, and some work in place.
    """
    name = func._schema.name.partition("::")[2]
    if name in ("wait_tensor", "mesh_get_process_group", "check_for_nan"):
        return None
    if (call := CALL.fullmatch(name)) is None:
        raise NotImplementedError(f"collective {name!r} is not known")
    kind = KINDS.get(call[1], call[1])
    writes_whole = kind in WRITES_WHOLE
    arguments = by_name(func, args, kwargs)
    group = _group(arguments)
    tensors = {k: tensors_in(v) for k, v in arguments.items()}
    outputs = [t for k in WRITTEN for t in tensors.get(k, ())]  # arguments that it writes
    written = outputs or tensors_in(result)
    read = [t for k, ts in tensors.items() if k not in WRITTEN for t in ts] or written
    if kind == "all_to_all" and sum(map(bool, arguments.get("input_split_sizes") or ())) == 1:
        kind = "exchange"  # all to one: a ring
    if kind == "recv":
        written = read
    if not written or (func.namespace == "c10d" and not outputs):
        written = read  # in place
    peer = arguments.get("dst", arguments.get("src", arguments.get("root_rank", -1)))
    ranks = tuple(dist.get_process_group_ranks(group))
    return CollectiveCall(
        kind=kind,
        buffers=tuple(written if writes_whole else read),
        read=tuple(read),
        written=tuple(written),
        group=group.group_name,
        ranks=ranks,
        peer=ranks[peer] if kind in ("send", "recv") else -1,
        blocking=not arguments.get("async_op", True),
    )


def exchanged(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, Any, int]:
    """(read, written, terms): tensors that an op of ``torch.distributed`` reads and writes.

    ``terms``: how many numbers are summed into each number written: the group's size in a summing
    all-reduce, else 1.
    """
    call = collective_of(func, args, kwargs, result)
    if call is None:
        return tensors_in(args), tensors_in(result), 1
    op: Any = by_name(func, args, kwargs).get("reduce_op")
    adds = op == "sum" if op is None or isinstance(op, str) else op.op() == int(REDUCTIONS.SUM)
    return call.read, call.written, len(call.ranks) if adds and call.kind == "all_reduce" else 1


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """All arguments of an op's call by the names in its schema."""
    names = (argument.name for argument in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def in_parts(call: CollectiveCall) -> bool:
    """Whether torch's compiler may split this collective, to overlap it with parts of a product.

    That is async tensor parallelism: symmetric memory is on for the group, and so is the pass.
    """
    config: Any = sys.modules.get("torch._inductor.config")
    memory: Any = sys.modules.get("torch.distributed._symmetric_memory")
    if call.kind not in ("all_gather", "reduce_scatter") or config is None or memory is None:
        return False
    return bool(config._micro_pipeline_tp and memory.is_symm_mem_enabled_for_group(call.group))


def _group(arguments: Mapping[str, Any]) -> Any:
    """The process group among a call's arguments: an object, or a name."""
    group: Any = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def tensors_in(value: Any) -> list[Any]:
    """The tensors in a value, also inside lists and dicts."""
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
