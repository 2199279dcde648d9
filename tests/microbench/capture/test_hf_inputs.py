"""What a transformers model is fed: shapes by the names of its forward, without transformers."""

from __future__ import annotations

from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import pytest

from itercast.microbench.cases.external.hf_inputs import make_inputs

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
    layout: str, stated: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    kind = model("Pieces", "input_ids", "pixel_values", layout)
    assert list(make_inputs(kind, settings(**stated), 2, 8, labels=False)) == ["input_ids"]
    assert f"Pieces: captured without images, whose {layout} is not known" in caplog.text


def test_what_a_model_takes_otherwise_is_named() -> None:
    with pytest.raises(ValueError, match=r"M takes 'past_values'; supported: .*'input_ids'"):
        make_inputs(model("M", "past_values"), settings(), 2, 8, labels=False)
