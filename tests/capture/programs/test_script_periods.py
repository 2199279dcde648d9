"""An iteration of a loop whose steps are not alike: rollouts, evaluations, uneven ends."""

from collections import Counter
from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.programs.program import AGAIN, ProgramCapture

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
    """How often an op is launched, as often as marks before launches say of those after them."""
    times, found = 1, 0
    for call in program.ranks[0].calls:
        times = call.args[0] if call.op == AGAIN else times
        found += times * (call.op == f"aten.{op}.default")
    return found


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


THROUGH_THE_HOST = """
import torch
policy = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)).cuda()
optimizer = torch.optim.AdamW(policy.parameters())
class Learner:
    def rollout(self):
        policy.eval()
        with torch.no_grad():
            return [policy(torch.randn(4, 8, device="cuda")).cpu().numpy() for _ in range(6)]
    def train(self, rows):
        policy.train()
        for _ in range({epochs}):
            for row in rows:
                policy(torch.randn(4, 8, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    def learn(self):
        for iteration in range(9):
            self.train(self.rollout())
Learner().learn()
"""


def test_a_rollout_that_the_host_keeps_is_said_to_be_left_out(tmp_path: Path) -> None:
    """As Stable-Baselines3's: nobody sees that its numbers are learned from 320 times."""
    program = captured(written(tmp_path, THROUGH_THE_HOST.format(epochs=40)), gpus=1)
    assert program.optimizer_steps == 1 and count(program, "addmm") == 2
    made = 'return [policy(torch.randn(4, 8, device="cuda")).cpu().numpy() for _ in range(6)]'
    assert program.notes == (f"what ran in 1 of 3 steps is left out (train.py:9: {made})",)


AVERAGED = """
import torch
layers = [torch.nn.Linear(8, 8) for _ in range(3)]
model = torch.nn.Sequential(*layers).cuda()
average = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters())
def update():
    with torch.no_grad():
        {update}
for i in range(200):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if i % {every} == {first}:
        update()
"""
EACH = "for a, p in zip(average, model.parameters()): a.lerp_(p, 0.1)"
AT_ONCE = "torch._foreach_lerp_(average, list(model.parameters()), 0.1)"


@pytest.mark.parametrize(("update", "lerps"), [(EACH, 6), (AT_ONCE, 1)])
@pytest.mark.parametrize(("every", "first"), [(1, 0), (2, 0), (2, 1), (3, 0), (10, 0)])
@pytest.mark.parametrize("steps", [3, 4])
def test_an_average_of_weights_every_few_steps_is_one_of_so_many(
    update: str, lerps: int, every: int, first: int, steps: int, tmp_path: Path
) -> None:
    """Six tensors are averaged, at once or one by one, after so many optimizer steps of 3 x 1."""
    text = AVERAGED.format(update=update, every=every, first=first)
    program = captured(written(tmp_path, text), gpus=1, steps=steps)
    calls = [call for call in program.ranks[0].calls if call.phase != "optimizer"]
    ops = Counter(call.op.split(".")[1] for call in calls)
    assert ops["lerp_"] + ops["_foreach_lerp_"] == lerps
    assert program.optimizer_steps == every and ops["addmm"] == 3 * every
    assert not program.notes


def test_an_average_that_comes_once_is_said_to_be_left_out(tmp_path: Path) -> None:
    program = captured(written(tmp_path, AVERAGED.format(update=EACH, every=100, first=0)), gpus=1)
    assert program.optimizer_steps == 1 and not count(program, "lerp_")
    waited, left_out = program.notes
    further = "one is kept; --steps 6 looks at twice as many"
    assert waited == f"the loop did not repeat in 60 steps: {further}"
    assert left_out.startswith("what ran in 1 of 60 steps is left out (")


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
