"""Redistributed tensors are captured as torch's DTensor really moves them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from reshardings import PAIRS, RANKS, pairs, reshard
from torch.distributed.device_mesh import init_device_mesh

from itercast.microbench.programs.capture import capture_program
from itercast.microbench.programs.program import COLLECTIVE

RESHARDINGS = Path(__file__).with_name("reshardings.py")


def captured_sequences() -> list[list[list[Any]]]:
    """Of each rank and pair the captured collectives; a barrier comes after each pair."""

    def program() -> Any:
        dist.init_process_group("nccl")
        meshes = {shape: init_device_mesh("cuda", shape) for shape in ((4,), (2, 2))}

        def step() -> None:
            for shape, before, after in pairs():
                reshard(meshes[shape], before, after)()
                dist.barrier()

        return step

    found: list[list[list[Any]]] = []
    for step in capture_program(program, RANKS, range(RANKS)).ranks.values():
        found.append([[]])
        for facts in (c.kwargs for c in step.calls if c.op == COLLECTIVE):
            if facts["kind"] == "barrier":
                found[-1].append([])
            else:
                found[-1][-1].append([facts["kind"], facts["bytes"], list(facts["ranks"])])
    return [sequences[:-1] for sequences in found]


@pytest.mark.slow
def test_30_random_reshardings_send_what_torch_sends(tmp_path: Path) -> None:
    """On each of four ranks: kind, bytes and group of every collective, in order."""
    path = tmp_path / "sent.json"
    subprocess.run([sys.executable, RESHARDINGS, path], check=True, capture_output=True)
    real, captured = json.loads(path.read_text()), captured_sequences()
    assert len(real) == len(captured) == RANKS
    for mine, theirs in zip(captured, real, strict=True):
        equal = [one == other for one, other in zip(mine, theirs, strict=True)]
        assert equal == [True] * PAIRS, [
            (pair, one, other)
            for pair, one, other in zip(pairs(), mine, theirs, strict=True)
            if one != other
        ]
    kinds = {kind for sequence in real[0] for kind, _, _ in sequence}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
