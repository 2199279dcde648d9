"""What scripts copy to host memory and compute there, counted by hand."""

from pathlib import Path

import pytest
from small_scripts import ITEM, captured, written

from itercast.capture.opcall import OpCall
from itercast.capture.programs.program import HOST_COPY, HOST_WAIT, ON_CPU

LOOP = """
import torch
from torch.autograd.graph import save_on_cpu
model = torch.nn.Linear(8, 16, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
BEFORE
for step in range(5):
    x = torch.randn(4, 8, device="cuda")
    FORWARD
    loss.backward()
    UPDATE
    optimizer.zero_grad()
"""
AVERAGE = "average = model.weight.detach().cpu().clone()"
AVERAGED = "optimizer.step(); average.lerp_(model.weight.detach().to('cpu'), 0.1)"
PINNED = """
weights = torch.empty_like(model.weight, device="cpu", pin_memory=True).copy_(model.weight.detach())
gradient = torch.empty(16, 8, pin_memory=True)
assert torch.tensor([2, 3], device="cpu", pin_memory=True).tolist() == [2, 3]
weights.requires_grad_()
optimizer = torch.optim.SGD([weights])
"""
ON_HOST = """
    gradient.copy_(model.weight.grad, non_blocking=True)
    torch.cuda.synchronize()
    weights.grad = gradient
    optimizer.step()
    model.weight.detach().copy_(weights.detach(), non_blocking=True)
    model.weight.grad = None
"""
SAVED = "with save_on_cpu(): loss = model(x).sum()"


def calls_of(
    folder: Path, before: str = "", forward: str = "", update: str = "optimizer.step()"
) -> tuple[OpCall, ...]:
    """A step of the loop with these lines."""
    text = LOOP.replace("BEFORE", before).replace("UPDATE", update.strip())
    text = text.replace("FORWARD", forward or "loss = model(x).sum()")
    calls: tuple[OpCall, ...] = captured(written(folder, text), gpus=1).ranks[0].calls
    return calls


def copies(calls: tuple[OpCall, ...]) -> list[tuple[str, int]]:
    return [(c.args[0], c.args[1]) for c in calls if c.op == HOST_COPY]


def on_cpu(calls: tuple[OpCall, ...]) -> list[str]:
    return [c.op for c in calls if c.stream == ON_CPU]


def test_an_average_in_host_memory_is_the_cpu_s(tmp_path: Path) -> None:
    """512 bytes of 128 weights come each step, for which the host waits; the CPU averages them."""
    calls = calls_of(tmp_path, AVERAGE, update=AVERAGED)
    assert copies(calls) == [("d2h", 512)]
    assert [c.op for c in calls].count(HOST_WAIT) == 1
    assert on_cpu(calls) == ["aten.lerp_.Scalar"]


def test_what_torch_itself_asks_for_is_where_its_tensors_are(tmp_path: Path) -> None:
    """Clipping moves its factor to where gradients are, which torch finds on the CPU here."""
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    calls = calls_of(tmp_path, AVERAGE, update=f"{clip}; {AVERAGED}")
    assert copies(calls) == [("d2h", 512)]
    assert on_cpu(calls) == ["aten.lerp_.Scalar"]


def test_an_optimizer_in_host_memory_gets_gradients_and_sends_weights(tmp_path: Path) -> None:
    """As torchao's CPUOffloadOptimizer: gradients into pinned memory, weights back.

    A step ends with the optimizer's, so that weights are sent at the begin of the next one.
    """
    calls = calls_of(tmp_path, PINNED, update=ON_HOST)
    assert copies(calls) == [("h2d", 512), ("d2h", 512)]
    assert on_cpu(calls) == ["aten._foreach_add_.List"]


@pytest.mark.parametrize("pinned", ["", "pin_memory=True"])
def test_what_backward_keeps_in_host_memory_goes_and_comes_back(
    tmp_path: Path, pinned: str
) -> None:
    """A product keeps its input of 4 x 8 numbers, 128 bytes; its weights' gradient alone reads."""
    calls = calls_of(tmp_path, forward=SAVED.replace("save_on_cpu()", f"save_on_cpu({pinned})"))
    assert copies(calls) == [("d2h", 128), ("h2d", 128)]
    assert [c.op for c in calls].count(HOST_WAIT) == (1 if pinned else 2)
    assert not on_cpu(calls)


def test_a_number_that_was_copied_to_the_host_is_read_without_waiting(tmp_path: Path) -> None:
    calls = calls_of(tmp_path, update="optimizer.step(); print(loss.detach().cpu().item())")
    assert copies(calls) == [("d2h", 4)]
    assert ITEM not in [c.op for c in calls]
    assert ITEM in [c.op for c in calls_of(tmp_path, update="optimizer.step(); loss.item()")]


STATE = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
dist.init_process_group("nccl")
def each(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, nn.Linear)
net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
model = FSDP(net, device_id=0, use_orig_params="whole" in sys.argv, auto_wrap_policy=each)
optimizer = torch.optim.SGD(model.parameters())
for step in range(5):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    whole = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):
        assert model.state_dict()["0.weight"].shape == (64, 64)
"""


@pytest.mark.parametrize("words", [(), ("whole",)])
def test_fsdp_copies_whole_parameters_of_a_state_dict_to_the_host(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """Two layers of 64 x 64 + 64 numbers in fp32, one after the other, there and back."""
    calls = captured(written(tmp_path, STATE), *words, gpus=8).ranks[0].calls
    assert copies(calls) == 2 * [("d2h", 4 * 4160), ("h2d", 4 * 4160)]
