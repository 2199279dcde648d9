"""Tensors that say they are on a GPU, while they are fake, or small, and on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

OURS = ("torch", "itercast")  # packages whose code finds tensors on the CPU, where they are
PARSE_TO = torch._C._nn._parse_to
AS_IT_IS = torch.Tensor.device.__get__  # type: ignore[attr-defined]


@contextmanager
def tensors_on_gpus(local_rank: int) -> Iterator[None]:
    """Let programs find their tensors on this rank's GPU inside the context.

    Wherever they are put, fake tensors read ``cuda:N``, and so do those with data (small integers)
    that were moved to a GPU. Torch itself finds all of them on the CPU.
    """
    moved: Any = WeakIdKeyDictionary()
    gpu = torch.device("cuda", local_rank)

    def is_on_gpu(tensor: Any) -> bool:
        if isinstance(tensor, FakeTensor):
            return not tensor.is_meta
        return tensor in moved or is_traceable_wrapper_subclass(tensor)

    def read(place: Callable[[Any], torch.device]) -> property:
        def device(tensor: Any) -> torch.device:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            return place(tensor) if caller in OURS or not is_on_gpu(tensor) else gpu

        return property(device)

    def to_gpu(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        moved[tensor] = True
        return tensor

    own: Any = vars(FakeTensor)["device"]
    answers: dict[str, Any] = {
        "device": read(AS_IT_IS),
        "is_cuda": property(is_on_gpu),
        "is_cpu": property(lambda tensor: not is_on_gpu(tensor)),
        "get_device": lambda tensor: local_rank if is_on_gpu(tensor) else -1,
        "cuda": to_gpu,
        "pin_memory": stay,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.Tensor, create=True, **answers))
        stack.enter_context(patch.object(FakeTensor, "device", read(own.__get__)))
        stack.enter_context(patch.object(torch.nn.Module, "cuda", stay))
        stack.enter_context(patch.object(torch, "Generator", GeneratorOnCpu))
        stack.enter_context(patch.object(torch._C._nn, "_parse_to", _parse_to))
        stack.enter_context(OnCpu(to_gpu))
        yield


def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that changes nothing."""
    return self


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """What ``Module.to`` makes of its arguments; the number of a GPU is a device."""
    args = tuple("cpu" if isinstance(value, int) else value for value in args[:1]) + args[1:]
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = "cpu"
    return PARSE_TO(*args, **kwargs)


class GeneratorOnCpu(torch.Generator):
    """A generator of random numbers on the CPU, which names the device that is asked for."""

    device: Any = None

    def __new__(cls, device: Any = "cpu") -> GeneratorOnCpu:
        """As ``torch.Generator``."""
        made = super().__new__(cls)
        made.device = torch.device(device)
        return made


class OnCpu(TorchFunctionMode):
    """Takes every CUDA device that torch is given as the CPU; ``moved`` is told what went there."""

    def __init__(self, moved: Callable[[Any], object]) -> None:
        super().__init__()
        self.moved = moved

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:  # a program may look at the name of its device
            return func("cuda", *args) if isinstance(args[0], int) else func(*args, **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], f"cuda:{args[1]}", *args[2:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = f"cuda:{kwargs['device']}"
        values = (*args, *kwargs.values())
        made = func(*map(_on_cpu, args), **{name: _on_cpu(v) for name, v in kwargs.items()})
        if type(made) is torch.Tensor and any(_on_cpu(value) is not value for value in values):
            self.moved(made)
        return made


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
