"""What models of cases read, drawn at random, and their losses; ``cases.yaml`` names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from itercast.capture.cases.kinds import Sizes
from itercast.capture.cases.models.detection import detection_loss
from itercast.capture.reuse import expected_reuse
from itercast.capture.step import Inputs

CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01  # no assumption: PPO's (arXiv:1707.06347)
RARE = 0.01  # no assumption: share of an image's default boxes that hold an object, drawn at random


def drawn(batch: int, seq: int, sizes: Sizes, shapes: Mapping[str, Sequence[Any]]) -> Inputs:
    """Random tensors of shapes of numbers and names of sizes, ``[batch, 3, image, image]``.

    Where a shape ends in ``below NAME`` they are integers from 0 and below this size.
    """
    known, made = {**sizes, "batch": batch, "seq": seq}, {}
    for name, shape in shapes.items():
        *before, last = shape
        word, _, limit = str(last).partition(" ")
        count = [known.get(n, n) for n in (before if word == "below" else shape)]
        integers = word == "below"
        made[name] = torch.randint(0, known[limit], count) if integers else torch.randn(count)
    return made


def vectors(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Vectors as wide as the first layer."""
    return {"x": torch.randn(batch, sizes["widths"][0])}


def token_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy with the input tokens as labels."""
    labels = inputs["tokens"].reshape(-1)
    return F.cross_entropy(logits.reshape(len(labels), -1), labels)


def first_token_loss(output: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    """``token_loss`` of the first output."""
    return token_loss(output[0], inputs)


def mean_square(y: Tensor, inputs: Inputs) -> Tensor:
    """The mean of squares."""
    return y.square().mean()


def label_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Cross-entropy of class labels."""
    return F.cross_entropy(logits, inputs["labels"])


def noise_loss(predicted: Tensor, inputs: Inputs) -> Tensor:
    """Mean squared error of the noise."""
    return F.mse_loss(predicted, inputs["noise"])


def boxes(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Images with the ``places`` of default boxes, of which 1 % hold an object."""
    places, image = (batch, sizes["places"]), sizes["image"]
    labels = torch.randint(1, sizes["classes"], places) * (torch.rand(places) < RARE)
    images = torch.randn(batch, 3, image, image)
    return {"images": images, "boxes": torch.randn(batch, 4, sizes["places"]), "labels": labels}


def ssd_loss(output: tuple[Tensor, Tensor], inputs: Inputs) -> Tensor:
    """Loss of boxes and classes."""
    return detection_loss(output, inputs["boxes"], inputs["labels"])


def clicks(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """``bag`` lookups per sample and table; ``rows`` is a number for all tables or one for each."""
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


def click_loss(logits: Tensor, inputs: Inputs) -> Tensor:
    """Binary cross-entropy of clicks."""
    return F.binary_cross_entropy_with_logits(logits, inputs["clicked"])


def sampled_vertices(batch: int, sizes: Sizes) -> list[int]:
    """Vertices whose values each layer makes, from the batch to those whose features are read.

    For each vertex of a layer ``fanout`` neighbours are drawn, or as many as it has on average.
    Expected are the distinct ones of all that are drawn, with the Zipf exponent ``skew``.
    """
    found, drawn = [batch], 0
    for fanout in sizes["fanout"]:
        drawn += found[-1] * min(fanout, sizes["degree"])
        distinct = float(expected_reuse(sizes["vertices"], drawn, sizes["skew"], 0.0)[0])
        found.append(min(sizes["vertices"], batch + round(distinct)))
    return found


def sampled_graph(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Blocks of a sampled graph, that of the features first; neighbours are drawn at random."""
    vertices = sampled_vertices(batch, sizes)
    blocks = []
    for fanout, to, of in zip(sizes["fanout"], vertices[:-1], vertices[1:], strict=True):
        drawn = min(fanout, sizes["degree"])
        starts, values = (
            torch.arange(0, to * drawn + 1, drawn),
            torch.full((to * drawn,), 1 / drawn),
        )
        source = torch.randint(0, of, (to * drawn,))
        blocks.append(torch.sparse_csr_tensor(starts, source, values, (to, of)))
    return {
        "vertices": torch.randint(0, sizes["vertices"], vertices[-1:]),
        "blocks": blocks[::-1],
        "labels": torch.randint(0, sizes["classes"], (batch,)),
    }


def graphs(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """Random graphs of ``nodes`` nodes with ``degree`` edges each on average."""
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


def experience(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """What rollouts gathered: observations, bytes where they are images, and what PPO needs."""
    shape = (batch, *sizes["shape"])
    images = len(sizes["shape"]) > 1
    seen = torch.randint(0, 256, shape, dtype=torch.uint8) if images else torch.randn(shape)
    drawn = {name: torch.randn(batch) for name in ("advantages", "returns")}
    actions = torch.randint(0, sizes["actions"], (batch, 1))
    return {"observed": seen, "actions": actions, "log_probs": -torch.rand(batch), **drawn}


def ppo_loss(output: tuple[Tensor, ...], inputs: Inputs) -> Tensor:
    """PPO's clipped objective with the losses of values and entropy."""
    log_probs, values = output[:2]
    ratio = (log_probs.gather(-1, inputs["actions"]).squeeze(-1) - inputs["log_probs"]).exp()
    gained = inputs["advantages"]
    clipped = torch.min(ratio * gained, ratio.clamp(1 - CLIP, 1 + CLIP) * gained).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    errors = F.mse_loss(values, inputs["returns"])
    return VALUE_WEIGHT * errors - clipped - ENTROPY_WEIGHT * entropy
