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
Known = Callable[[Tensor], Tensor | None]  # the values of a fake tensor


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, known: Known) -> None:
        super().__init__(file)
        self._known = known

    def reducer_override(self, value: Any) -> Any:
        fake = isinstance(value, FakeTensor)
        if not fake and type(value) is not Tensor:  # a loader's small integers are real ones
            return NotImplemented
        gpu = value.get_device()  # ``device`` is the CPU here
        place = f"cuda:{gpu}" if gpu >= 0 else str(value.device)
        numbers = self._known(value) if fake else value
        if numbers is None or value.requires_grad:
            return _restored, (place, *value.__reduce_ex__(2))
        with _disable_current_modes():
            wide = numbers.float() if numbers.dtype == torch.bfloat16 else numbers
            return _restored, (place, _counted, (wide.numpy(), numbers.dtype))


def _restored(device: str, make: Callable[..., Tensor], form: Any) -> Tensor:
    """A tensor where it was, or where it is loaded to."""
    with torch.device(place_of(device)):
        return make(*form)


def _counted(numbers: Any, dtype: torch.dtype) -> Tensor:
    return torch.as_tensor(numbers, dtype=dtype)


def _opened(file: Any, mode: str) -> AbstractContextManager[Any]:
    named = isinstance(file, str | os.PathLike)
    return open(file, mode) if named else nullcontext(file)


def _save(known: Known, obj: object, f: Any, *args: Any, **options: Any) -> None:
    """As ``torch.save``; what holds more here than on GPUs, as FSDP's groups, is not written."""
    made = BytesIO()
    with suppress(TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        _Pickler(made, known).dump(obj)
    with _opened(f, "wb") as file:
        file.write(OURS + made.getvalue())


def _load(
    load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **options: Any
) -> Any:
    """As ``torch.load``."""
    with _opened(f, "rb") as file:
        start = file.tell()
        if file.read(len(OURS)) == OURS:
            with patch.object(_serialization_tls, "map_location", map_location):
                return pickle.load(file)
        file.seek(start)
    return load(f, map_location, *args, **options)


@contextmanager
def saved_for_loading(known: Known) -> Iterator[None]:
    """Let ``torch.save`` write what ``torch.load`` reads again, inside the context."""
    both: dict[str, Any] = {"save": partial(_save, known), "load": partial(_load, torch.load)}
    with patch.multiple(torch, **both):
        yield
