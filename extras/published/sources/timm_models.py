"""Writes configurations of models named as in timm, to build them without a download.

They are for Hugging Face transformers where it has the same network, else for timm itself.
"""

from __future__ import annotations

import json
import re
from typing import Any

from itercast.capture.base.yaml_text import facts_of

NETWORKS: Any = facts_of(__file__)
CLASSES = 1000


def timm_config(name: str, image_size: int) -> str:
    """Return a model's configuration as JSON: for transformers if it has the network, else timm."""
    for network in NETWORKS:
        if found := re.fullmatch(network["name"], name):
            size = network["sizes"].get(next(group for group in found.groups() if group))
            if size is not None:  # else one that transformers lacks
                own = {key: int(text) for key, text in found.groupdict().items()}
                own |= {"image_size": image_size, "num_labels": CLASSES}
                return json.dumps({**network["config"], **size, **own})
    return by_timm(name, image_size)


def by_timm(name: str, image_size: int) -> str:
    """The configuration as JSON of a model to be built by timm."""
    picture = {"input_size": [3, image_size, image_size]}
    return json.dumps({"architecture": name, "num_classes": CLASSES, "pretrained_cfg": picture})
