"""Kinds of models that cases are of: the class of each, what it reads, and its loss.

Torch is imported only when a model, inputs or a loss are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.step import Inputs, Loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Sizes = Mapping[str, Any]  # of a case: numbers, tuples of numbers, flags, by name
RARE = 0.01  # no assumption: share of an image's default boxes that hold an object, drawn at random


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of model: ``model`` is its module and class below this folder.

    ``inputs(batch, seq, sizes)`` draws what it reads. The class is built with a case's sizes, but
    those ``beside``, which only the inputs need; ``fixed`` are sizes of all models of this kind.
    ``with_seq``: the class takes the length of sequences too.
    """

    model: str
    inputs: Callable[[int, int, Sizes], Inputs]
    loss: Loss
    beside: tuple[str, ...] = ()
    fixed: Sizes = field(default_factory=dict)
    with_seq: bool = False


def make_case(
    name: str,
    kind: str,
    *,
    batch: int,
    seq: int = 0,
    measured: bool = False,
    optimizer: str = "adamw",
    **sizes: Any,
) -> EvalCase:
    """The case of a kind of ``KINDS`` in these sizes."""
    chosen, taken = KINDS[kind], {"seq": seq} if KINDS[kind].with_seq else {}

    def build() -> torch.nn.Module:
        module, _, model = chosen.model.rpartition(".")
        made = getattr(importlib.import_module(f"{__package__}.{module}"), model)
        own = {size: value for size, value in sizes.items() if size not in chosen.beside}
        built: torch.nn.Module = made(**chosen.fixed, **own, **taken)
        return built

    return EvalCase(
        name=name,
        build=build,
        inputs=lambda batch, seq: chosen.inputs(batch, seq, sizes),
        loss=chosen.loss,
        batch=batch,
        seq=seq,
        measured=measured,
        optimizer=optimizer,
    )


def _tokens(batch: int, seq: int, sizes: Sizes) -> Inputs:
    import torch  # lazy: names need no torch

    return {"tokens": torch.randint(0, sizes["vocab"], (batch, seq))}


def token_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy with the input tokens as labels."""
    import torch  # lazy, as above

    labels = inputs["tokens"].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels)


def _with_memory(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Words (seq, batch), and the states of a segment before as long as this one."""
    import torch  # lazy, as above

    memory = torch.randn(sizes["layers"], seq, batch, sizes["width"])
    return {"tokens": torch.randint(0, sizes["vocab"], (seq, batch)), "memory": memory}


def _vectors(batch: int, seq: int, sizes: Sizes) -> Inputs:
    import torch  # lazy, as above

    return {"x": torch.randn(batch, sizes["widths"][0])}


def _square(y: Tensor, inputs: Inputs) -> Tensor:
    return y.square().mean()


def _images(batch: int, sizes: Sizes, *labels: int) -> Inputs:
    """Square images; ``labels`` is the shape of the labels of one image."""
    import torch  # lazy, as above

    side = sizes["image"] if "image" in sizes else sizes["size"]
    images = torch.randn(batch, 3, side, side)
    return {"images": images, "labels": torch.randint(0, sizes["classes"], (batch, *labels))}


def _labelled_images(batch: int, seq: int, sizes: Sizes) -> Inputs:
    return _images(batch, sizes)


def _labelled_pixels(batch: int, seq: int, sizes: Sizes) -> Inputs:
    return _images(batch, sizes, sizes["image"], sizes["image"])


def label_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy of class labels."""
    import torch  # lazy, as above

    return torch.nn.functional.cross_entropy(logits, inputs["labels"])


def _signals(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Signals with a label for every frame."""
    import torch  # lazy, as above

    labels = torch.randint(0, sizes["classes"], (batch, seq))
    return {"signal": torch.randn(batch, seq, sizes["channels"]), "labels": labels}


def _noisy_images(batch: int, seq: int, sizes: Sizes) -> Inputs:
    import torch  # lazy, as above

    images, noise = (torch.randn(batch, 3, sizes["image"], sizes["image"]) for _ in range(2))
    return {"images": images, "times": torch.rand(batch), "noise": noise}


def _noise_loss(predicted: Tensor, inputs: Inputs) -> Tensor:
    import torch  # lazy, as above

    return torch.nn.functional.mse_loss(predicted, inputs["noise"])


def _boxes(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Images with the ``places`` of default boxes, of which 1 % hold an object."""
    import torch  # lazy, as above

    places, image = (batch, sizes["places"]), sizes["image"]
    labels = torch.randint(1, sizes["classes"], places) * (torch.rand(places) < RARE)
    images = torch.randn(batch, 3, image, image)
    return {"images": images, "boxes": torch.randn(batch, 4, sizes["places"]), "labels": labels}


def _detection_loss(output: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    from itercast.microbench.cases.models.detection import detection_loss  # lazy, as above

    return detection_loss(output, inputs["boxes"], inputs["labels"])


def _clicks(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``bag`` lookups per sample and table; ``rows`` is a number for all tables or one for each."""
    import torch  # lazy, as above

    tables, rows, lookups = sizes["tables"], sizes["rows"], batch * sizes["bag"]
    dense = torch.randn(batch, sizes["features"])
    if isinstance(rows, int):
        indices = torch.randint(0, rows, (tables, lookups))
    else:
        indices = torch.stack([torch.randint(0, n, (lookups,)) for n in rows])
    return {
        "dense": dense,
        "indices": indices,
        "offsets": torch.arange(0, lookups, sizes["bag"]),
        "clicked": torch.randint(0, 2, (batch,)).to(torch.get_default_dtype()),
    }


def _click_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    import torch  # lazy, as above

    return torch.nn.functional.binary_cross_entropy_with_logits(logits, inputs["clicked"])


def _rankings(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``pooling`` lookups per sample and table, by default one."""
    import torch  # lazy, as above

    rows = sizes["rows"]
    pairs = list(zip(rows, sizes.get("pooling", (1,) * len(rows)), strict=True))
    return {
        "dense": torch.randn(batch, sizes["features"]),
        "indices": torch.cat([torch.randint(0, n, (batch * k,)) for n, k in pairs]),
        "offsets": torch.stack([torch.arange(0, batch * k, k) for _, k in pairs]),
    }


def _ranking_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """A click where the first dense feature is positive."""
    import torch  # lazy, as above

    clicked = (inputs["dense"][:, 0] > 0).to(logits.dtype)
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)


def _users_and_items(batch: int, seq: int, sizes: Sizes) -> Inputs:
    import torch  # lazy, as above

    return {
        "user": torch.randint(0, sizes["users"], (batch,)),
        "history": torch.randint(0, sizes["items"], (batch, seq)),
        "item": torch.randint(0, sizes["items"], (batch,)),
    }


def _own_item_loss(scores: Tensor, inputs: Inputs) -> Tensor:
    """Users took their own item: the others of the batch are the wrong ones."""
    import torch  # lazy, as above

    own = torch.arange(len(scores), device=scores.device)
    return torch.nn.functional.cross_entropy(scores, own)


def _histories(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Histories of items, and candidates for each next one, the right one first."""
    import torch  # lazy, as above

    candidates = (batch, seq, 1 + sizes["negatives"])
    return {
        "history": torch.randint(0, sizes["items"], (batch, seq)),
        "candidates": torch.randint(0, sizes["items"], candidates),
    }


def _first_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    import torch  # lazy, as above

    first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(logits, first)


def _graphs(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Random graphs of ``nodes`` nodes with ``degree`` edges each on average."""
    import torch  # lazy, as above

    nodes, degree = sizes["nodes"], sizes["degree"]
    edges = batch * nodes * degree
    first = torch.arange(batch).mul(nodes).repeat_interleave(nodes * degree, output_size=edges)
    return {
        "nodes": torch.randn(batch * nodes, sizes["features"]),
        "source": first + torch.randint(0, nodes, (edges,)),
        "target": first + torch.randint(0, nodes, (edges,)),
        "weight": torch.full((edges, 1), 1 / degree),
        "graph": torch.arange(batch).repeat_interleave(nodes, output_size=batch * nodes),
        "labels": torch.randint(0, sizes["classes"], (batch,)),
    }


def _classifier(model: str, **more: Any) -> Kind:
    return Kind(
        model=f"models.{model}", inputs=_labelled_images, loss=label_loss, beside=("image",), **more
    )


def _language(model: str, **fixed: Any) -> Kind:
    return Kind(model=f"models.{model}", inputs=_tokens, loss=token_loss, fixed=fixed)


def _ranking(model: str) -> Kind:
    return Kind(model=f"recommenders.ranking.{model}", inputs=_rankings, loss=_ranking_loss)


def _frames(model: str) -> Kind:
    return Kind(model=f"models.{model}", inputs=_signals, loss=label_loss, beside=("channels",))


KINDS: Mapping[str, Kind] = {
    "perceptron": Kind(model="models.small.Perceptron", inputs=_vectors, loss=_square),
    "transformer": _language("transformers.Transformer"),
    "llama": _language("transformers.Transformer", style="llama", tied=False, positions=0),
    "bert": _language("transformers.MaskedLM"),
    "recurrent": _language("recurrent.RecurrentLM"),
    "transformer-xl": Kind(
        model="models.transformer_xl.TransformerXL",
        inputs=_with_memory,
        loss=lambda output, inputs: token_loss(output[0], inputs),
    ),
    "vit": _classifier("vision.Vit"),
    "resnet": _classifier("vision.ResNet"),
    "efficientnet": _classifier("convnets.EfficientNet"),
    "convnext": _classifier("convnets.ConvNext"),
    "densenet": _classifier("convnets.DenseNet"),
    "swin": _classifier("attentions.Swin"),
    "mixer": _classifier("attentions.Mixer"),
    "unet": Kind(
        model="models.unet.UNet", inputs=_labelled_pixels, loss=label_loss, beside=("image",)
    ),
    "wavenet": _frames("convnets.WaveNet"),
    "conformer": _frames("attentions.Conformer"),
    "denoiser": Kind(
        model="models.denoiser.Denoiser", inputs=_noisy_images, loss=_noise_loss, beside=("image",)
    ),
    "ssd": Kind(
        model="models.detection.Ssd",
        inputs=_boxes,
        loss=_detection_loss,
        beside=("image", "places"),
    ),
    "dlrm": Kind(model="models.dlrm.Dlrm", inputs=_clicks, loss=_click_loss, beside=("bag",)),
    "dlrm-dcn": _ranking("DlrmDcn"),
    "dcn-v2": _ranking("DcnV2"),
    "deepfm": _ranking("DeepFm"),
    "two-tower": Kind(
        model="recommenders.sequences.TwoTower", inputs=_users_and_items, loss=_own_item_loss
    ),
    "hstu": Kind(
        model="recommenders.sequences.Hstu",
        inputs=_histories,
        loss=_first_loss,
        beside=("negatives",),
        with_seq=True,
    ),
    "graph": Kind(
        model="models.graph.GraphNet",
        inputs=_graphs,
        loss=label_loss,
        beside=("nodes", "degree"),
    ),
}
