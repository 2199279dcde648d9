"""What ``torch.load`` makes of a file under fake tensors: shapes and places, no data.

Torch sets a loaded fake tensor's device in Python alone, so that its kernels meet two devices, and
takes no function as ``map_location`` (torch 2.13, torch/_utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.serialization import _serialization_tls

LOCATION_OF = torch._utils._get_restore_location


@contextmanager
def load_to_devices() -> Iterator[None]:
    """Place loaded fake tensors as torch places real ones."""
    with (
        patch.object(torch._utils, "_get_restore_location", _place),
        patch.object(torch._utils, "_restore_device_fake_mode", _placed),
    ):
        yield


class _Memory:
    """A loaded storage as a ``map_location`` function sees it: on the CPU, until it is moved."""

    def __init__(self, place: str = "cpu") -> None:
        self.place = place

    def cpu(self) -> _Memory:
        return _Memory()

    def cuda(self, device: int | str | torch.device | None = None, **options: bool) -> _Memory:
        return _Memory(f"cuda:{device}" if isinstance(device, int) else str(device or "cuda"))

    def to(self, device: str | torch.device, **options: bool) -> _Memory:
        return _Memory(str(device))


def _place(saved: str | torch.device) -> str | torch.device:
    """Where a tensor goes that was on ``saved``."""
    where: Any = _serialization_tls.map_location
    if not callable(where):
        place: str | torch.device = LOCATION_OF(saved)
        return place
    moved: _Memory | None = where(_Memory(), str(saved))
    return saved if moved is None else moved.place


def _placed(tensor: Tensor) -> Tensor:
    """The tensor on its device; those that share memory in the file share it there."""
    memory: Any = tensor.untyped_storage()
    if torch._guards.detect_fake_mode(None) is None or memory._fake_device is None:
        return tensor
    whole: Tensor | None = vars(memory).get("whole")
    if whole is None:
        place = torch.device(_place(memory._fake_device))
        whole = memory.whole = torch.empty(memory.nbytes(), dtype=torch.uint8, device=place)
    part = whole.view(tensor.dtype).as_strided(
        tensor.size(), tensor.stride(), tensor.storage_offset()
    )
    return part.detach().requires_grad_(tensor.requires_grad)
