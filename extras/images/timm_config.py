"""Cases from timm configurations, as on the Hugging Face Hub: random weights, offline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from itercast.capture.base.assumptions import assumed
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.recorder.fake import build_fake_else_real, fake_module

CLASSES = 1000  # of ImageNet
IMAGE_SHAPE = assumed(__file__, "image_shape")
LOADS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")


class Classifier(nn.Module):
    """Wraps a timm model; its forward takes ``labels`` only because the loss needs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Map (batch, channels, height, width) to logits (batch, classes).

        Of a model that returns a tuple (several heads), the first output is taken.
        """
        output = self.model(pixels)
        return output[0] if isinstance(output, tuple) else output


def timm_case(name: str, values: dict[str, Any], digest: str) -> EvalCase:
    """The case of a configuration's model; the caller chooses the batch."""
    return EvalCase(
        name=name,
        build=lambda: build(values),
        inputs=lambda batch, seq: make_inputs(values, batch),
        loss=loss,
        batch=0,
        measured=False,
        digest=digest,
    )


def build(values: dict[str, Any]) -> Classifier:
    """Build the timm model named by ``architecture``; ValueError if timm does not have it."""
    return Classifier(fake_module(build_fake_else_real(lambda: _create(values))))


def make_inputs(values: dict[str, Any], batch: int) -> dict[str, Any]:
    """Images of the size in the configuration, else of the model's default, and labels."""
    labels = torch.randint(0, _classes(values), (batch,))
    return {"pixels": torch.randn(batch, *_image_size(values)), "labels": labels}


def loss(logits: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy over the classes; ValueError for a model without classes."""
    if logits.dim() != 2:
        raise ValueError("the model has no classes: --loss none starts from its output")
    return nn.functional.cross_entropy(logits, inputs["labels"])


def _create(values: dict[str, Any]) -> nn.Module:
    """Create the model, with ``img_size`` if its constructor takes one."""
    name, arguments = values["architecture"], dict(values.get("model_args") or {})
    if loads := [n for n in LOADS if n in arguments]:
        raise ValueError(f"hf-config: model_args {loads[0]!r}: weights are never loaded")
    channels, height, width = _image_size(values)
    arguments |= {"num_classes": _classes(values)}
    if channels != 3:
        arguments["in_chans"] = channels
    size = height if height == width else (height, width)
    try:
        model: nn.Module = _timm(name).create_model(name, **{"img_size": size, **arguments})
    except TypeError as exc:
        if "img_size" not in str(exc):
            raise
        model = _timm(name).create_model(name, **arguments)
    return model


def _timm(name: str) -> Any:
    """The package timm; ValueError if it is missing or has no model of this name."""
    try:
        import timm  # lazy: an optional extra
    except ModuleNotFoundError as exc:
        raise ValueError("hf-config of a timm model needs timm: pip install timm") from exc
    if not timm.is_model(name):
        raise ValueError(f"hf-config: timm {timm.__version__} has no model {name!r}")
    return timm


def _image_size(values: dict[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of an image."""
    name, stated = values["architecture"], values.get("pretrained_cfg")
    size = stated.get("input_size") if isinstance(stated, dict) else None
    if size is None:
        default = _timm(name).models.get_pretrained_cfg(name)
        size = default.input_size if default else IMAGE_SHAPE
    if not (isinstance(size, list | tuple) and len(size) == 3 and all(map(_is_count, size))):
        raise ValueError(f"hf-config: input_size {size!r}: expected channels, height and width")
    return size[0], size[1], size[2]


def _classes(values: dict[str, Any]) -> int:
    """The number of classes in the configuration, else that of ImageNet."""
    classes = values.get("num_classes", CLASSES)
    if not _is_count(classes):
        raise ValueError(f"hf-config: num_classes {classes!r}: expected a whole number, at least 1")
    return int(classes)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0
