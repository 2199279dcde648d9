"""A case from a configuration of timm, as its models have on the hub: random weights, offline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from microbench.capture.fake import made_to_be_read, without_data

CLASSES = 1000
LOADS = ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path")


class Classifier(nn.Module):
    """A model of timm; ``labels`` in a forward is there for the loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, channels, height, width) to (batch, classes); a distilled model's first head."""
        output = self.model(pixels)
        logits: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return logits


def build(values: dict[str, Any]) -> Classifier:
    """The model that ``architecture`` names; ValueError for one that timm does not have."""
    return Classifier(without_data(made_to_be_read(lambda: _create(values))))


def make_inputs(values: dict[str, Any], batch: int) -> dict[str, Any]:
    """Pictures of the size that the configuration states, else of the model's usual one; labels."""
    labels = torch.randint(0, _classes(values), (batch,))
    return {"pixels": torch.randn(batch, *_picture(values)), "labels": labels}


def loss(logits: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """Cross-entropy over the classes; ValueError for a model that has none."""
    if logits.dim() != 2:
        raise ValueError("the model has no classes: --loss none starts from its output")
    return nn.functional.cross_entropy(logits, given["labels"])


def _create(values: dict[str, Any]) -> nn.Module:
    """With ``img_size`` where the model is one of those that are made for a size."""
    name, arguments = values["architecture"], dict(values.get("model_args") or {})
    if loads := [n for n in LOADS if n in arguments]:
        raise ValueError(f"hf-config: model_args {loads[0]!r}: weights are never loaded")
    channels, height, width = _picture(values)
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
    try:
        import timm  # lazy: an optional extra
    except ModuleNotFoundError as exc:
        raise ValueError("hf-config of a timm model needs timm: pip install timm") from exc
    if not timm.is_model(name):
        raise ValueError(f"hf-config: timm {timm.__version__} has no model {name!r}")
    return timm


def _picture(values: dict[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width."""
    name, own = values["architecture"], values.get("pretrained_cfg")
    size = own.get("input_size") if isinstance(own, dict) else None
    if size is None:
        usual = _timm(name).models.get_pretrained_cfg(name)
        size = usual.input_size if usual else (3, 224, 224)
    if not (isinstance(size, list | tuple) and len(size) == 3 and all(map(_counts, size))):
        raise ValueError(f"hf-config: input_size {size!r}: expected channels, height and width")
    return size[0], size[1], size[2]


def _classes(values: dict[str, Any]) -> int:
    found = values.get("num_classes", CLASSES)
    if not _counts(found):
        raise ValueError(f"hf-config: num_classes {found!r}: expected a whole number from 1 on")
    return int(found)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and value > 0
