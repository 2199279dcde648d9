"""Where steps of scripts begin and end: optimizers, CUDA graphs, and scripts without either."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from small_scripts import ITEM, TRAINING, captured, written

from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target
from itercast.microbench.programs.program import ProgramCapture

MODEL = """
import torch
from torch.nn import Linear, ReLU
model = torch.nn.Sequential(Linear(64, 64), ReLU(), Linear(64, 64)).cuda()
x, y = torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda")
def loss():
    return (model(x) - y).pow(2).mean()
"""
BY_HAND = """
model(x)  # a first look
for step in range(10):
    loss().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
"""
GRADIENTS = """
for step in range(10):
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss(), parameters)):
        p.data -= 0.1 * g
"""
FORWARD = """
model.eval()
with torch.inference_mode():
    for step in range(10):
        print(model(x).mean().item())
"""


@pytest.mark.parametrize(
    ("text", "name", "products"),
    [
        (BY_HAND, "one backward to the next (train.py:11: loss().backward())", 2 + 3),
        (GRADIENTS, "one backward to the next (train.py:11: for p, g in zip(", 2 + 3),
        (FORWARD, "one forward to the next (train.py:12: print(model(x)", 2),
    ],
)
def test_a_step_of_a_script_without_an_optimizer(
    tmp_path: Path, text: str, name: str, products: int
) -> None:
    """Two layers forward, and backward three products: the first one's input needs no gradient."""
    program = captured(written(tmp_path, MODEL + text), gpus=1)
    assert program.notes[0].startswith(f"a step is taken to be from {name}")
    ops = Counter(c.op for c in program.ranks[0].calls)
    assert ops["aten.mm.default"] + ops["aten.addmm.default"] == products
    assert ops[ITEM] == (text == FORWARD)
    assert bool(program.ranks[0].host["autograd_node"]) == (text != FORWARD)
    assert ops["aten.sub_.Tensor"] == 4 * (text != FORWARD)


def test_forwards_before_training_are_no_steps(tmp_path: Path) -> None:
    """Ten forwards, then an optimizer is made and steps."""
    before = TRAINING.replace(
        "optimizer =", "for i in range(10): model(torch.randn(4, 8))\noptimizer ="
    )
    program = captured(written(tmp_path, before), gpus=1)
    assert not program.notes
    assert Counter(c.op for c in program.ranks[0].calls)["aten._foreach_lerp_.Scalar"] == 1


WARM_UP = """
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
def step():
    optimizer.zero_grad(set_to_none=True)
    loss().backward()
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for i in range(5):
        step()
"""
REPLAYED = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for i in range(5):
    x.copy_(torch.randn_like(x))
    graph.replay()
"""
GRAPHED = """
optimizer = torch.optim.SGD(model.parameters())
model = torch.cuda.make_graphed_callables(model, (x,))
for i in range(5):
    loss().backward()
    optimizer.step()
"""
EAGER = "for i in range(5): step()"


def host_us(program: ProgramCapture) -> float:
    return forecast_program(program, find_target("h100-sxm-80gb", "", None, "", "")).host_us


def test_a_replayed_graph_is_one_launch(tmp_path: Path) -> None:
    """Five steps warm up; then each replay is a step: a copy, and all of a step in one launch."""
    eager = captured(written(tmp_path, MODEL + WARM_UP + EAGER), gpus=1)
    replayed = captured(written(tmp_path, MODEL + WARM_UP + REPLAYED), gpus=1)
    calls = replayed.ranks[0].calls
    alone = [c.op for c in calls if not c.graphed]
    assert alone == ["aten.randn_like.default", "aten.copy_.default"]
    launched = [c.op for c in calls if c.graphed]
    own = {"itercast.host"}  # Python that a replay does not run
    assert launched == [c.op for c in eager.ranks[0].calls if c.op not in own]
    assert len({c.graphed for c in calls}) == 2
    assert host_us(replayed) < 0.2 * host_us(eager)


def test_graphed_callables_are_a_launch_in_each_direction(tmp_path: Path) -> None:
    """The model's three ops are one launch and their backward is one; the loss runs by itself."""
    calls = captured(written(tmp_path, MODEL + GRAPHED), gpus=1).ranks[0].calls
    graphs: dict[int, list[str]] = {}
    for call in calls:
        graphs.setdefault(call.graphed, []).append(call.phase)
    alone = graphs.pop(0)
    assert {phase for phases in graphs.values() for phase in phases} == {"forward", "backward"}
    assert sorted(len(set(phases)) for phases in graphs.values()) == [1, 1]
    assert set(alone) == {"forward", "backward", "optimizer"}


OPTIMIZERS = """
optimizer = torch.optim.SGD(model.parameters())
critic = torch.nn.Linear(64, 64).cuda()
of_critic = torch.optim.SGD(critic.parameters())
def step(loss, of):
    loss.backward()
    of.step()
"""
ROLLOUT = """
model(x)  # a look before the loop comes once
for iteration in range(9):
    with torch.no_grad():
        for t in range(5):
            critic(x)
    for epoch in range(2):
        for part in range(3):
            step((critic(x) - y).mean(), of_critic)
            step(loss(), optimizer)
"""
CRITICS = """
for i in range(30):
    step((critic(x) - y).mean(), of_critic)
    if i % 3 == 0:
        step(loss(), optimizer)
"""
INNER = """
for i in range(30):
    for k in range(4):
        step((critic(x) - y).mean(), of_critic)
    step(loss(), optimizer)
"""
TWO_LINES = """
for i in range(9):
    step(loss(), optimizer)
    step(loss() + loss(), optimizer)
"""
EVALUATED = """
for i in range(9):
    if i % 5000 == 0:
        critic.eval()(x)
    step((critic.train()(x) - y).mean(), of_critic)
    step(loss(), optimizer)
"""
RARE = """
for i in range(100):
    if i % 5000 == 0:
        critic(x)
    step(loss(), optimizer)
"""


@pytest.mark.parametrize(
    ("text", "products", "steps"),
    [
        (ROLLOUT, 5 + 6 * (2 + 5), 6),
        (CRITICS, 3 * 2 + 5, 3),
        (INNER, 4 * 2 + 5, 4),
        (TWO_LINES, 3 * 5, 2),
        (EVALUATED, 2 + 5, 1),
        (RARE, 5, 1),
    ],
)
def test_an_iteration_of_several_optimizer_steps(
    tmp_path: Path, text: str, products: int, steps: int
) -> None:
    """A step of the critic has 2 products, one forward and one backward; of the model 2 + 3."""
    program = captured(written(tmp_path, MODEL + OPTIMIZERS + text), gpus=1)
    ops = Counter(c.op for c in program.ranks[0].calls)
    assert ops["aten.mm.default"] + ops["aten.addmm.default"] == products
    assert program.optimizer_steps == steps
    left_out = ["what came once in 60 steps is left out (train.py:18: critic(x))"]
    assert list(program.notes) == (left_out if text == RARE else [])
