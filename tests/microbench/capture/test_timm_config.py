"""Configurations of timm's models: what is built, what is fed, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from itercast.api import capture
from itercast.microbench.opcall import StepCapture


class Small(nn.Module):
    """A convolution, two layers dropped at rates read off a tensor, a head."""

    def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 2)]
        self.stem = nn.Conv2d(in_chans, 8, 3)
        self.head = nn.Linear(8, num_classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.stem(pixels).mean((2, 3)))
        return logits


class Sized(Small):
    """Made for one size alone; distilled: two heads' outputs."""

    def __init__(self, img_size: int, **given: Any) -> None:
        super().__init__(**given)
        self.positions = nn.Parameter(torch.zeros(img_size - 2, img_size - 2))

    def forward(self, pixels: torch.Tensor) -> Any:
        logits = self.head((self.stem(pixels) + self.positions).mean((2, 3)))
        return logits, logits


class Encoder(Small):
    """An image encoder without a head."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.stem(pixels)
        return features


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timm of three models, where the real one may be missing."""
    models = {"small": Small, "sized": Sized, "encoder": Encoder}
    usual = SimpleNamespace(get_pretrained_cfg=lambda name: SimpleNamespace(input_size=(3, 24, 24)))
    made = SimpleNamespace(
        __version__="0",
        is_model=models.__contains__,
        create_model=lambda name, **given: models[name](**given),
        models=usual,
    )
    monkeypatch.setitem(sys.modules, "timm", made)


def step(folder: Path, **values: Any) -> StepCapture:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return capture(path, batch=5, optimizer="sgd", whole=True)


def shapes(found: StepCapture, op: str) -> list[tuple[int, ...]]:
    return [c.outputs[0].shape for c in found.calls if c.op == f"aten.{op}.default"]


@pytest.mark.usefixtures("timm")
def test_pictures_have_the_stated_size_or_the_usual_one(tmp_path: Path) -> None:
    found = step(tmp_path, architecture="small", num_classes=7)
    assert shapes(found, "convolution") == [(5, 8, 22, 22)]  # 24 less the kernel's border
    assert shapes(found, "addmm") == [(5, 7)]
    stated = {"input_size": [1, 12, 16]}
    found = step(tmp_path, architecture="small", pretrained_cfg=stated)
    assert shapes(found, "convolution") == [(5, 8, 10, 14)]
    assert shapes(found, "addmm") == [(5, 1000)]
    assert {p.name: p.shape for p in found.parameters}["model.stem.weight"] == (8, 1, 3, 3)


@pytest.mark.usefixtures("timm")
def test_models_built_for_an_image_size_get_that_of_the_configuration(tmp_path: Path) -> None:
    found = step(tmp_path, architecture="sized", pretrained_cfg={"input_size": [3, 16, 16]})
    assert {p.name: p.shape for p in found.parameters}["model.positions"] == (14, 14)
    assert len(shapes(found, "_log_softmax")) == 1  # of the first head


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architecture": "large"}, "timm 0 has no model 'large'"),
        ({"architecture": "small", "num_classes": 0}, "num_classes 0: expected a whole number"),
        ({"architecture": "small", "pretrained_cfg": {"input_size": 24}}, "input_size 24: expect"),
        ({"architecture": "small", "model_args": {"pretrained": True}}, "weights are never loaded"),
        ({"architecture": "small", "model_args": {"deep": 1}}, "keyword argument 'deep'"),
        ({"architecture": "encoder"}, "no classes: --loss none"),
        ({"architecture": 3}, "no class name"),
    ],
)
def test_what_timm_cannot_build_is_one_line(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        step(tmp_path, **values)


def test_without_timm_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match="needs timm"):
        step(tmp_path, architecture="small")
