"""Habits of scripts: masks and shapes over unknown data, packed sequences, devices, weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from small_scripts import captured, written

from itercast.compose.pricing.priced_op import priceable
from itercast.microbench.programs.program import COLLECTIVE, ProgramCapture

HEAD = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
net, lstm = torch.nn.Linear(16, 8).cuda(), torch.nn.LSTM(8, 4).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *lstm.parameters()])
x = torch.randn(100, 16, device="cuda")
for step in range(3):
    y = net(x)
"""


def habit(folder: Path, text: str, gpus: int = 1) -> ProgramCapture:
    """A training loop with lines of its own, in which ``y`` is (100, 8) and unknown."""
    lines = "".join(f"    {line}\n" for line in text.strip().splitlines())
    path = written(folder, HEAD + lines + "    y.sum().backward(); optimizer.step()\n")
    return captured(path, gpus=gpus)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("y = y[y[:, 0] > 0] * 2.5", (50, 8)),
        ("keep = y[:, 0] > 0; y = y[keep] * 2.5; assert len(y) == keep.sum().item()", (50, 8)),
        ("y = y[(y[:, 0] > 0) & (y[:, 1] > 0)] * 2.5", (25, 8)),
        ("y = torch.masked_select(y, y > 0) * 2.5", (400,)),
        ("(i,) = torch.where(y[:, 0] > 0); y = y[i] * 2.5", (50, 8)),
        ("k, i = y[:, 0].long().unique(return_inverse=True); y = y[i][k] * 2.5", (50, 8)),
        ("y = y.repeat_interleave((y[:, 0] * 9).long(), 0) * 2.5", (100, 8)),
        ("n = y[:, 0].long().bincount(minlength=4).tolist(); y = y.split(n)[0] * 2.5", (25, 8)),
    ],
)
def test_unknown_data_take_a_stated_share(
    tmp_path: Path, text: str, shape: tuple[int, ...]
) -> None:
    """Of 100 rows half pass a test, a quarter two; of 100 values half differ; repeats are one.

    The host waits for the number of rows. What was taken is said once, with its line.
    """
    program = habit(tmp_path, text)
    calls = program.ranks[0].calls
    assert [c.outputs[0].shape for c in calls if 2.5 in c.args] == 2 * [shape]
    assert any(priceable(c).waits for c in calls)
    (note,) = program.notes
    assert note.startswith("of data that nobody knows 50 % is true") and "train.py:9" in note


def test_a_number_or_condition_that_shapes_nothing_is_not_noted(tmp_path: Path) -> None:
    program = habit(tmp_path, "print(y.sum().item()); y = torch.where(y > 0, y, 0.0)")
    assert not program.notes


def test_packed_sequences(tmp_path: Path) -> None:
    """Lengths 5, 3 and 2: ten rows, an LSTM of five steps over two sequences, padded to 3 x 5."""
    lines = """
packed = pack_padded_sequence(y[:15].view(3, 5, 8), [5, 3, 2], batch_first=True)
rows, last = lstm(packed)
y, lengths = pad_packed_sequence(rows, batch_first=True)
assert lengths.tolist() == [5, 3, 2] and y.shape == (3, 5, 4) and last[0].shape == (1, 3, 4)
assert rows.data.shape == (10, 4) and rows.batch_sizes.tolist() == [3, 3, 2, 1, 1]
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    layers = [c.tensors()[0].shape for c in calls if "rnn_layer.default" in c.op]
    assert layers == [(5, 2, 8)]


def test_tensors_say_that_they_are_on_a_gpu_and_weights_are_read(tmp_path: Path) -> None:
    """Also those that come from a file of weights; numbers of real data are none of them."""
    import torch

    save_file({"weight": torch.ones(8, 16)}, tmp_path / "weights.safetensors")
    lines = f"""
from safetensors.torch import load_file
weights = load_file({str(tmp_path / "weights.safetensors")!r})
assert y.is_cuda and net.weight.is_cuda and weights["weight"].is_cuda
net.load_state_dict({{**net.state_dict(), **weights}})
y = y @ weights["weight"] * 2.5
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    assert [c.outputs[0].shape for c in calls if 2.5 in c.args] == 2 * [(100, 16)]


def test_jagged_sequences_attend_as_those_of_mean_length(tmp_path: Path) -> None:
    """Lengths 4 and 2 in two heads of width 4: (2, 2, 3, 4)."""
    lines = """
q = torch.nested.as_nested_tensor([y[:4], y[4:6]], layout=torch.jagged)
q = q.unflatten(-1, [2, 4]).transpose(1, 2)
y = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2).values()
assert y.shape == (6, 8)
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    taken = [(c.phase, c.tensors()[0].shape) for c in calls if "itercast.sdpa" in c.op]
    assert taken == [("forward", (2, 2, 3, 4)), ("backward", (2, 2, 3, 4))]
    assert not any("dtensor_op" in c.args for c in calls)


def test_a_number_that_nobody_knows_equals_no_other(tmp_path: Path) -> None:
    """So that text goes on until its longest length; the condition is noted."""
    program = habit(tmp_path, "ids = y[:, 0].long(); assert ids.max() != 0; assert not ids[0] == 7")
    (note,) = program.notes
    assert "nobody knows" in note


def test_ranks_send_each_other_the_numbers_of_tokens_that_they_have(tmp_path: Path) -> None:
    """100 tokens for four experts on four ranks: 25 to each, 25 from each, 100 in all."""
    lines = """
import torch.distributed as dist
dist.is_initialized() or dist.init_process_group("nccl")
counts = y[:, :4].argmax(1).bincount(minlength=4)
arriving = torch.empty_like(counts)
dist.all_to_all_single(arriving, counts)
assert arriving.tolist() == counts.tolist() == [25] * 4
rows = y.new_empty(sum(arriving.tolist()), 8)
dist.all_to_all_single(rows, y.detach(), arriving.tolist(), counts.tolist())
"""
    calls = habit(tmp_path, lines, gpus=4).ranks[0].calls
    sent = [(c.kwargs["kind"], c.kwargs["bytes"]) for c in calls if c.op == COLLECTIVE]
    assert sent == [("all_to_all", 4 * 8), ("all_to_all", 100 * 8 * 4)]
