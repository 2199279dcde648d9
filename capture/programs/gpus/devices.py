"""Tensors that say they are on a GPU, while they are on the CPU and mostly fake."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from itercast.capture.recorder.fake import below_transforms
from itercast.capture.recorder.sparse import values_of

OURS = ("torch", "itercast")  # packages whose code finds tensors on the CPU, where they are
SHARDS = "torch.distributed._shard."  # but this, which compares with devices that programs name
TYPES = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
PARSE_TO = torch._C._nn._parse_to
FROM_HOST = (torch.Tensor.to, torch.tensor, torch.as_tensor)
NAMED = (torch.device, torch.Tensor.to)  # a number among their arguments may be a GPU's
OF_NUMBERS = (torch.Tensor.new_tensor, torch.Tensor.new)  # a tensor where the one is whose it is
NO_DEVICES = {FakeTensor, torch.dtype, int, float, tuple, list}
AS_IT_IS = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class GpuMemory:
    """The storages that a program has put on its GPU; in truth all are on the CPU.

    ``stream`` returns the number of the current stream. ``beside``: whether a tensor was put there
    on a stream other than the default one. ``ops``: how many ops read such a tensor; ``puts``: how
    often one was put. ``came``: called when a tensor with axes is copied there from the host.
    """

    def __init__(self, stream: Callable[[], int] = int) -> None:
        self._keys = set[int]()
        self._stream, self.beside, self.ops, self.puts = stream, False, 0, 0
        self.came: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        """Whether any tensor is on the GPU."""
        return bool(self._keys)

    def put(self, tensor: Any) -> Any:
        """Put a tensor on the GPU, as the program asks; returns the tensor."""
        self.beside |= self._stream() != 0
        self.puts += 1
        self.add(tensor)
        return tensor

    def copy(self, source: Any, tensor: Any) -> Any:
        """Put ``tensor``, made of ``source``, on the GPU; the source may be on it already."""
        if tensor.dim() and not (isinstance(source, torch.Tensor) and self.holds(source)):
            self.came()
        return self.put(tensor)

    def add(self, tensor: Any) -> None:
        """Put the memory of a tensor, or of a distributed tensor's parts, on the GPU."""
        for part in parts(tensor):
            memory = part.untyped_storage()
            if memory._cdata not in self._keys:
                self._keys.add(memory._cdata)
                weakref.finalize(memory, self._keys.discard, memory._cdata)

    def remove(self, tensor: Any) -> None:
        """Take the memory of a tensor off the GPU."""
        for part in parts(tensor):
            self._keys.discard(part.untyped_storage()._cdata)

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor was put on the GPU, or computed from one that was."""
        held = parts(tensor)
        return bool(held) and held[0].untyped_storage()._cdata in self._keys

    def follow(self, args: Any, output: Any) -> None:
        """Put the output of an op on the GPU if one of its arguments is on it."""
        if self._keys and any(map(self.holds, _tensors(args))):
            self.ops += 1
            for tensor in _tensors(output):
                self.add(tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors among an op's arguments or results, in lists too."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def parts(tensor: Any) -> list[torch.Tensor]:
    """The tensors with memory that a tensor consists of; none for one on the meta device."""
    if type(tensor) is FakeTensor and tensor.layout == torch.strided:  # ``is_meta`` is slow
        return [] if tensor.fake_device.type == "meta" else [tensor]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        held = (getattr(tensor, name) for name in names)  # a DTensor holds a mesh, too
        inner = (value for value in held if isinstance(value, torch.Tensor))
        return [part for value in inner for part in parts(value)]
    tensor = below_transforms(tensor)
    memory = tensor if tensor.is_meta else values_of(tensor)
    return [] if memory.is_meta or memory.layout != torch.strided else [memory]


@contextmanager
def tensors_on_gpus(local_rank: int, memory: GpuMemory) -> Iterator[None]:
    """Show programs ``cuda:N`` as the device of tensors they put on a GPU, and of what is computed
    from them; code inside torch still sees the CPU.
    """
    gpu = torch.device("cuda", local_rank)

    def device_property(true_device: Callable[[Any], torch.device]) -> property:
        """The GPU for tensors that the program put on it, else the true device."""

        def device(tensor: Any) -> torch.device:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            inside = caller.partition(".")[0] in OURS and not caller.startswith(SHARDS)
            return true_device(tensor) if inside or not memory.holds(tensor) else gpu

        return property(device)

    def to_gpu(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return memory.copy(tensor, tensor)

    def all_to_gpu(module: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in (*module.parameters(), *module.buffers()):
            memory.add(tensor)
        return module

    own: Any = vars(FakeTensor)["device"]
    answers: dict[str, Any] = {
        "device": device_property(AS_IT_IS),
        "is_cuda": property(memory.holds),
        "is_cpu": property(lambda tensor: not (tensor.is_meta or memory.holds(tensor))),
        "get_device": lambda tensor: local_rank if memory.holds(tensor) else -1,
        "cuda": to_gpu,
        "pin_memory": stay,
        "record_stream": stay,
        "share_memory_": stay,
    }
    set_rng_state = partial(_set_state, torch.default_generator)
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.Tensor, create=True, **answers))
        stack.enter_context(patch.object(FakeTensor, "device", device_property(own.__get__)))
        stack.enter_context(_tensors_of_libraries(memory))
        stack.enter_context(patch.object(torch.nn.Module, "cuda", all_to_gpu))
        stack.enter_context(patch.object(torch, "Generator", GeneratorOnCpu))
        for place in (torch, torch.random):
            stack.enter_context(patch.object(place, "set_rng_state", set_rng_state))
        stack.enter_context(patch.object(torch._C._nn, "_parse_to", _parse_to))
        stack.enter_context(_legacy_tensor_types(memory))
        stack.enter_context(_default_device(gpu, memory))
        stack.enter_context(_in_threads(memory))
        stack.enter_context(OnCpu(memory))
        yield


@contextmanager
def _in_threads(memory: GpuMemory) -> Iterator[None]:
    """Let threads that the program starts put tensors on the GPU, too, as those that fetch batches.

    Modes of torch are a thread's own: without ``OnCpu`` it would ask for a real GPU.
    """
    original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: Any) -> None:
        with OnCpu(memory):
            original(thread)

    with patch.object(threading.Thread, "_bootstrap_inner", bootstrap):
        yield


@contextmanager
def _tensors_of_libraries(memory: GpuMemory) -> Iterator[None]:
    """Put tensors on the GPU that libraries' own ops and classes make on one."""
    original_new, original_wrap = FakeTensor.__new__, torch.Tensor._make_wrapper_subclass

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """As ``FakeTensor``, of an op that makes it on the device of its arguments."""
        named = (*args[:2], *map(on_cpu, args[2:]))  # mode, memory, device
        tensor = original_new(cls, *named, **kwargs)
        return tensor if named == args else memory.put(tensor)

    def wrap(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """A tensor of a library's class, which is where the one inside it says it is."""
        return original_wrap(cls, *map(on_cpu, args), **{n: on_cpu(v) for n, v in kwargs.items()})

    with (
        patch.object(FakeTensor, "__new__", new),
        patch.object(torch.Tensor, "_make_wrapper_subclass", staticmethod(wrap)),
    ):
        yield


@contextmanager
def _default_device(gpu: torch.device, memory: GpuMemory) -> Iterator[None]:
    """Let ``torch.set_default_device`` and ``with torch.device`` put tensors on the emulated GPU.

    ``OnCpu`` does not see these: torch runs them below all other modes. The default device is as
    before when the context ends.
    """
    original_default, original = torch.get_default_device, _device.DeviceContext.__torch_function__
    before, constructors = original_default(), _device._device_constructors()

    def torch_function(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if mode.device.type != "cuda" or func not in constructors or (kwargs or {}).get("device"):
            return original(mode, func, types, args, kwargs)
        return memory.put(func(*args, **{**(kwargs or {}), "device": "cpu"}))

    def get_default_device() -> torch.device:
        on_gpu = torch.device("cuda") == _device.CURRENT_DEVICE
        return gpu if on_gpu else original_default()

    try:
        with (
            patch.object(_device.DeviceContext, "__torch_function__", torch_function),
            patch.object(torch, "get_default_device", get_default_device),
        ):
            yield
    finally:
        torch.set_default_device(None if before.type == "cpu" else before)


@contextmanager
def _legacy_tensor_types(memory: GpuMemory) -> Iterator[None]:
    """Let types such as ``torch.cuda.FloatTensor`` make tensors on the GPU, and name theirs.

    Also as the default type, and in ``Tensor.type``.
    """

    class LegacyType(type):
        """The class of ``torch.cuda.FloatTensor``: its instances are tensors put on the GPU."""

        on_cpu: Any

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, cls.on_cpu) and memory.holds(value)

    def make(legacy_type: Any, *args: Any) -> Any:
        return memory.put(legacy_type.on_cpu(*args))

    def set_default_tensor_type(legacy_type: Any) -> None:
        cpu_type = _cpu_type(legacy_type)
        original_set_default(cpu_type or legacy_type)
        torch.set_default_device("cuda" if cpu_type else None)

    def tensor_type(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Tensor.type``: the type's name, or a cast to one such as torch.cuda.FloatTensor."""
        cpu_type = _cpu_type(dtype)
        result: Any = original_type(tensor, cpu_type or dtype, *args, **kwargs)
        if cpu_type:
            memory.put(result)
        is_name = isinstance(result, str) and memory.holds(tensor)
        return f"torch.cuda.{result.rpartition('.')[2]}" if is_name else result

    original_type = torch.Tensor.type
    original_set_default, gpu_types = torch.set_default_tensor_type, dict[str, Any]()
    for name in (f"{prefix}Tensor" for prefix in TYPES):
        on_cpu = getattr(torch, name)
        facts = {"__new__": make, "on_cpu": on_cpu, "dtype": on_cpu.dtype, "is_cuda": True}
        gpu_types[name] = LegacyType(name, (), {**facts, "__module__": "torch.cuda"})
    with (
        patch.multiple(torch.cuda, create=True, **gpu_types),
        patch.object(torch, "set_default_tensor_type", set_default_tensor_type),
        patch.object(torch.Tensor, "type", tensor_type),
    ):
        yield


def _cpu_type(kind: Any) -> str:
    """``torch.FloatTensor`` for ``torch.cuda.FloatTensor`` (a class or its name), "" for others."""
    name = kind if isinstance(kind, str) else torch.typename(kind) if isinstance(kind, type) else ""
    return name.replace(".cuda", "") if name.startswith("torch.cuda.") else ""


def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method that changes nothing."""
    return self


def _parse_to(*args: Any, **kwargs: Any) -> Any:
    """Parse the arguments of ``Module.to`` as torch does; an integer numbers a GPU."""
    args = tuple(f"cuda:{value}" if type(value) is int else value for value in args[:1]) + args[1:]
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = f"cuda:{kwargs['device']}"
    return PARSE_TO(*args, **kwargs)


class GeneratorOnCpu(torch.Generator):
    """A generator of random numbers on the CPU, which names the device that is asked for."""

    device: Any = None

    def __new__(cls, device: Any = "cpu") -> GeneratorOnCpu:
        """As ``torch.Generator``."""
        generator = super().__new__(cls)
        generator.device = torch.device(device)
        return generator

    def set_state(self, new_state: torch.Tensor) -> torch._C.Generator:
        return _set_state(self, new_state)


def _set_state(generator: torch._C.Generator, state: torch.Tensor) -> torch._C.Generator:
    """Set a generator's state, but for one that was on a GPU: nobody knows it."""
    unknown = isinstance(state, FakeTensor)
    return generator if unknown else torch._C.Generator.set_state(generator, state)


class OnCpu(TorchFunctionMode):
    """Gives torch the CPU in place of every CUDA device, and notes which tensors are on the GPU."""

    def __init__(self, memory: GpuMemory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch with the CPU in place of a GPU; its result is put on the GPU."""
        if func in OF_NUMBERS and not (kwargs or {}).get("device") and self.memory.holds(args[0]):
            return self.memory.put(func(*args, **(kwargs or {})))
        if not kwargs and func not in NAMED and NO_DEVICES.issuperset(map(type, args)):
            return func(*args)
        kwargs = dict(kwargs or {})
        if func is torch.device:  # a program may look at the name of its device
            by_number = args and isinstance(args[0], int)
            return func("cuda", *args) if by_number else func(*args, **kwargs)
        if getattr(func, "__name__", "") == "_parse_to":  # of Module.to, which then asks Tensor.to
            return func(*args, **kwargs)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], f"cuda:{args[1]}", *args[2:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = f"cuda:{kwargs['device']}"
        if getattr(func, "__name__", "") == "tensor":  # which would pin data that is there
            kwargs.pop("pin_memory", None)
        values = (*args, *kwargs.values())
        result = func(*map(on_cpu, args), **{name: on_cpu(v) for name, v in kwargs.items()})
        if isinstance(result, torch.Tensor) and any(on_cpu(v) is not v for v in values):
            if func in FROM_HOST:
                return self.memory.copy(values[0], result)
            self.memory.put(result)
        return result


def on_cpu(value: Any) -> Any:
    """The CPU in place of a CUDA device (or its name); other values as they are."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value
