"""Memory that programs take without a tensor, as ``torch.UntypedStorage``, and cut tensors from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from itercast.capture.programs.gpus.devices import GpuMemory, on_cpu

STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)


@contextmanager
def storages_of_programs(memory: GpuMemory) -> Iterator[None]:
    """Let storages be made on the emulated GPU, and fake tensors be set to real storages.

    A fake tensor's storage has no data, and a real one is given one of its size in place of it.
    """
    original_new, original_set = torch.UntypedStorage.__new__, torch.Tensor.set_

    def new(cls: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        """As ``torch.UntypedStorage(bytes, device="cuda")``; others are torch's own."""
        if on_cpu(device) is device:
            where = {} if device is None else {"device": device}
            return original_new(cls, *args, **where, **options)
        return memory.put(torch.empty(*args, dtype=torch.uint8)).untyped_storage()

    def set_(tensor: Any, source: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(tensor, FakeTensor) and isinstance(source, STORAGES):
            source = _without_data(source)
        given = () if source is None else (source,)
        return original_set(tensor, *given, *args, **options)

    with (
        patch.object(torch.UntypedStorage, "__new__", new),
        patch.object(torch.Tensor, "set_", set_),
    ):
        yield


def _without_data(storage: Any) -> Any:
    """The storage of a fake tensor that is as large as this one, always the same."""
    storage = getattr(storage, "_untyped_storage", storage)
    if storage.device.type == "meta":
        return storage
    if "whole" not in vars(storage):
        storage.whole = torch.empty(storage.nbytes(), dtype=torch.uint8)
    return storage.whole.untyped_storage()
