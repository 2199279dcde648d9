"""What a program runs under torch.compile is captured as such, forward and backward."""

from pathlib import Path

import pytest

from itercast.capture.input.batches import TakenBatches
from itercast.capture.opcall import StepCapture
from itercast.capture.programs.script import Script, capture_script
from itercast.compose.graph.launch_modes import fused
from itercast.compose.programs.price import price_rank
from itercast.compose.programs.scripts import emulated
from itercast.compose.programs.timeline import simulate_program
from itercast.compose.target import find_target
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.memory.fused import CALL

H100 = emulated(load_gpu("h100-sxm-80gb"))
TRAIN = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return torch.tanh(torch.sigmoid(self.linear(x)))

first, second, head = Block().cuda(), Block().cuda(), nn.Linear(8, 1).cuda()
{compile}
parameters = [*first.parameters(), *second.parameters(), *head.parameters()]
sgd = torch.optim.SGD(parameters, lr=0.1)
for _ in range(3):
    x = torch.ones(4, 8).cuda()
    torch.relu(head(second(first(x)))).sum().backward()
    sgd.step()
    sgd.zero_grad()
"""


def captured(folder: Path, compile_: str) -> StepCapture:
    script = folder / "train.py"
    script.write_text(TRAIN.format(compile=compile_))
    program = capture_script(Script(path=script), H100, 1, 1, TakenBatches())
    return program.ranks[0]


def groups(step: StepCapture, phase: str) -> list[tuple[str, int]]:
    """Pointwise ops and products of a phase, with the call of a compiled function they are in."""
    names = ("mm", "sigmoid", "tanh", "relu", "sigmoid_backward", "tanh_backward")
    short = [(c.op.split(".")[1], c.compiled) for c in step.calls if c.phase == phase]
    return [(name, call) for name, call in short if name in names]


BY_HAND = {
    "forward": ["mm", "sigmoid", "tanh"],
    "backward": ["tanh_backward", "sigmoid_backward", "mm"],
}


@pytest.mark.parametrize(
    "how",
    [
        "first, second = torch.compile(first), torch.compile(second)",
        "first.compile(); second.compile()",
        "first.forward, second.forward = map(torch.compile(dynamic=False), "
        "(first.forward, second.forward))",
    ],
)
def test_two_blocks_are_two_calls_and_the_rest_is_eager(tmp_path: Path, how: str) -> None:
    step = captured(tmp_path, how)
    forward = groups(step, "forward")
    one, two = forward[0][1], forward[3][1]
    assert 0 < one < two
    assert forward == [(n, c) for c in (one, two) for n in BY_HAND["forward"]] + [("relu", 0)]
    backward = [pair for pair in groups(step, "backward") if pair[1]]
    # the first block's input needs no gradient: one product less
    assert backward == [(n, two) for n in (*BY_HAND["backward"], "mm")] + [
        (n, one) for n in BY_HAND["backward"]
    ]


def test_a_compiled_call_is_one_host_event_a_pass_in_place_of_pythons(tmp_path: Path) -> None:
    eager, compiled = captured(tmp_path, ""), captured(tmp_path, "first = torch.compile(first)")
    assert compiled.host["compiled_call"] == 2  # forward and backward
    assert "compiled_call" not in eager.host
    # without Block and Linear, with the module that torch.compile makes; without transposes of the
    # weight, and in backward of the result's gradient and, there and back, of the weight's
    assert compiled.host["module_call"] == eager.host["module_call"] - 2 + 1
    assert compiled.host["view_op"] == eager.host["view_op"] - 1 - 3


def test_a_compiled_step_keeps_the_events_of_its_backward(tmp_path: Path) -> None:
    """A function around forward and backward: torch breaks its graph at backward."""
    eager = captured(tmp_path, "")
    step = "x = torch.ones(4, 8).cuda()\n    torch.relu(head(second(first(x)))).sum().backward()"
    whole = TRAIN.replace(step, "one(torch.ones(4, 8).cuda())")
    how = """
@torch.compile
def one(x):
    torch.relu(head(second(first(x)))).sum().backward()
"""
    assert "one(torch" in whole
    (tmp_path / "train.py").write_text(whole.format(compile=how))
    script = Script(path=tmp_path / "train.py")
    compiled = capture_script(script, H100, 1, 1, TakenBatches()).ranks[0]
    for event in ("backward", "accumulate_grad", "zero_grad"):
        assert compiled.host[event] == eager.host[event] > 0
    assert compiled.host["module_call"] < eager.host["module_call"]


def test_only_what_one_call_launches_is_fused(tmp_path: Path) -> None:
    step = captured(tmp_path, "first, second = torch.compile(first), torch.compile(second)")
    kernels = [c for c in fused(step, apart=lambda c: not c.compiled).calls if c.op == CALL]
    # sigmoid and tanh: of each block forward, of each block backward
    assert [(k.kwargs["ops"], k.phase) for k in kernels] == [(2, "forward")] * 2 + [
        (2, "backward")
    ] * 2
    everything = [c for c in fused(step).calls if c.op == CALL]
    assert len(everything) > len(kernels)


@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "cpu"])
def test_a_timeline_of_each_op_takes_as_long_as_the_forecast(tmp_path: Path, gpu: str) -> None:
    step = captured(tmp_path, "first = torch.compile(first)")
    target = find_target(gpu, "", None)
    priced = {0: price_rank(step, target.book, None, 8, 1)}
    whole, each = (simulate_program(priced, 1.2, each_op=each_op) for each_op in (False, True))
    assert len(each[0][0].tasks) > len(whole[0][0].tasks)
    assert each[0][0].end_us == pytest.approx(whole[0][0].end_us)
    assert each[1] == pytest.approx(whole[1])
