"""An iteration of a loop whose steps are not alike: rollouts, evaluations, uneven ends."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.programs.program import ProgramCapture

POLICY = """
import torch, torch.nn as nn, torch.nn.functional as F
policy, teacher = (nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 16)).cuda() for _ in range(2))
teacher.eval()
optimizer = torch.optim.AdamW(policy.parameters())
def log_probs(model, ids):
    return -F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
@torch.no_grad()
def rollout(ids):
    policy.eval()
    while ids.shape[1] < 10:
        ids = torch.cat([ids, policy(ids)[:, -1].softmax(-1).multinomial(1)], 1)
    {evaluating}
    policy.train()
    {training}
    return ids, old, log_probs(teacher, ids)
@torch.no_grad()
def evaluate():
    policy.eval()
    for _ in range(5):
        policy(torch.randint(0, 16, (8, 4), device="cuda")).mean().item()
    policy.train()
for iteration in range(40):
    ids, old, other = rollout(torch.randint(0, 16, (8, 4), device="cuda"))
    for epoch in range({epochs}):
        for part in range(0, 8, 4):
            now = log_probs(policy, ids[part : part + 4])
            ratio = (now - (old if type(old) is int else old[part : part + 4])).exp()
            (ratio * other[part : part + 4]).mean().backward()
            if part or {each}:
                optimizer.step()
                optimizer.zero_grad()
    if iteration % 2:
        evaluate()
"""
OLD = "old = log_probs(policy, ids)"
ROLLOUTS = {  # optimizer steps, forwards of the policy and the teacher without a graph
    "log-probs in evaluation": ({"evaluating": OLD}, 2, 6 + 1 + 1),
    "log-probs in training": ({"training": OLD}, 2, 6 + 1 + 1),
    "no old log-probs": ({"training": "old = 1"}, 2, 6 + 1),
    "PPO": ({"training": OLD, "epochs": 3, "each": True}, 6, 6 + 1 + 1),
    "a step an iteration": ({"training": OLD, "epochs": 1}, 1, 6 + 1 + 1),
}


def count(program: ProgramCapture, op: str) -> int:
    return Counter(call.op for call in program.ranks[0].calls)[f"aten.{op}.default"]


@pytest.mark.parametrize("name", ROLLOUTS)
@pytest.mark.parametrize("steps", [2, 3, 4, 5])
def test_an_iteration_has_a_rollout_and_all_that_learns_from_it(
    name: str, steps: int, tmp_path: Path
) -> None:
    """Six tokens are drawn, log-probs are found twice or once, and each step has its micro-batches.

    However many steps run. The evaluation after each second iteration is left out.
    """
    given, optimizer_steps, inferences = ROLLOUTS[name]
    given = {"evaluating": "", "training": "", "epochs": 2, "each": False} | given
    path = written(tmp_path, POLICY.format(**given))
    program = captured(path, gpus=1, steps=steps)
    assert program.optimizer_steps == optimizer_steps
    assert count(program, "multinomial") == 6
    micro_batches = 2 * given["epochs"]
    assert count(program, "addmm") == inferences + micro_batches
    assert program.passes[0] == f"{micro_batches} x backward train.py:29"


UNEVEN = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(9):
    for i in range(10):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        if i % 4 == 3 or i == 9:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 8, device="cuda"))
    model.train()
"""


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_a_step_has_as_many_micro_batches_as_most(steps: int, tmp_path: Path) -> None:
    """4, 4 and 2 of an epoch, then its evaluation, and again: the last of 4 without it are kept."""
    program = captured(written(tmp_path, UNEVEN), gpus=1, steps=steps)
    assert count(program, "addmm") == 4
    assert program.passes == ("4 x backward train.py:7", "AdamW train.py:9")
    run = 'model(torch.randn(4, 8, device="cuda"))'
    assert program.notes == (
        f"what ran in 1 of 5 steps is left out (train.py:13: {run})",
        "1 of 5 steps have other numbers of micro-batches",
    )
