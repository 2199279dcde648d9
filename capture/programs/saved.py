"""What a script saves by ``torch.save`` it can load: tensors keep their form, and known values.

The files hold no data beside these, and are removed when the script ends (``kept_files``).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from io import BytesIO
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.serialization import _serialization_tls
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.programs.gpus.loaded import place_of
from itercast.capture.programs.kept_files import MARK

OURS = MARK + os.urandom(16)  # no other file is unpickled whatever it holds
KnownValues = Callable[[Tensor], Tensor | None]  # the values of a fake tensor


class _Pickler(pickle.Pickler):
    """Pickles fake tensors by shape, dtype and device, with their values where they are known."""

    def __init__(self, file: Any, known_values: KnownValues) -> None:
        super().__init__(file)
        self._known_values = known_values

    def reducer_override(self, value: Any) -> Any:
        """How a tensor is made again, as pickle asks: a function and its arguments."""
        fake = isinstance(value, FakeTensor)
        if not fake and type(value) is not Tensor:  # a loader's small integers are real ones
            return NotImplemented
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


def _with_values(numbers: Any, dtype: torch.dtype) -> Tensor:
    """A tensor of NumPy's numbers."""
    return torch.as_tensor(numbers, dtype=dtype)


def _opened(file: Any, mode: str) -> AbstractContextManager[Any]:
    """A path opened, or a file that is open already and stays so."""
    is_path = isinstance(file, str | os.PathLike)
    return open(file, mode) if is_path else nullcontext(file)


def _save(known_values: KnownValues, obj: object, f: Any, *args: Any, **options: Any) -> None:
    """As ``torch.save``; an object that cannot be pickled here (FSDP's groups) leaves a part."""
    data = BytesIO()
    with suppress(TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        _Pickler(data, known_values).dump(obj)
    with _opened(f, "wb") as file:
        file.write(OURS + data.getvalue())


def _load(
    load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **options: Any
) -> Any:
    """As ``torch.load``; files of ``_save`` are unpickled, others are read by ``load``."""
    with _opened(f, "rb") as file:
        start = file.tell()
        if file.read(len(OURS)) == OURS:
            with patch.object(_serialization_tls, "map_location", map_location):
                return pickle.load(file)
        file.seek(start)
    return load(f, map_location, *args, **options)


@contextmanager
def saved_for_loading(known_values: KnownValues) -> Iterator[None]:
    """Let ``torch.save`` write what ``torch.load`` reads again, inside the context."""
    both: dict[str, Any] = {
        "save": partial(_save, known_values),
        "load": partial(_load, torch.load),
    }
    with patch.multiple(torch, **both):
        yield
