"""Inputs of transformers models: full batches of tokens, images or audio, with labels.

Images have the size in the configuration. A model of tokens and images gets one image per sample,
whose place among the tokens counts in ``seq``. Audio is ``seq`` samples of a waveform or frames of
a spectrogram, unless the model takes one length only. The decoder of an encoder-decoder gets
``seq`` tokens too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.remarks import remark
from itercast.capture.base.slow_imports import torch

PER_SAMPLE = (
    *("ForSequenceClassification", "ForImageClassification", "ForVideoClassification"),
    *("ForAudioClassification", "ForNextSentencePrediction"),
)
PER_PIXEL = ("ForSemanticSegmentation",)
# Arguments that say how an image was cut into patches.
PATCH_LAYOUT = (
    *("image_grid", "image_position", "aspect_ratio", "pixel_position"),
    *("pixel_attention_mask", "high_res_pixel"),
)
SAMPLES_PER_LABEL = assumed(__file__, "samples_per_label")
FRAMES_PER_LABEL = assumed(__file__, "frames_per_label")
IMAGE_SIZE = assumed(__file__, "image_size")


def make_inputs(
    model: Any, config: Any, batch: int, seq: int, labels: bool, masked: bool = False
) -> dict[str, Any]:
    """Inputs by the argument names of the forward of ``model``: of transformers, or its class.

    With ``labels``, also those that its own loss needs: tokens, classes or matching pairs.
    ``masked``: encoders of tokens get their attention mask, which tokenizers make for full
    sequences too: eager attention adds it to every score.
    """
    name, kind = model.main_input_name, _class_of(model).__name__
    makers: dict[str, Callable[[], Any]] = {
        "input_ids": lambda: _tokens(config, kind, batch, seq),
        "pixel_values": lambda: _images(config, batch),
        "pixel_values_videos": lambda: _images(config, batch),
        "input_values": lambda: _waves(config, kind, batch, seq),
        "input_features": lambda: _spectrograms(config, kind, batch, seq),
    }
    if not isinstance(name, str) or name not in makers:
        raise ValueError(f"{kind} takes {name!r}; supported: {sorted(makers)}")
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: makers[name]()}
    if masked and name == "input_ids" and _adds_masks(model, config):
        inputs["attention_mask"] = torch.zeros(batch, 1, 1, seq)  # added to scores
    second = {"input_ids": "pixel_values", "pixel_values": "input_ids"}.get(name, "")
    if second in accepted and not _needs_patch_layout(accepted, config, kind):
        inputs[second] = makers[second]()
    pixtral = getattr(getattr(config, "vision_config", None), "model_type", "") == "pixtral"
    if pixtral and "pixel_values" in inputs:
        inputs["image_sizes"] = _with_values(batch * [list(inputs["pixel_values"].shape[-2:])])
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _tokens(config, kind, batch, seq)
    return {**inputs, **(_labels(inputs, accepted, kind, batch, seq) if labels else {})}


def _adds_masks(model: Any, config: Any) -> bool:
    """Whether a model adds the mask that it is given to attention's scores.

    Causal models make a mask of their own anyway. Encoders of older design take only which tokens
    are padding, not numbers to add.
    """
    from transformers.models.auto.modeling_auto import (  # lazy: an optional extra
        MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS,
    )

    takes_it = hasattr(sys.modules[_class_of(model).__module__], "create_bidirectional_mask")
    causal = getattr(config, "is_decoder", False) or config.model_type not in ENCODERS
    return takes_it and not causal and not getattr(config, "is_encoder_decoder", False)


def _class_of(model: Any) -> type:
    """The class of a model, which may be given as its class."""
    return model if isinstance(model, type) else type(model)


def _needs_patch_layout(accepted: Any, config: Any, kind: str) -> bool:
    """Whether images come as patches whose layout the configuration does not state."""
    unknown = [name for name in accepted if name.startswith(PATCH_LAYOUT)]
    unknown += ["image_sizes"] if hasattr(config, "image_grid_pinpoints") else []
    if unknown:
        remark(f"{kind} is forecast without images, on tokens alone: no {unknown[0]} is known")
    return bool(unknown)


def _labels(
    inputs: dict[str, Any], accepted: Any, kind: str, batch: int, seq: int
) -> dict[str, Any]:
    """Labels: the input tokens, class 0 per sample or pixel, or a transcript of audio."""
    classes = torch.zeros(batch, dtype=torch.int64)
    if "start_positions" in accepted:
        return {"start_positions": classes, "end_positions": classes}
    if "return_loss" in accepted and len(inputs) > 1:
        return {"return_loss": True}
    labels: dict[str, Any] = {}
    if "next_sentence_label" in accepted:
        labels["next_sentence_label"] = classes
    if "labels" not in accepted:
        return labels
    if kind.endswith(PER_SAMPLE):
        labels["labels"] = classes
    elif kind.endswith(PER_PIXEL):
        height, width = inputs["pixel_values"].shape[-2:]
        labels["labels"] = torch.zeros(batch, height, width, dtype=torch.int64)
    elif kind.endswith("ForCTC"):
        is_wave = "input_values" in inputs
        inputs_per_label = SAMPLES_PER_LABEL if is_wave else FRAMES_PER_LABEL
        labels["labels"] = _with_values(batch * [max(1, seq // inputs_per_label) * [1]])
        if not is_wave and "attention_mask" in accepted:  # some count their frames by it
            labels["attention_mask"] = _with_values(batch * [seq * [1]])
    else:
        tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        labels |= {} if tokens is None else {"labels": tokens}
    return labels


def _with_values(rows: list[Any]) -> Any:
    """A real integer tensor of these rows even under FakeTensorMode: models read its values."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.tensor(rows)


def _tokens(config: Any, kind: str, batch: int, seq: int) -> Any:
    """Random tokens (batch, seq); ValueError beyond the model's positions."""
    _check_length(seq, kind)
    text = config.get_text_config(decoder=True)
    limit = _first(text, "max_target_positions", "max_position_embeddings")
    if limit and 0 < limit < seq and not getattr(text, "rope_parameters", None):
        raise ValueError(f"seq {seq}: this {kind} has {limit} positions")
    return torch.randint(0, text.vocab_size, (batch, seq))


def _check_length(seq: int, kind: str) -> None:
    """ValueError where no sequence length is given."""
    if seq < 1:
        raise ValueError(f"{kind}: a sequence length is required")


def _images(config: Any, batch: int) -> Any:
    """Images (batch, channels, height, width), or videos (batch, frames, channels, ...)."""
    vision = getattr(config, "vision_config", config)
    size = _first(vision, "image_size", "crop_size") or IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _first(vision, "num_frames", "frames_per_clip")
    count = (batch, frames) if frames else (batch,)
    return torch.randn(*count, _first(vision, "num_channels", "in_chans") or 3, height, width)


def _waves(config: Any, kind: str, batch: int, seq: int) -> Any:
    """Waveforms (batch, samples), for codecs (batch, channels, samples), or a spectrogram."""
    if getattr(config, "num_mel_bins", None) and getattr(config, "max_length", None):
        return torch.randn(batch, config.max_length, config.num_mel_bins)
    _check_length(seq, kind)
    channels = getattr(config, "audio_channels", None)
    return torch.randn(*((batch, channels) if channels else (batch,)), seq)


def _spectrograms(config: Any, kind: str, batch: int, seq: int) -> Any:
    """Spectrograms (batch, frames, features), or (batch, features, frames) as Whisper takes."""
    sound = _first(config, "encoder_config", "audio_config") or config
    features = _first(sound, "feature_projection_input_dim", "input_feat_per_channel", "input_dim")
    bins, frames = _first(sound, "num_mel_bins"), _first(sound, "max_source_positions")
    if not features and bins and frames:
        return torch.randn(batch, bins, 2 * frames)  # a convolution halves them
    _check_length(seq, kind)
    if not features and not bins:
        raise ValueError(f"{kind}: its configuration states no features of sound")
    return torch.randn(batch, seq, features or bins)


def _first(config: Any, *names: str) -> Any:
    """The first of these settings that a configuration has, or None."""
    return next((value for name in names if (value := getattr(config, name, None))), None)
