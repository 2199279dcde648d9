"""Draws convolution layers as ResNets, U-Nets, ViTs, MobileNets, audio and small CNNs have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from itercast.capture.base.yaml_text import facts_of
from itercast.microbench.ops.sizes import drawn

KINDS = facts_of(__file__)
SHARES = {name: kind["share"] for name, kind in KINDS.items()}


def layer(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of ``itercast.microbench.ops.matrix.conv.Conv``, without batch and direction."""
    kind = drawn(rng, SHARES)
    fields = {name: drawn(rng, stated) for name, stated in KINDS[kind]["fields"].items()}
    size, kernel, per_in = fields.pop("size"), fields.pop("kernel"), fields.pop("out_per_in", 0)
    padding = fields.pop("padding", fields.get("dilation", 1) * (kernel // 2))
    if per_in:
        fields["out_channels"] = max(1, int(per_in * fields["in_channels"]))
    if kind == "patches":
        size, fields["stride"] = size * kernel, kernel
    if kind == "depthwise":
        fields["groups"] = fields["in_channels"]
    sides = {"w": size, "kernel_w": kernel, "padding_w": padding}
    if kind == "audio":
        return {**fields, **sides, "h": 1, "kernel_h": 1}
    return {**fields, **sides, "h": size, "kernel_h": kernel, "padding_h": padding}
