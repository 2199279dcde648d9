"""torch.load under fake tensors puts what it reads where torch puts real tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from itercast.capture.programs.gpus.loaded import load_to_devices
from itercast.capture.recorder.fake_patches import behave_like_real_tensors

WHERE: dict[str, tuple[Any, str]] = {
    "where it was": (None, "cuda:0"),
    "a name": ("cpu", "cpu"),
    "a device": (torch.device("cuda", 1), "cuda:1"),
    "names": ({"cuda:0": "cuda:1"}, "cuda:1"),
    "the storage itself": (lambda storage, place: storage, "cpu"),
    "a storage that is moved": (lambda storage, place: storage.cuda(1), "cuda:1"),
    "a storage that is moved back": (lambda storage, place: storage.cuda(1).cpu(), "cpu"),
    "a storage that is moved by name": (lambda storage, place: storage.cuda("cuda:1"), "cuda:1"),
    "a storage that goes to a device": (lambda storage, place: storage.to("cuda:1"), "cuda:1"),
    "nothing": (lambda storage, place: None, "cuda:0"),
}


def saved(path: Path, value: object) -> Path:
    """A file written where tensors are on a GPU."""
    with patch.object(torch.serialization, "location_tag", lambda storage: "cuda:0"):
        torch.save(value, path)
    return path


@pytest.mark.parametrize(("where", "device"), WHERE.values(), ids=WHERE)
def test_a_loaded_tensor_is_where_it_was_asked_to_be(
    where: str | Callable[..., Any] | None, device: str, tmp_path: Path
) -> None:
    """Ops on it meet one device, where torch's own fakes meet two: views, indices, sums."""
    path = saved(tmp_path / "x.pt", torch.arange(12).view(3, 4)[1:])
    with FakeTensorMode(), behave_like_real_tensors(), load_to_devices():
        loaded = torch.load(path, map_location=where)
        ones = torch.ones(4, device=device, dtype=torch.int64)
        results = (loaded, loaded.t(), loaded.index_select(0, ones), loaded + ones)
        assert [str(r.device) for r in results] == [device] * 4
        assert (loaded.shape, loaded.stride(), loaded.storage_offset()) == ((2, 4), (4, 1), 4)


def test_tensors_that_share_memory_in_a_file_share_it_when_loaded(tmp_path: Path) -> None:
    """A model whose head is its embedding: one storage of 10 x 4 numbers in fp32."""
    model = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    model["head"].weight = model["embed"].weight
    path = saved(tmp_path / "model.pt", model)
    with FakeTensorMode(), behave_like_real_tensors(), load_to_devices():
        loaded = torch.load(path, weights_only=False)
        embed, head = loaded["embed"].weight, loaded["head"].weight
        assert embed.requires_grad and isinstance(embed, nn.Parameter)
        assert embed.untyped_storage()._cdata == head.untyped_storage()._cdata
        assert embed.untyped_storage().nbytes() == 160
