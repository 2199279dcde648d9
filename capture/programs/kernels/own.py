"""Kernels that programs wrote in Triton or CUDA: they run nothing, and are logged."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import cpp_extension
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.collectives import tensors_in
from itercast.capture.programs.kernels.libraries import FUSED
from itercast.capture.programs.log import ProgramLog

# What packages compile for CUDA: they can be installed without, where there is no CUDA.
COMPILED = ("flash_attn_2_cuda", "adam_atan2_backend")
WITHOUT_CUDA = {  # Dao-AILab/flash-attention, setup.py
    "flash_attn": "FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "
    "pip install --no-deps --no-build-isolation flash-attn"
}


@contextmanager
def own_kernels(log: ProgramLog) -> Iterator[None]:
    """Log each launch of a program's Triton or CUDA kernels as one pass over its arguments.

    This is a guess. Functions of CUDA extensions are logged alike, except ``multi_tensor_adam``.
    Nothing is compiled or run.
    """

    def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Log a launch as a fused kernel over all argument tensors, as long as the largest."""
        tensors = tensors_in((args, kwargs))
        numel = max((t.numel() for t in tensors), default=0)
        log.add(FUSED, tuple(tensors), {"ops": 1, "numel": numel}, ())
        with _disable_current_modes():
            log.routing.may_fill(tensors)
        guess = "kernels in Triton or CUDA are taken to pass over their arguments once"
        log.guesses.setdefault(guess, traceback.extract_stack())

    def run_first_config(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **(kwargs | tuner.configs[0].all_kwargs()))

    class CompiledKernel:  # as ``torch.cuda._compile_kernel`` returns
        def __init__(self, *args: Any, **options: Any) -> None: ...
        def set_shared_memory_config(self, nbytes: int) -> None: ...

        __call__ = launched

    class Extension(ModuleType):  # whose functions are launches
        multi_tensor_adam = staticmethod(_multi_tensor_adam)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return partial(launched, name)

    def load_extension(load: Any, name: str, sources: Any, *args: Any, **options: Any) -> Any:
        files = [sources] if isinstance(sources, str) else sources
        in_cuda = options.get("with_cuda") or options.get("cuda_sources")
        if in_cuda or any(str(file).endswith(".cu") for file in files):
            return Extension(name)
        return load(name, sources, *args, **options)

    with ExitStack() as stack:
        kernels = patch.object(torch.cuda, "_compile_kernel", CompiledKernel, create=True)
        stack.enter_context(kernels)
        for name in COMPILED:
            if name not in sys.modules and find_spec(name) is None:
                sys.modules[name] = Extension(name)
                stack.callback(sys.modules.pop, name)
        for load in (cpp_extension.load, cpp_extension.load_inline):
            loading = partial(load_extension, load)
            stack.enter_context(patch.object(cpp_extension, load.__name__, loading))
        if find_spec("triton") is not None:
            from triton.backends.nvidia import driver
            from triton.runtime.autotuner import Autotuner
            from triton.runtime.jit import JITFunction

            stack.enter_context(patch.object(driver, "libcuda_dirs", list))
            stack.enter_context(patch.object(JITFunction, "run", launched))
            stack.enter_context(patch.object(Autotuner, "run", run_first_config))
        yield


def _multi_tensor_adam(chunk: int, overflow: Any, lists: Any, *numbers: float) -> None:
    """DeepSpeed's FusedAdam kernel, run as torch's fused Adam: both read and write the same.

    ``lists``: of gradients, parameters and the two moments; learning rates change no time.
    """
    gradients, parameters, means, squares = lists
    steps = [torch.tensor(1.0) for _ in parameters]
    rates: Any = dict.fromkeys(("lr", "beta1", "beta2", "weight_decay", "eps"), 0.0)
    rates |= {"amsgrad": False, "maximize": False}
    torch._fused_adamw_(parameters, gradients, means, squares, [], steps, **rates)
