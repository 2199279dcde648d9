"""Lets a script load what it saves: tensors keep shape, dtype and device, and known values.

It covers ``torch.save``, modules given to ``torch.jit`` (``replaced.scripted``), safetensors and
``torch.distributed.checkpoint``. The files hold no other data, and are removed when the script ends
(``kept_files``).
"""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.nn import Parameter
from torch.serialization import _serialization_tls
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.programs.gpus.loaded import READ, place_of
from itercast.capture.programs.kept_files import MARK
from itercast.capture.recorder.facts import Known, is_small_integer
from itercast.capture.recorder.fake import fake_tensor
from itercast.capture.recorder.replaced.scripted import is_scripted, scripted

OURS = MARK + os.urandom(16)  # no other file is unpickled whatever it holds
KnownValues = Callable[[Tensor], Tensor | None]  # the values of a fake tensor
SCRIPTED = list[torch.nn.Module]()  # modules in files, which cannot be made of their Python again
DISTRIBUTED = ".metadata"  # the file by which torch.distributed.checkpoint knows its folders


class _Pickler(pickle.Pickler):
    """Pickles fake tensors by shape, dtype and device, with their values where these are known.

    A module given to ``torch.jit`` is pickled as its number in ``SCRIPTED``: its code cannot be.
    """

    def __init__(self, file: Any, known_values: KnownValues) -> None:
        super().__init__(file)
        self._known_values = known_values
        self.sizes = dict[int, int]()  # bytes of storages, by their address

    def reducer_override(self, value: Any) -> Any:
        """How pickle makes a value again: a function and its arguments."""
        if is_scripted(value):
            SCRIPTED.append(copy.deepcopy(value))
            return _scripted, (len(SCRIPTED) - 1,)
        fake = isinstance(value, FakeTensor)
        if not fake and type(value) is not Tensor:  # a loader's small integers are real ones
            return NotImplemented
        storage = value.untyped_storage()
        self.sizes[storage._cdata] = storage.nbytes()
        gpu = value.get_device()  # ``device`` is the CPU here
        place = f"cuda:{gpu}" if gpu >= 0 else str(value.device)
        numbers = self._known_values(value) if fake else value
        if numbers is None or value.requires_grad:
            return _restored, (place, *value.__reduce_ex__(2))
        with _disable_current_modes():
            wide = numbers.float() if numbers.dtype == torch.bfloat16 else numbers  # for NumPy
            return _restored, (place, _with_values, (wide.numpy(), numbers.dtype))


def _restored(device: str, make: Callable[..., Tensor], arguments: Any) -> Tensor:
    """Make a tensor on the device where it was saved, or where ``map_location`` puts it."""
    with torch.device(place_of(device)):
        return make(*arguments)


def _scripted(number: int) -> torch.nn.Module:
    """A copy of a module given to ``torch.jit``, as it was when it was saved."""
    module = copy.deepcopy(SCRIPTED[number])
    scripted(module)  # a copy of a GraphModule has no marks
    return module


def _with_values(numbers: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of NumPy's numbers."""
    return torch.as_tensor(numbers, dtype=dtype)


def _opened(file: Any, mode: str) -> AbstractContextManager[Any]:
    """A path opened, or a file that is open already and stays so."""
    is_path = isinstance(file, str | os.PathLike)
    return open(file, mode) if is_path else nullcontext(file)


def _save(
    known_values: KnownValues,
    note: Callable[[int], None],
    obj: object,
    f: Any,
    *args: Any,
    **options: Any,
) -> None:
    """As ``torch.save``; where an object cannot be pickled (FSDP's groups), the file ends early.

    ``note`` is given the bytes of its tensors.
    """
    pickler = _Pickler(data := BytesIO(), known_values)
    with suppress(TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        pickler.dump(obj)
    note(sum(pickler.sizes.values()))
    with _opened(f, "wb") as file:
        file.write(OURS + data.getvalue())


def _load(
    keep: Callable[[Tensor, Tensor], None],
    load: Callable[..., Any],
    f: Any,
    map_location: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """As ``torch.load``; files of ``_save`` are unpickled, others are read by ``load``."""
    with _opened(f, "rb") as file:
        start = file.tell()
        if file.read(len(OURS)) == OURS:
            with patch.object(_serialization_tls, "map_location", map_location):
                return pickle.load(file)
        file.seek(start)
        before = READ.set((file, keep))
        try:
            return load(f, map_location, *args, **options)
        finally:
            READ.reset(before)


def _is_ours(file: Any) -> bool:
    with _opened(file, "rb") as opened:
        return bool(opened.read(len(OURS)) == OURS)


class _Opened:
    """As ``safetensors.safe_open`` of a file of ours."""

    def __init__(self, file: Any, device: Any) -> None:
        place = f"cuda:{device}" if isinstance(device, int) else device
        self._tensors, self._metadata = torch.load(file, map_location=place)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is open."""

    def keys(self) -> list[str]:
        return sorted(self._tensors)

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        metadata: dict[str, str] | None = self._metadata
        return metadata

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor

    def get_tensors(self) -> dict[str, Tensor]:
        return {name: self.get_tensor(name) for name in self._tensors}

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.get_tensor(name))


class _Unread(_Opened):
    """As ``safe_open`` of a file not written here: floats are empty, integers read on demand.

    safetensors itself (``read``) would map the whole file, and a GPU's memory by address.
    """

    def __init__(self, file: Any, device: Any, read: Callable[..., Any]) -> None:
        with open(file, "rb") as opened:
            self._tensors = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        self._metadata = self._tensors.pop("__metadata__", None)
        self._place = torch.device(device)
        self._opened = partial(read, file, "pt")

    def get_tensor(self, name: str) -> Tensor:
        from safetensors.torch import _TYPES

        dtype: Any = _TYPES[self._tensors[name]["dtype"]]
        if dtype.is_floating_point:
            return torch.empty(self._tensors[name]["shape"], dtype=dtype, device=self._place)
        with _disable_current_modes(), self._opened() as opened:
            tensor: Tensor = opened.get_tensor(name)
        known = is_small_integer(tensor)
        return (tensor if known else fake_tensor(tensor, None)).to(self._place)


class _Slice:
    """As a slice of safetensors, which gives parts of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        from safetensors.torch import _TYPES

        return next(name for name, dtype in _TYPES.items() if dtype == self._tensor.dtype)


@contextmanager
def _safetensors(save: Callable[..., None]) -> Iterator[None]:
    """Let safetensors write what ``torch.save`` would, and read it again."""
    import safetensors
    import safetensors.torch as library

    original_open, loads = safetensors.safe_open, library.load
    check = getattr(library, "_evaluate_tensors_for_save", id)
    flatten = next(name for name in ("_flatten_as_ptr", "_flatten") if hasattr(library, name))

    def flattened(tensors: dict[str, Tensor], *args: Any) -> dict[str, Tensor]:
        check(tensors)  # refuses those that share memory
        return tensors

    def serialize_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        save((tensors, metadata), filename)

    def serialize(tensors: Any, metadata: Any = None) -> bytes:
        serialize_file(tensors, buffer := BytesIO(), metadata)
        return buffer.getvalue()

    def safe_open(file: Any, framework: str, device: Any = "cpu", **more: Any) -> Any:
        if framework == "pt" and _is_ours(file):
            return _Opened(file, device)
        if framework == "pt" and torch._guards.detect_fake_mode(None):
            return _Unread(file, device, original_open)
        return original_open(file, framework, device, **more)

    def load(data: bytes) -> dict[str, Tensor]:
        return _Opened(BytesIO(data), "cpu").get_tensors() if data.startswith(OURS) else loads(data)

    new: dict[str, Any] = {"serialize_file": serialize_file, "serialize": serialize}
    new |= {flatten: flattened, "load": load, "safe_open": safe_open}
    with patch.multiple(library, **new), patch("safetensors.safe_open", safe_open):
        yield


def _saves_distributed(state_dict: Any, storage_writer: Any, *args: Any, **options: Any) -> None:
    """As ``torch.distributed.checkpoint.save``, into one file, without sharded tensors' data."""
    if (folder := getattr(storage_writer, "path", None)) is None:
        return
    flat, _ = flatten_state_dict(state_dict)
    plain = {name: None if _is_sharded(value) else value for name, value in flat.items()}
    os.makedirs(folder, exist_ok=True)
    torch.save(plain, os.path.join(folder, DISTRIBUTED))


def _is_sharded(value: object) -> bool:
    return isinstance(value, Tensor) and type(value) not in (Tensor, FakeTensor, Parameter)


def _loads_distributed(
    load: Callable[..., None],
    state_dict: Any,
    storage_reader: Any,
    *args: Any,
    planner: Any = None,
    **options: Any,
) -> None:
    """As ``torch.distributed.checkpoint.load``: tensors stay as they are, but for known values."""
    file = os.path.join(getattr(storage_reader, "path", ""), DISTRIBUTED)
    if not (os.path.isfile(file) and _is_ours(file)):
        load(state_dict, storage_reader, *args, planner=planner, **options)
        return
    saved, (flat, places) = torch.load(file), flatten_state_dict(state_dict)
    for name, value in flat.items():
        if name not in saved:
            if getattr(planner, "allow_partial_load", False):
                continue
            raise RuntimeError(f"Missing key in checkpoint state_dict: {name}.")
        if not isinstance(value, Tensor):
            set_element(state_dict, places[name], saved[name])
        elif isinstance(saved[name], Tensor) and not _is_sharded(value):
            with torch.no_grad():
                value.copy_(saved[name])


@contextmanager
def saved_for_loading(known: Known, note: Callable[[int], None]) -> Iterator[None]:
    """Let a script read again what it saves, inside the context; ``note`` is given its bytes."""
    save, read = partial(_save, known.known_values, note), partial(_load, known.keep)
    load = partial(_loads_distributed, state_dict_loader._load_state_dict)
    with ExitStack() as stack:
        for context in (
            patch.multiple(torch, save=save, load=partial(read, torch.load)),
            patch.multiple(torch.jit, save=save, load=partial(read, torch.jit.load)),
            patch.object(state_dict_saver, "_save_state_dict", _saves_distributed),
            patch.object(state_dict_loader, "_load_state_dict", load),
        ):
            stack.enter_context(context)
        if find_spec("safetensors"):
            stack.enter_context(_safetensors(save))
        yield
