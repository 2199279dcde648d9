"""Writes configurations of models named as in timm, to build them without a download.

They are for Hugging Face transformers where it has the same network, else for timm itself.

Sources: timm 0.6, models/{resnet,vision_transformer,efficientnet,beit,resnetv2}.py; tables 1 of
arXiv:1512.03385, 2010.11929, 2012.12877 (tiny and small) and 2106.08254; arXiv:1905.11946 and the
reference code's efficientnet_params; arXiv:1912.11370, section 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from itercast.microbench.store import Row
from itercast.microbench.yaml_text import facts_of

FACTS = facts_of(__file__)
CLASSES = 1000
Values = Row


def timm_config(name: str, image_size: int) -> str:
    """Return a model's configuration as JSON: for transformers if it has the network, else timm."""
    for pattern, values in NETWORKS.items():
        if found := re.fullmatch(pattern, name):
            try:
                own = values(*(part for part in found.groups() if part))
            except KeyError:  # a size that transformers lacks
                break
            return json.dumps({**own, "image_size": image_size, "num_labels": CLASSES})
    return by_timm(name, image_size)


def by_timm(name: str, image_size: int) -> str:
    """The configuration as JSON of a model to be built by timm."""
    picture = {"input_size": [3, image_size, image_size]}
    return json.dumps({"architecture": name, "num_classes": CLASSES, "pretrained_cfg": picture})


def _resnet(layers: str) -> Values:
    """A ResNet; tv_, ssl_, swsl_ and gluon's v1b are the same network with other weights."""
    kind, depths = FACTS["resnets"][layers]
    wide = 4 if kind == "bottleneck" else 1
    sizes = {"depths": depths, "hidden_sizes": [64 * wide * 2**i for i in range(4)]}
    return {**_model("ResNet", "resnet"), "layer_type": kind, **sizes}


def _vit(size: str, patch: str) -> Values:
    """A ViT; deit is the same network, trained differently."""
    return {**_model("ViT", "vit"), **_transformer(size, patch)}


def _beit(size: str, patch: str) -> Values:
    own = {"use_relative_position_bias": True, "use_mean_pooling": True}
    return {**_model("Beit", "beit"), **_transformer(size, patch), **own}


def _efficientnet(number: str) -> Values:
    """Return the configuration of EfficientNet b``number``.

    timm's variants count as the same network: tf_ differs in padding, _ap and _ns in weights.
    """
    width, depth = FACTS["efficientnets"][number]
    wide = {"width_coefficient": width, "hidden_dim": 8 * round(1280 * width / 8)}
    return {**_model("EfficientNet", "efficientnet"), **wide, "depth_coefficient": depth}


def _mobilenet(width: str) -> Values:
    """A MobileNetV2; with a width below 1 the last layer keeps its channels."""
    own = {"depth_multiplier": FACTS["mobilenets"][width], "finegrained_output": True}
    return {**_model("MobileNetV2", "mobilenet_v2"), **own}


def _bit(layers: str, width: str) -> Values:
    wide, depths = int(width), FACTS["resnets"][layers][1]
    sizes = {"embedding_size": 64 * wide, "hidden_sizes": [256 * wide * 2**i for i in range(4)]}
    return {**_model("Bit", "bit"), "depths": depths, **sizes, "layer_type": "preactivation"}


def _model(name: str, kind: str) -> Values:
    return {"architectures": [f"{name}ForImageClassification"], "model_type": kind}


def _transformer(size: str, patch: str) -> Values:
    width, layers, heads = FACTS["vits"][size]
    own = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**own, "intermediate_size": 4 * width, "patch_size": int(patch)}


NETWORKS: dict[str, Callable[..., Values]] = {
    r"(?:tv_|ssl_|swsl_)?resnet(\d+)|gluon_resnet(\d+)_v1b": _resnet,
    r"(?:vit|deit)_([a-z]+)_patch(\d+)_\d+": _vit,
    r"beit_([a-z]+)_patch(\d+)_\d+": _beit,
    r"(?:tf_)?efficientnet_b(\d)(?:_ap|_ns)?": _efficientnet,
    r"mobilenetv2_(\d+)": _mobilenet,
    r"resnetv2_(\d+)x(\d)_bitm": _bit,
}
