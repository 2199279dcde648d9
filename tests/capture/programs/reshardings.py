"""Random pairs of placements, and what torch's DTensor really sends for them over gloo.

``python reshardings.py FILE`` runs them in four processes; the first writes to FILE what each sent.
"""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # once: each fork would import it
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

RANKS, PAIRS, SEED = 4, 30, 29
SHAPE = (8, 12, 21)  # the last dim is not divided evenly: torch pads it
Sent = list[tuple[str, int, list[int]]]  # kind, bytes of the whole buffer, ranks of the group


def pairs() -> list[tuple[tuple[int, ...], list[Any], list[Any]]]:
    """Shape of a mesh, placements before and after: every other one on a mesh of 2 x 2."""
    draw = random.Random(SEED)
    found = []
    while len(found) < PAIRS:
        mesh = (4,) if len(found) % 2 else (2, 2)
        ends = [Replicate(), Shard(0), Shard(1), Shard(2)]
        before = [draw.choice([*ends, Partial(), Partial("max")]) for _ in mesh]
        after = [draw.choice(ends) for _ in mesh]
        partial = {p.reduce_op for p in before if isinstance(p, Partial)}
        if before != after and len(partial) < 2:  # torch mixes no sums with maxima
            found.append((mesh, before, after))
    return found


def local_part(mesh: Any, placements: list[Any]) -> torch.Tensor:
    """This rank's part of a tensor."""
    part = torch.ones(SHAPE)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = part.chunk(mesh.size(axis), placement.dim)
            part = chunks[mesh.get_local_rank(axis)]
    return part.contiguous()


def reshard(mesh: Any, before: list[Any], after: list[Any]) -> Callable[[], Any]:
    """A function that redistributes a tensor of which this rank holds its part."""
    strides = torch.empty(SHAPE, device="meta").stride()
    local = local_part(mesh, before)

    def run() -> Any:
        whole = DTensor.from_local(local, mesh, before, shape=torch.Size(SHAPE), stride=strides)
        return whole.redistribute(placements=after).to_local().sum()

    return run


class Watch(TorchDispatchMode):
    """Notes functional collectives: those of DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = []

    def note(self, kind: str, whole: torch.Tensor, group: Any) -> None:
        """Note a collective with the tensor that holds its whole buffer."""
        if isinstance(group, str):
            group = torch._C._distributed_c10d._resolve_process_group(group)
        size = whole.numel() * whole.element_size()
        self.sent.append((kind, size, dist.get_process_group_ranks(group)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in ("all_reduce", "reduce_scatter_tensor"):
            self.note(name.removesuffix("_tensor"), args[0], args[-1])
        elif name == "all_gather_into_tensor":
            self.note("all_gather", output, args[-1])
        elif func.namespace in ("c10d", "_dtensor"):
            raise NotImplementedError(name)
        return output


@contextmanager
def named(watch: Watch) -> Iterator[None]:
    """Note where shards move: on CUDA by all_to_all, here by a gather that is not noted."""
    replacement = placement_types.shard_dim_alltoall

    def move(tensor: Any, gather_dim: int, shard_dim: int, mesh: Any, axis: int) -> Any:
        watch.note("all_to_all", tensor, mesh.get_group(axis))
        with _disable_current_modes():
            return replacement(tensor, gather_dim, shard_dim, mesh, axis)

    with patch.object(placement_types, "shard_dim_alltoall", move):
        yield


def run_rank(rank: int, path: Path) -> None:
    """Join the group and reshard; the first rank writes what all of them sent."""
    dist.init_process_group("gloo", init_method=f"file://{path}.group", rank=rank, world_size=RANKS)
    sent: list[Sent] = []
    meshes = {shape: init_device_mesh("cpu", shape) for shape in ((4,), (2, 2))}
    for shape, before, after in pairs():
        with Watch() as watch, named(watch):
            reshard(meshes[shape], before, after)()
        sent.append(watch.sent)
    of_all: list[Any] = [None] * RANKS
    dist.all_gather_object(of_all, sent)
    if rank == 0:
        path.write_text(json.dumps(of_all))
    dist.destroy_process_group()


if __name__ == "__main__":
    own = next((r for r in range(1, RANKS) if os.fork() == 0), 0)
    run_rank(own, Path(sys.argv[1]))
    while own == 0:
        try:
            os.wait()
        except ChildProcessError:
            break
