"""Kernels that programs wrote in Triton: on fake tensors they run nothing, and are logged."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch

from itercast.capture.programs.log import ProgramLog

FUSED = "itercast.fused"  # a kernel that passes over tensors


@contextmanager
def triton_kernels(log: ProgramLog) -> Iterator[None]:
    """Log a launch of a Triton kernel as a pass over its arguments, which is a guess."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        numel = max((t.numel() for t in tensors), default=0)
        log.add(FUSED, tuple(tensors), {"ops": 1, "numel": numel}, ())
        guess = "kernels in Triton are taken to pass over their arguments once"
        log.guesses.setdefault(guess, traceback.extract_stack())

    def first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **(kwargs | tuner.configs[0].all_kwargs()))

    with patch.object(JITFunction, "run", launched), patch.object(Autotuner, "run", first):
        yield
