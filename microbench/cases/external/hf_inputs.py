"""What a transformers model is fed: full batches of tokens, pictures or sound, and their labels.

Pictures have the configuration's size; where they stand beside tokens, there is one a sample, and
``seq`` counts its place among the tokens. Sound is ``seq`` samples of a wave or frames of a
spectrogram, unless the model's sounds are of one length. A decoder beside an encoder gets ``seq``
tokens too.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

PER_SAMPLE = (
    *("ForSequenceClassification", "ForImageClassification", "ForVideoClassification"),
    *("ForAudioClassification", "ForNextSentencePrediction"),
)
PER_PIXEL = ("ForSemanticSegmentation",)
LAYOUT = (
    *("image_grid", "image_position", "aspect_ratio", "pixel_position"),
    *("pixel_attention_mask", "high_res_pixel"),
)
WAVE_PER_LETTER, FRAMES_PER_LETTER = 1280, 8  # of 16 kHz, and of 100 frames a second: 12.5 letters
log = logging.getLogger(__name__)


def make_inputs(model: Any, config: Any, batch: int, seq: int, labels: bool) -> dict[str, Any]:
    """Inputs as the forward of a transformers model (or class) names them.

    With ``labels`` also what its own loss needs, where that is one of tokens, classes or pairs.
    """
    name, kind = model.main_input_name, _class_name(model)
    makers: dict[str, Callable[[], Any]] = {
        "input_ids": lambda: _tokens(config, kind, batch, seq),
        "pixel_values": lambda: _pictures(config, batch),
        "pixel_values_videos": lambda: _pictures(config, batch),
        "input_values": lambda: _waves(config, kind, batch, seq),
        "input_features": lambda: _spectrograms(config, kind, batch, seq),
    }
    if not isinstance(name, str) or name not in makers:
        raise ValueError(f"{kind} takes {name!r}; supported: {sorted(makers)}")
    accepted = inspect.signature(model.forward).parameters
    given = {name: makers[name]()}
    beside = {"input_ids": "pixel_values", "pixel_values": "input_ids"}.get(name, "")
    if beside in accepted and not _laid_out(accepted, config, kind):
        given[beside] = makers[beside]()
    pixtral = getattr(getattr(config, "vision_config", None), "model_type", "") == "pixtral"
    if pixtral and "pixel_values" in given:
        given["image_sizes"] = _with_values(batch * [list(given["pixel_values"].shape[-2:])])
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = _tokens(config, kind, batch, seq)
    return {**given, **(_labels(given, accepted, kind, batch, seq) if labels else {})}


def _laid_out(accepted: Any, config: Any, kind: str) -> bool:
    """Whether pictures come in pieces, with a layout that no configuration states."""
    found = [name for name in accepted if name.startswith(LAYOUT)]
    found += ["image_sizes"] if hasattr(config, "image_grid_pinpoints") else []
    if found:
        log.warning("%s: captured without pictures, whose %s is not known", kind, found[0])
    return bool(found)


def _labels(
    given: dict[str, Any], accepted: Any, kind: str, batch: int, seq: int
) -> dict[str, Any]:
    """The tokens, class 0 for every sample or pixel, letters of sound, or which pairs belong."""
    import torch  # lazy: names need no torch

    classes = torch.zeros(batch, dtype=torch.int64)
    if "start_positions" in accepted:
        return {"start_positions": classes, "end_positions": classes}
    if "return_loss" in accepted and len(given) > 1:
        return {"return_loss": True}
    found: dict[str, Any] = {}
    if "next_sentence_label" in accepted:
        found["next_sentence_label"] = classes
    if "labels" not in accepted:
        return found
    if kind.endswith(PER_SAMPLE):
        found["labels"] = classes
    elif kind.endswith(PER_PIXEL):
        height, width = given["pixel_values"].shape[-2:]
        found["labels"] = torch.zeros(batch, height, width, dtype=torch.int64)
    elif kind.endswith("ForCTC"):
        wave = "input_values" in given
        each = WAVE_PER_LETTER if wave else FRAMES_PER_LETTER
        found["labels"] = _with_values(batch * [max(1, seq // each) * [1]])
        if not wave and "attention_mask" in accepted:  # some count their frames by it
            found["attention_mask"] = _with_values(batch * [seq * [1]])
    else:
        tokens = given.get("decoder_input_ids", given.get("input_ids"))
        found |= {} if tokens is None else {"labels": tokens}
    return found


def _with_values(rows: list[Any]) -> Any:
    """Integers that stay known in a capture: models look how large and how many they are."""
    import torch  # lazy, as above
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return torch.tensor(rows)


def _class_name(model: Any) -> str:
    return str((model if isinstance(model, type) else type(model)).__name__)


def _tokens(config: Any, kind: str, batch: int, seq: int) -> Any:
    import torch  # lazy, as above

    _check_length(seq, kind)
    text = config.get_text_config(decoder=True)
    limit = _first(text, "max_target_positions", "max_position_embeddings")
    if limit and 0 < limit < seq and not getattr(text, "rope_parameters", None):
        raise ValueError(f"seq {seq}: this {kind} has {limit} positions")
    return torch.randint(0, text.vocab_size, (batch, seq))


def _check_length(seq: int, kind: str) -> None:
    if seq < 1:
        raise ValueError(f"{kind}: a sequence length is required")


def _pictures(config: Any, batch: int) -> Any:
    """(batch, channels, height, width), or of a video (batch, frames, channels, height, width)."""
    import torch  # lazy, as above

    vision = getattr(config, "vision_config", config)
    size = _first(vision, "image_size", "crop_size") or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = _first(vision, "num_frames", "frames_per_clip")
    count = (batch, frames) if frames else (batch,)
    return torch.randn(*count, _first(vision, "num_channels", "in_chans") or 3, height, width)


def _waves(config: Any, kind: str, batch: int, seq: int) -> Any:
    """(batch, samples), of codecs (batch, channels, samples); a spectrogram for those that ask."""
    import torch  # lazy, as above

    if getattr(config, "num_mel_bins", None) and getattr(config, "max_length", None):
        return torch.randn(batch, config.max_length, config.num_mel_bins)
    _check_length(seq, kind)
    channels = getattr(config, "audio_channels", None)
    return torch.randn(*((batch, channels) if channels else (batch,)), seq)


def _spectrograms(config: Any, kind: str, batch: int, seq: int) -> Any:
    """(batch, frames, features), of Whisper and its kin (batch, features, all frames they take)."""
    import torch  # lazy, as above

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
    """The first of these settings that a configuration states, or None."""
    return next((found for name in names if (found := getattr(config, name, None))), None)
