"""Packed sequences (``torch.nn.utils.rnn``) on fake tensors, whose lengths are known or guessed.

A recurrent layer over packed sequences is captured as a layer over sequences of equal length. It
makes as many steps as the longest sequence has, each for the mean number of sequences per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nested._internal.nested_int import NestedIntNode
from torch.utils._python_dispatch import _disable_current_modes

LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """As ``_pack_padded_sequence``: rows of all steps, and how many sequences have each step.

    ``padded`` is (steps, batch, width), or (batch, steps, width) where ``batch_first``. Rows have
    no data, so that it does not matter which are taken.
    """
    steps_of_each = lengths.tolist()
    sizes = [sum(n > step for n in steps_of_each) for step in range(max(steps_of_each))]
    rows = (padded.transpose(0, 1) if batch_first else padded).flatten(0, 1)
    with _disable_current_modes():
        return rows[: sum(sizes)].clone(), torch.tensor(sizes)


def _pad(
    data: Tensor, sizes: Tensor, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    """As ``_pad_packed_sequence``: a tensor (steps, batch, width), and lengths of the sequences.

    ``sizes``: how many sequences have each step; ``total``: steps to pad to, at least.
    """
    counts = sizes.tolist()
    steps, batch = max(total, len(counts)), counts[0]
    padding = data.new_full((steps * batch - len(data), *data.shape[1:]), value)
    padded = torch.cat([data, padding]).unflatten(0, (steps, batch))
    with _disable_current_modes():
        lengths = torch.tensor([sum(n > sequence for n in counts) for sequence in range(batch)])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _run_layer(layer: Callable[..., Any], data: Tensor, *args: Any) -> Any:
    """Run a recurrent layer; packed sequences run as if each step had the mean number of sequences.

    Arguments of a packed call begin with the number of sequences in each step. Results are padded
    to the shapes that torch returns.
    """
    if not isinstance(args[0], torch.Tensor) or args[0].dtype != torch.int64:
        return layer(data, *args)
    sizes, states, weights, *options = args
    steps, batch = len(sizes), int(sizes[0])
    mean_batch = len(data) // steps
    states = [states] if isinstance(states, torch.Tensor) else states
    first_states = [state[:, :mean_batch].contiguous() for state in states]
    rows = data[: steps * mean_batch].view(steps, mean_batch, -1)
    given = first_states if len(first_states) > 1 else first_states[0]
    output, *last_states = layer(rows, given, weights, *options, False)
    output = output.flatten(0, 1)
    padding = output[:1].expand(len(data) - len(output), -1)
    missing = batch - mean_batch
    ends = (torch.cat([s, s[:, :1].expand(-1, missing, -1)], 1) for s in last_states)
    return torch.cat([output, padding]), *ends


def attend_nested(attend: Callable[..., Tensor], *qkv: Any) -> Any:
    """Attention of jagged tensors (batch, heads, length, width), as if all had the mean length.

    Tensors have shapes and no data: rows that rounding the mean loses are copies of the first.
    """
    packed, batch = [t.transpose(1, 2) for t in qkv], qkv[0].shape[0]
    means = [len(t.values()) // batch for t in packed]
    dense = [
        t.values()[: batch * mean].unflatten(0, (batch, mean)).transpose(1, 2)
        for t, mean in zip(packed, means, strict=True)
    ]
    output = attend(*dense).transpose(1, 2).flatten(0, 1)
    padding = output[:1].expand(len(packed[0].values()) - len(output), -1, -1)
    rows = torch.cat([output, padding])
    return torch.nested.nested_tensor_from_jagged(rows, packed[0].offsets()).transpose(1, 2)


@contextmanager
def packed_sequences() -> Iterator[None]:
    """Let sequences be packed, go through recurrent layers and be unpacked inside the context."""

    def nested_int(mode: Any, *, nt_tensor_id: int | None = None) -> Any:
        return torch.SymInt(NestedIntNode(next(numbers), 1))  # as of tensors that have data

    functions: Any = torch._VF
    numbers = count(2**20)
    ours: dict[str, Any] = {name: partial(_run_layer, getattr(functions, name)) for name in LAYERS}
    ours |= {"_pack_padded_sequence": _pack, "_pad_packed_sequence": _pad}
    with (
        patch.object(FakeTensorMode, "create_symbolic_nested_int", nested_int),
        patch.multiple(functions, **ours),
    ):
        yield
