"""Python objects that ranks send each other, although one rank is captured after the other.

A rank that waits for an object which no captured rank has sent yet is given up, and captured again
when it was sent. This ends because programs that do not hang send their objects in some order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist


class AwaitedError(BaseException):
    """Raised in a rank that waits for an object of a rank that has not sent it yet.

    No ``except Exception`` of a program stops it.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"waits for an object of rank {rank}")
        self.rank = rank


class Mailbox:
    """Objects sent from rank to rank; each rank's attempt begins with ``begin``."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], list[bytes]] = defaultdict(list)  # by sender, receiver
        self.rank = 0  # whose attempt runs
        self.read: dict[int, int] = defaultdict(int)  # sender -> how many of its objects were read
        self.awaited = dict[int, tuple[int, int]]()  # by rank: the peer, and objects needed of it

    def begin(self, rank: int) -> None:
        """Forget what the rank sent in an earlier attempt; it reads from the start again."""
        self.rank, self.read = rank, defaultdict(int)
        for pair in self.sent:
            if pair[0] == rank:
                self.sent[pair] = []

    def lacks(self, rank: int) -> bool:
        """Whether a rank that was given up still lacks the objects that it waited for."""
        peer, needed = self.awaited.get(rank, (rank, 0))
        return len(self.sent[peer, rank]) < needed

    def send(self, object_list: list[Any], dst: int | None = None, **options: Any) -> None:
        """As ``torch.distributed.send_object_list``."""
        peer = _global(dst, "group_dst", options)
        self.sent[self.rank, peer] += map(_packed, object_list)

    def receive(self, object_list: list[Any], src: int | None = None, **options: Any) -> int:
        """As ``torch.distributed.recv_object_list``; AwaitedError where too few were sent."""
        peer = _global(src, "group_src", options)
        start = self.read[peer]
        stop = self.read[peer] = start + len(object_list)
        if len(self.sent[peer, self.rank]) < stop:
            self.awaited[self.rank] = peer, stop
            raise AwaitedError(peer)
        object_list[:] = map(_unpacked, self.sent[peer, self.rank][start:stop])
        return peer


def _packed(one: object) -> bytes:
    """An object as it is sent: its class may be known to the ranks' processes alone."""
    made = BytesIO()
    torch.save(one, made)
    return made.getvalue()


def _unpacked(sent: bytes) -> Any:
    return torch.load(BytesIO(sent), weights_only=False)


def _global(rank: int | None, name: str, options: dict[str, Any]) -> int:
    """A rank's number in the world: ``rank``, or of option ``name``, its number in a group."""
    return rank if rank is not None else dist.get_global_rank(options["group"], options[name])


def _all_gathered(object_list: list[Any], obj: Any, *args: Any, **options: Any) -> None:
    """As ``all_gather_object``, if all ranks have the same object as this one."""
    object_list[:] = [obj] * len(object_list)


def _gathered(
    obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any
) -> None:
    """As ``gather_object``; only the rank that gathers has a list."""
    _all_gathered(object_gather_list or [], obj)


def _scattered(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **options: Any,
) -> None:
    """As ``scatter_object_list``; the rank that scatters gets its object, other ranks get None."""
    own = dist.get_rank(options.get("group"))
    scatter_object_output_list[0] = (scatter_object_input_list or {own: None})[own]


def _kept(object_list: list[Any], *args: Any, **options: Any) -> None:
    """As ``broadcast_object_list``, if the source has the objects that this rank has."""


@contextmanager
def objects_through(mailbox: Mailbox) -> Iterator[None]:
    """Send and receive Python objects through a mailbox inside the context."""
    functions: dict[str, Any] = {
        "send_object_list": mailbox.send,
        "recv_object_list": mailbox.receive,
        "all_gather_object": _all_gathered,
        "gather_object": _gathered,
        "scatter_object_list": _scattered,
        "broadcast_object_list": _kept,
    }
    with (
        patch.multiple(dist, **functions),
        patch.multiple(dist.distributed_c10d, **functions),
        _stages_agree(),
    ):
        yield


def _stages_agree() -> AbstractContextManager[object]:
    """Let pipeline stages infer shapes as this rank's do, without a vote of all ranks."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import InferenceMode

    def warm_up(schedule: Any, stages: Any, has_backward: bool, done: bool) -> None:
        needed = [InferenceMode.needs_dynamic(s._user_meta, has_backward) for s in stages]
        for stage in stages:
            stage._inference_mode = InferenceMode.DYNAMIC if any(needed) else InferenceMode.STATIC

    return patch.object(schedules._PipelineSchedule, "_warmup_p2p", warm_up)
