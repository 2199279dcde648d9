"""Models named in published tables, as configurations to build them from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of
from itercast.extras.imports.base import whole
from itercast.extras.published.sources.timm_models import by_timm

KNOWN = facts_of(__file__)
# "Llama-3.1-8B", "llama31_8b", "meta-llama/Meta-Llama-3-70B": 3.1 differs from 3 in its positions.
LLAMA_NAME = re.compile(
    r"(?:[\w-]+/)?(?:meta-)?llama[-_ ]?(\d)(?:[._]?\d(?=[-_ ]))?[-_ ]?(\d+)b", re.IGNORECASE
)
# ResNeXt and its SE form, as ConvNets of https://github.com/NVIDIA/DeepLearningExamples names them.
BY_TIMM = {"resnext101-32x4d": "resnext101_32x4d", "se-resnext101-32x4d": "seresnext101_32x4d"}
# Models of the same repository with a case of their own, and their optimizers.
CASES = {"DLRM small": "dlrm-criteo", "SSD": "ssd300"} | assumed(__file__, "transformer_xl_cases")
# Records of modded-nanogpt, by the first word of the note on the model.
SPEEDRUN = {"GPT-2": "speedrun-gpt", "ModernArch": "speedrun-gpt-modern"}
OPTIMIZERS = assumed(__file__, "optimizers")
DOUBTS = {
    name: "full softmax inferred from these step times, so not blind"
    for name in assumed(__file__, "transformer_xl_cases")
}
ONE_GPU_ONLY = assumed(__file__, "one_gpu_only")
TIMM_IMAGE_SIDE: int = assumed(__file__, "timm_image_side")
ADAPTERS = re.compile(r"\blora\b|low-rank adapt", re.IGNORECASE)
SAID_IN = ("model", "model_note", "section", "set", "row_id", "framework", "doubts")
SIZES = {  # columns of tables, and the keys of configurations
    "layers": ("num_hidden_layers", "n_layer"),
    "d_model": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "ffn": ("intermediate_size", "n_inner"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model: a configuration as JSON, or the name of a case; ``doubt``: what was assumed.

    ``optimizer`` and ``attn`` are the usual ones of such models, for tables that do not state them.
    """

    hf_config: str | None = None
    case: str = ""
    builder: str = "hf"
    optimizer: str = "adamw"
    attn: str = "sdpa"
    doubt: str = ""


def model_of(given: Mapping[str, str]) -> Model:
    """The model of a table's row; ValueError where facts are missing or contradict its name."""
    name = given["model"]
    if any(ADAPTERS.search(given.get(column, "")) for column in SAID_IN):
        raise ValueError("only a part of the weights is trained (LoRA)")
    if given.get("model_note", "").startswith("MPT") or name == "GPT-2 124M":
        return _gpt2_of_sizes(given)
    if name == "BERT":
        _check_task(given.get("section", "").lower())
    found = LLAMA_NAME.fullmatch(name)
    known = KNOWN.get(f"llama-{found[1]}-{found[2]}b" if found else name)
    if known:
        return _known(known, given)
    if name == "GPT-2-like 124M":
        first = re.split(r"\W*[ :;]", given.get("model_note", ""))[0]
        return Model(case=SPEEDRUN.get(first, ""), builder="case")
    _check_one_gpu(given)
    if name in CASES:
        optimizer, doubt = OPTIMIZERS.get(name, "adamw"), DOUBTS.get(name, "")
        return Model(case=CASES[name], builder="case", optimizer=optimizer, doubt=doubt)
    if name in BY_TIMM:
        config = by_timm(BY_TIMM[name], TIMM_IMAGE_SIDE)
        return Model(hf_config=config, builder="timm", optimizer="sgd")
    raise ValueError(f"no configuration for the model {name[:40]!r}")


def _check_task(section: str) -> None:
    """ValueError for a BERT that is not fine-tuned."""
    if "pre-training" in section:
        raise ValueError("lengths vary: batches are binned by length, the longest is stated")
    if "fine" not in section:
        raise ValueError("model's task is not stated: pre-training or fine-tuning")


def _check_one_gpu(given: Mapping[str, str]) -> None:
    """ValueError for runs on several GPUs that were not data parallel, as was inferred."""
    if (whole(given.get("n_gpus")) or 1) == 1:
        return
    for model, set_name, reason in ONE_GPU_ONLY:
        if given["model"] == model and set_name in ("", given.get("set")):
            raise ValueError(reason)


def _known(known: Mapping[str, Any], given: Mapping[str, str]) -> Model:
    """A model of models.yaml; ValueError where a row states other sizes."""
    own = dict(known)
    config, least = dict(own.pop("config")), own.pop("positions", 0)
    for column, keys in SIZES.items():
        ours = [config[key] for key in keys if key in config]
        if ours and given.get(column) and whole(given[column]) not in ours:
            raise ValueError(f"{column} differs from that of the named model")
    if "vocab_size" in config:
        positions = "n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"
        config[positions] = max(least, _length(given))
    return Model(hf_config=json.dumps(config, sort_keys=True), **own)


def _length(given: Mapping[str, str]) -> int:
    if seq := whole(given.get("seq_len_tokens")):
        return seq
    raise ValueError("sequence length is not stated")


def _gpt2_of_sizes(given: Mapping[str, str]) -> Model:
    """Hugging Face's GPT-2 with the sizes that a table's row states (layers, width, heads...).

    It stands for MPT, too, which has no configuration of its own here. ValueError where a size is
    missing.
    """
    keys = {column: gpt2 for column, (*_, gpt2) in SIZES.items()} | {"vocab": "vocab_size"}
    for column in keys:
        if not whole(given.get(column)):
            raise ValueError(f"model's {column} is not stated")
    sizes = {key: whole(given[column]) for column, key in keys.items()}
    return _known({"config": KNOWN["GPT3-175B"]["config"] | sizes}, given)
