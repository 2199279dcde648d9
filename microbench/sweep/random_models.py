"""Random models of many kinds, whose calls are swept.

Sizes are drawn at random for each model, so they are not those of the cases used for validation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.kinds import make_case
from itercast.microbench.ops.sizes import drawn
from itercast.microbench.store import Row

FACTS = facts_of(__file__)
ORDER = (
    *("transformer", "perceptron", "vit", "resnet", "convnet"),
    *("transformer", "recurrent", "recommender", "graph"),
)
SGD, ADAMW = {"optimizer": "sgd"}, {"optimizer": "adamw"}
MUON = {"optimizer": "muon", "amp": True, "dtype": "bf16"}
SETTINGS: tuple[dict[str, Any], ...] = (SGD, ADAMW, ADAMW, SGD, ADAMW, MUON, SGD, ADAMW, ADAMW)


def random_model(rng: np.random.Generator, number: int, device: str) -> EvalCase:
    """The random model of this number; kinds take turns."""
    stated = FACTS[ORDER[number % len(ORDER)]]
    fields = {**stated["all"], **stated[device]}
    sizes = {name: drawn(rng, how) for names, how in fields.items() for name in names.split()}
    if "each" in fields:
        sizes["rows"] = tuple(drawn(rng, fields["each"]) for _ in range(sizes["tables"]))
    kind = sizes.pop("kind")
    return make_case("random", kind, **_arguments(kind, **sizes))


def _arguments(kind: str, **sizes: Any) -> Row:
    """What a model of this kind is made of, from the sizes that were drawn."""

    def picked(*names: str) -> Row:
        return {name: sizes[name] for name in names}

    match kind:
        case "transformer":
            heads = sizes["heads"] - (sizes["heads"] % 2 if sizes["style"] == "llama" else 0)
            width = heads * min(sizes["head"], max(16, sizes["widest"] // heads))
            experts = picked("experts", "top") if sizes["layer"] == "mixture" else {}
            plain = picked("layers", "style", "batch", "seq", "vocab", "dropout")
            return {**plain, **experts, "heads": heads, "width": width}
        case "perceptron":
            return {**picked("batch"), "widths": tuple(sizes[f"w{n}"] for n in range(1, 5))}
        case "vit":
            pixels, width = sizes["patch"] * sizes["patches"], sizes["heads"] * sizes["head"]
            plain = picked("patch", "heads", "layers", "batch", "classes")
            return {**plain, "size": pixels, "width": width}
        case "resnet":
            plain = picked("width", "bottleneck", "batch", "image", "classes")
            return {**plain, "stages": tuple(sizes[f"s{n}"] for n in range(1, 5))}
        case "densenet":
            return {**picked("width", "growth", "batch", "image", "classes"), "depth": 3}
        case "efficientnet" | "convnext":
            widths = tuple(n * sizes["width"] for n in (1, 2, 3))
            return {**picked("batch", "image", "classes"), "widths": widths, "depth": 1}
        case "dlrm":
            wide = sizes["wide"]
            plain = picked("batch", "features", "tables", "rows", "bag", "width")
            return {**plain, "bottom": (wide, wide // 2), "top": (2 * wide, wide)}
        case _:
            return sizes
