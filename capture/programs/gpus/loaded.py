"""``torch.load`` under fake tensors: shapes, devices, and the values of small integer tensors.

Torch sets a loaded fake tensor's device in Python alone, so that its kernels meet two devices, and
takes no function as ``map_location`` (torch 2.13, torch/_utils.py). Pretrained weights that would
be downloaded are taken to be there: a forecast needs none of their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from traceback import StackSummary, extract_stack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.serialization import _serialization_tls
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.recorder.facts import FILLED_LIMIT, is_small_integer

LOCATION_OF = torch._utils._get_restore_location
READ = ContextVar[Any]("READ", default=None)  # the file being loaded; what keeps known values


def _read_integers(tensor: Tensor, memory: Any) -> None:
    """Read a small integer tensor's values at their offset in the file, and keep them.

    Programs use such values as numbers and shapes: tokens, and positions of samples in a data set.
    """
    start = getattr(memory, "_checkpoint_offset", None)
    small = is_small_integer(tensor) and memory.nbytes() <= 8 * FILLED_LIMIT
    if READ.get() is None or start is None or not small or not memory.nbytes():
        return
    file, keep = READ.get()
    before = file.tell()
    file.seek(start)
    data = bytearray(file.read(memory.nbytes()))
    file.seek(before)
    form = tuple(tensor.size()), tensor.stride(), tensor.storage_offset()
    with _disable_current_modes():
        keep(tensor, torch.frombuffer(data, dtype=tensor.dtype).as_strided(*form))


@contextmanager
def load_to_devices() -> Iterator[None]:
    """Place loaded fake tensors as torch places real ones."""
    with (
        patch.object(torch._utils, "_get_restore_location", place_of),
        patch.object(torch._utils, "_restore_device_fake_mode", _placed),
    ):
        yield


class _Storage:
    """A loaded storage as a ``map_location`` function sees it: on the CPU, until it is moved."""

    def __init__(self, place: str = "cpu") -> None:
        self.place = place

    def cpu(self) -> _Storage:
        return _Storage()

    def cuda(self, device: int | str | torch.device | None = None, **options: bool) -> _Storage:
        return _Storage(f"cuda:{device}" if isinstance(device, int) else str(device or "cuda"))

    def to(self, device: str | torch.device, **options: bool) -> _Storage:
        return _Storage(str(device))


def place_of(saved: str | torch.device) -> str | torch.device:
    """The device for a tensor that was saved on device ``saved``, as ``map_location`` says."""
    where: Any = _serialization_tls.map_location
    if not callable(where):
        place: str | torch.device = LOCATION_OF(saved)
        return place
    moved: _Storage | None = where(_Storage(), str(saved))
    return saved if moved is None else moved.place


def _placed(tensor: Tensor) -> Tensor:
    """A loaded fake tensor on the device it belongs to; tensors that share memory still do."""
    memory: Any = tensor.untyped_storage()
    if torch._guards.detect_fake_mode(None) is None or memory._fake_device is None:
        return tensor
    whole: Tensor | None = vars(memory).get("whole")
    if whole is None:
        place = torch.device(place_of(memory._fake_device))
        whole = memory.whole = torch.empty(memory.nbytes(), dtype=torch.uint8, device=place)
    part = whole.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )
    part = part.detach().requires_grad_(tensor.requires_grad)
    _read_integers(part, memory)
    return part


class WeightsNotRead(dict[str, Any]):
    """Stands for pretrained weights that were not downloaded; each entry is one more of these."""

    def __missing__(self, name: str) -> WeightsNotRead:
        return WeightsNotRead()


@contextmanager
def weights_not_downloaded(guesses: dict[str, StackSummary]) -> Iterator[None]:
    """Let ``torch.hub`` download no weights: they are taken to fit the model that loads them.

    Each such file is a guess that is noted in ``guesses``. Weights that are on this machine are
    loaded.
    """
    download, original_load = torch.hub.load_state_dict_from_url, torch.nn.Module.load_state_dict

    def from_url(url: str, model_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """As ``load_state_dict_from_url``; ``WeightsNotRead`` in place of a download."""
        folder = model_dir or os.path.join(torch.hub.get_dir(), "checkpoints")
        name = options.get("file_name") or os.path.basename(url.partition("?")[0])
        if os.path.exists(os.path.join(folder, name)):
            return download(url, model_dir, *args, **options)
        guess = f"{name} is not on this machine: weights are taken to be of the model's own form"
        guesses.setdefault(guess, extract_stack())
        if model_dir:  # a folder of the script's, whose files it may read itself
            os.makedirs(folder, exist_ok=True)
            torch.save(WeightsNotRead(), os.path.join(folder, name))
        return WeightsNotRead()

    def load_state_dict(model: Any, state_dict: Any, *args: Any, **options: Any) -> Any:
        if isinstance(state_dict, WeightsNotRead):
            return _IncompatibleKeys([], [])
        return original_load(model, state_dict, *args, **options)

    with (
        patch.object(torch.hub, "load_state_dict_from_url", from_url),
        patch.object(torch.nn.Module, "load_state_dict", load_state_dict),
    ):
        yield
