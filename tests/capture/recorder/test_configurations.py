"""Models of transformers and timm, by configuration: what is fed, built and refused."""

import json
import sys
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from itercast.api import capture
from itercast.capture.base.remarks import remarks
from itercast.capture.cases.external.hf_inputs import make_inputs
from itercast.capture.opcall import StepCapture

TEXT = SimpleNamespace(vocab_size=10)


def settings(**values: Any) -> Any:
    return SimpleNamespace(get_text_config=lambda decoder: TEXT, **values)


def model(name: str, *inputs: str) -> Any:
    """An instance of a class so named whose forward takes these; the first is its main one."""

    def forward(**given: Any) -> None: ...

    named = [Parameter(one, Parameter.KEYWORD_ONLY) for one in inputs]
    forward.__signature__ = Signature(named)  # type: ignore[attr-defined]
    return type(name, (), {"main_input_name": inputs[0], "forward": staticmethod(forward)})()


def shapes(found: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value.shape) for name, value in found.items()}


def test_sound_is_a_wave_frames_or_all_that_a_model_takes() -> None:
    wave, frames = (model("M", name) for name in ("input_values", "input_features"))
    bins = settings(num_mel_bins=8, max_source_positions=20)
    inside = settings(encoder_config=SimpleNamespace(num_mel_bins=8))
    of_one_length = settings(num_mel_bins=8, max_length=30)
    asked = [
        (wave, settings(), (2, 160)),
        (wave, settings(audio_channels=1), (2, 1, 160)),
        (wave, of_one_length, (2, 30, 8)),
        (frames, bins, (2, 8, 40)),
        (frames, inside, (2, 160, 8)),
        (frames, settings(input_feat_per_channel=6, max_source_positions=9), (2, 160, 6)),
    ]
    for kind, config, shape in asked:
        (found,) = make_inputs(kind, config, 2, 160, labels=False).values()
        assert found.shape == shape
    with pytest.raises(ValueError, match="states no features of sound"):
        make_inputs(frames, settings(), 2, 160, labels=False)
    with pytest.raises(ValueError, match="M: a sequence length is required"):
        make_inputs(wave, settings(), 2, 0, labels=False)


def test_letters_of_frames_come_with_the_mask_that_counts_these() -> None:
    kind = model("MForCTC", "input_features", "attention_mask", "labels")
    found = make_inputs(kind, settings(num_mel_bins=8), 2, 160, labels=True)
    assert shapes(found)["labels"] == (2, 20)  # eight frames each
    assert found["attention_mask"].sum() == 2 * 160


def test_classes_of_pixels_and_videos() -> None:
    pixels = model("MForSemanticSegmentation", "pixel_values", "labels")
    found = make_inputs(pixels, settings(image_size=[8, 6]), 2, 0, labels=True)
    assert shapes(found) == {"pixel_values": (2, 3, 8, 6), "labels": (2, 8, 6)}
    video = model("MForVideoClassification", "pixel_values_videos", "labels")
    found = make_inputs(video, settings(crop_size=8, frames_per_clip=4), 2, 0, labels=True)
    assert shapes(found) == {"pixel_values_videos": (2, 4, 3, 8, 8), "labels": (2,)}


def test_pixtral_is_told_the_size_of_each_picture() -> None:
    kind = model("M", "input_ids", "pixel_values", "image_sizes")
    vision = SimpleNamespace(model_type="pixtral", image_size=8)
    found = make_inputs(kind, settings(vision_config=vision), 2, 16, labels=False)
    assert found["image_sizes"].tolist() == [[8, 8], [8, 8]]


@pytest.mark.parametrize(
    ("layout", "stated"),
    [("image_grid_thw", {}), ("image_sizes", {"image_grid_pinpoints": [[336, 336]]})],
)
def test_pictures_in_pieces_are_left_out_with_a_warning(
    layout: str, stated: dict[str, Any]
) -> None:
    kind = model("Pieces", "input_ids", "pixel_values", layout)
    with remarks() as told:
        assert list(make_inputs(kind, settings(**stated), 2, 8, labels=False)) == ["input_ids"]
    assert told == [f"Pieces is forecast without images, on tokens alone: no {layout} is known"]


def test_what_a_model_takes_otherwise_is_named() -> None:
    with pytest.raises(ValueError, match=r"M takes 'past_values'; supported: .*'input_ids'"):
        make_inputs(model("M", "past_values"), settings(), 2, 8, labels=False)


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


def outputs(found: StepCapture, op: str) -> list[tuple[int, ...]]:
    return [c.outputs[0].shape for c in found.calls if c.op == f"aten.{op}.default"]


@pytest.mark.usefixtures("timm")
def test_pictures_have_the_stated_size_or_the_usual_one(tmp_path: Path) -> None:
    found = step(tmp_path, architecture="small", num_classes=7)
    assert outputs(found, "convolution") == [(5, 8, 22, 22)]  # 24 less the kernel's border
    assert outputs(found, "addmm") == [(5, 7)]
    stated = {"input_size": [1, 12, 16]}
    found = step(tmp_path, architecture="small", pretrained_cfg=stated)
    assert outputs(found, "convolution") == [(5, 8, 10, 14)]
    assert outputs(found, "addmm") == [(5, 1000)]
    assert {p.name: p.shape for p in found.parameters}["model.stem.weight"] == (8, 1, 3, 3)


@pytest.mark.usefixtures("timm")
def test_models_built_for_an_image_size_get_that_of_the_configuration(tmp_path: Path) -> None:
    found = step(tmp_path, architecture="sized", pretrained_cfg={"input_size": [3, 16, 16]})
    assert {p.name: p.shape for p in found.parameters}["model.positions"] == (14, 14)
    assert len(outputs(found, "_log_softmax")) == 1  # of the first head


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
