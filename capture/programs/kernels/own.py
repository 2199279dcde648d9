"""Kernels that programs wrote in Triton or CUDA: they run nothing, and are logged."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._pytree import tree_leaves

from itercast.capture.programs.kernels.libraries import FUSED
from itercast.capture.programs.log import ProgramLog


@contextmanager
def own_kernels(log: ProgramLog) -> Iterator[None]:
    """Log a launch of a kernel as a pass over its arguments, which is a guess."""

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        numel = max((t.numel() for t in tensors), default=0)
        log.add(FUSED, tuple(tensors), {"ops": 1, "numel": numel}, ())
        guess = "kernels in Triton or CUDA are taken to pass over their arguments once"
        log.guesses.setdefault(guess, traceback.extract_stack())

    def first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **(kwargs | tuner.configs[0].all_kwargs()))

    class Compiled:  # as of a source that torch gives to CUDA's compiler
        def __init__(self, *args: Any, **options: Any) -> None: ...
        def set_shared_memory_config(self, nbytes: int) -> None: ...

        __call__ = launched

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "_compile_kernel", Compiled, create=True))
        if find_spec("triton") is not None:
            from triton.runtime.autotuner import Autotuner
            from triton.runtime.jit import JITFunction

            stack.enter_context(patch.object(JITFunction, "run", launched))
            stack.enter_context(patch.object(Autotuner, "run", first))
        yield
