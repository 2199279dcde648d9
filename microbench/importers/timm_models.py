"""Those timm models that are the same networks as Hugging Face ones, as their configurations.

Sources: timm 0.6, models/resnet.py and models/vision_transformer.py; arXiv:1512.03385, table 1, and
arXiv:2010.11929, table 1; sizes of tiny and small: arXiv:2012.12877, table 1.
"""

from __future__ import annotations

import json
import re

RESNETS = {
    "18": ("basic", (2, 2, 2, 2)),
    "26": ("bottleneck", (2, 2, 2, 2)),
    "34": ("basic", (3, 4, 6, 3)),
    "50": ("bottleneck", (3, 4, 6, 3)),
    "101": ("bottleneck", (3, 4, 23, 3)),
    "152": ("bottleneck", (3, 8, 36, 3)),
    "200": ("bottleneck", (3, 24, 36, 3)),
}
VITS = {  # width, layers, heads
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
CLASSES = 1000


def timm_config(name: str, image_size: int) -> str | None:
    """The configuration as JSON; None where the model is not one of ours.

    tv_, ssl_, swsl_ and gluon's v1b are other weights of the same network, deit is a vit.
    """
    shared = {"image_size": image_size, "num_labels": CLASSES}
    if found := re.fullmatch(r"(?:tv_|ssl_|swsl_)?resnet(\d+)|gluon_resnet(\d+)_v1b", name):
        kind, depths = RESNETS.get(found[1] or found[2], ("", ()))
        wide = 4 if kind == "bottleneck" else 1
        widths = [64 * wide, 128 * wide, 256 * wide, 512 * wide]
        own = {"layer_type": kind, "depths": list(depths), "hidden_sizes": widths}
        config = {"architectures": ["ResNetForImageClassification"], "model_type": "resnet", **own}
        return json.dumps({**config, **shared}) if kind else None
    if found := re.fullmatch(r"(?:vit|deit)_([a-z]+)_patch(\d+)_(\d+)", name):
        if found[1] not in VITS:
            return None
        width, layers, heads = VITS[found[1]]
        own_vit = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        own_vit |= {"intermediate_size": 4 * width, "patch_size": int(found[2])}
        config = {"architectures": ["ViTForImageClassification"], "model_type": "vit"}
        return json.dumps({**config, **own_vit, **shared})
    return None
