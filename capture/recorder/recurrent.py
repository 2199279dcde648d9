"""Recurrent networks in captures: a CPU runs them step by step, a GPU as one call of cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from itercast.capture.opcall import GATES

NETWORKS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def recurrent_networks(log: Any) -> Iterator[None]:
    """Let the log number the calls of each recurrent network and of its backward."""
    functions: Any = torch._VF
    with ExitStack() as stack:
        for name in NETWORKS:
            run = partial(_run, log, name.partition("_")[0], getattr(functions, name))
            stack.enter_context(patch.object(functions, name, run))
        yield


def _run(log: Any, cell: str, run: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """Run a recurrent network, log its facts, and number its ops; ``args`` are ``torch.lstm``'s.

    Packed sequences are not logged here: they become padded ones, whose network is logged.
    """
    states, weights, _, layers, *_, bidirectional, batch_first = args
    if isinstance(states, Tensor) and states.dtype == torch.int64:
        return run(x, *args)
    steps, batch = reversed(x.shape[:2]) if batch_first else x.shape[:2]
    mixed = torch.is_autocast_enabled("cuda")
    facts = {
        "steps": steps,
        "batch": batch,
        "inputs": x.shape[2],
        "hidden": weights[1].shape[0] // GATES[cell],
        "layers": layers,
        "directions": 1 + bidirectional,
        "dtype": log.recurrent_dtype(
            torch.get_autocast_dtype("cuda") if mixed else weights[0].dtype
        ),
    }
    log.networks += [{**facts, "op": op} for op in (cell, f"{cell}_backward")]
    with log.network.stretch(len(log.networks) // 2):
        return run(x, *args)
