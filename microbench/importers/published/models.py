"""Models that published tables name, as Hugging Face configurations to build them from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from microbench.importers.base import whole
from microbench.importers.published.models_experts import EXPERTS
from microbench.importers.published.timm_models import by_timm

# layers, width, heads, key/value heads, hidden, vocabulary. Source: the config.json of each model
# at https://huggingface.co/meta-llama.
LLAMA = {
    ("2", "7"): (32, 4096, 32, 32, 11008, 32000),
    ("2", "13"): (40, 5120, 40, 40, 13824, 32000),
    ("2", "70"): (80, 8192, 64, 8, 28672, 32000),
    ("3", "8"): (32, 4096, 32, 8, 14336, 128256),
    ("3", "70"): (80, 8192, 64, 8, 28672, 128256),
    ("3.1", "405"): (126, 16384, 128, 8, 53248, 128256),
}
# layers, width, heads, hidden, vocabulary. Sources: arXiv:2005.14165, table 2.1; conf/training/gpt3
# of https://github.com/NVIDIA/NeMo-Framework-Launcher; 50257 padded to a multiple of 128.
GPT3 = {
    "5": (24, 4096, 32, 16384, 50304),
    "20": (44, 6144, 48, 24576, 50304),
    "175": (96, 12288, 96, 49152, 50304),
}
BERT = {"base": (12, 768, 12, 3072), "large": (24, 1024, 16, 4096)}
# Sources: arXiv:1810.04805; PyTorch/LanguageModeling/BERT, and lddl/dask/bert/binning.py in it, of
# https://github.com/NVIDIA/DeepLearningExamples: pre-training packs batches by length.
BERT_VOCABULARY = 30528  # 30522 padded to a multiple of 8
# ResNeXt and its SE form, as ConvNets of the same repository name them.
BY_TIMM = {"resnext101-32x4d": "resnext101_32x4d", "se-resnext101-32x4d": "seresnext101_32x4d"}
# Models of the same repository that are cases of ours: case, optimizer, doubt.
TXL = "softmax over all words assumed, train.py's default, as step times tell; LAMB taken as AdamW"
CASES = {
    "DLRM small": ("dlrm-criteo", "sgd", ""),
    "SSD": ("ssd300", "sgd", ""),
    "transformerxlbase": ("transformer-xl-base", "adamw", TXL),
    "transformerxllarge": ("transformer-xl-large", "adamw", TXL),
}
STATED = ("layers", "d_model", "heads", "ffn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A configuration as JSON, or a case; and what such models use where a row does not say."""

    hf_config: str | None = None
    case: str = ""
    builder: str = "hf"
    optimizer: str = "adamw"
    attn: str = "sdpa"
    doubt: str = ""


def model_of(given: Mapping[str, str]) -> Model:
    """The model of a row; ValueError where it states too little, or another model than it names."""
    name = given["model"]
    if "LoRA" in given.get("model_note", ""):
        raise ValueError("only a part of the weights is trained (LoRA)")
    if found := re.match(r"llama-?(\d(?:\.\d)?)[-_](\d+)b$", name, re.IGNORECASE):
        return _llama(found[1], found[2], given)
    if name in EXPERTS:
        config, doubt = EXPERTS[name]
        return Model(
            hf_config=_text(config | {"max_position_embeddings": _length(given)}), doubt=doubt
        )
    if found := re.fullmatch(r"GPT3-(\d+)B", name):
        return _gpt3(found[1], given)
    if given.get("model_note", "").startswith("MPT") or name.startswith("GPT-2 124M"):
        return _gpt(given)
    if found := re.fullmatch(r"bert_(base|large)_squad", name):
        return _bert(found[1], given)
    if name == "BERT":
        section = given.get("section", "").lower()
        if "pre-training" in section:
            raise ValueError("lengths vary: batches are binned by length, the longest is stated")
        if "fine" not in section:
            raise ValueError("model's task is not stated: pre-training or fine-tuning")
        doubt = "taken as BERT-large, the default of the recipe"
        return _bert("large", given, doubt)
    if name in ("resnet50", "resnet50v1.5"):
        sizes = {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]}
        config = {"model_type": "resnet", "embedding_size": 64, "layer_type": "bottleneck"}
        config |= {"architectures": ["ResNetForImageClassification"], **sizes, "num_labels": 1000}
        return Model(hf_config=_text(config), optimizer="sgd")
    _several(given)
    if name in CASES:
        case, optimizer, doubt = CASES[name]
        return Model(case=case, builder="case", optimizer=optimizer, doubt=doubt)
    if name in BY_TIMM:
        return Model(hf_config=by_timm(BY_TIMM[name], 224), builder="timm", optimizer="sgd")
    raise ValueError(f"no configuration known for the model named: {name[:40]!r}")


def _several(given: Mapping[str, str]) -> None:
    """ValueError where runs on several GPUs are not what their plan says."""
    if (whole(given.get("n_gpus")) or 1) == 1:
        return
    if given["model"].startswith("transformerxl"):  # train.py's default: no DDP; with 2.2 GB of
        # gradients 8 GPUs over PCIe take as long a step as one
        raise ValueError("gradients are not exchanged, as step times tell")
    if given["model"] == "SSD" and given.get("set") == "v0":  # N GPUs: N times the step of one
        raise ValueError("throughput is of one process, as step times tell")


def _text(config: Mapping[str, object]) -> str:
    return json.dumps(config, sort_keys=True)


def _stated(given: Mapping[str, str], known: tuple[int, ...]) -> None:
    """ValueError where a row's own sizes are not those of the model it names."""
    for column, size in zip(STATED, known, strict=True):
        if given.get(column) and whole(given[column]) != size:
            raise ValueError(f"{column} is not that of the model named")


def _length(given: Mapping[str, str]) -> int:
    if seq := whole(given.get("seq_len_tokens")):
        return seq
    raise ValueError("sequence length is not stated")


def _llama(version: str, size: str, given: Mapping[str, str]) -> Model:
    if (version, size) not in LLAMA:
        raise ValueError(f"no configuration known for the model named: {given['model'][:40]!r}")
    layers, width, heads, kv_heads, hidden, vocabulary = LLAMA[version, size]
    _stated(given, (layers, width, heads, hidden))
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
        **{"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"vocab_size": vocabulary, "max_position_embeddings": _length(given)},
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    }
    return Model(hf_config=_text(config))


def _gpt3(size: str, given: Mapping[str, str]) -> Model:
    if size not in GPT3:
        raise ValueError(f"no configuration known for the model named: {given['model'][:40]!r}")
    layers, width, heads, hidden, vocabulary = GPT3[size]
    sizes = {"layers": layers, "d_model": width, "heads": heads, "ffn": hidden, "vocab": vocabulary}
    return _gpt({**given, **{k: str(v) for k, v in sizes.items()}})


def _gpt(given: Mapping[str, str]) -> Model:
    """GPT-2's form: biases, layer norms, learned positions; MPT's parameter counts fit it."""
    sizes = {name: whole(given.get(name)) for name in (*STATED, "vocab")}
    for column, size in sizes.items():
        if not size:
            raise ValueError(f"model's {column} is not stated")
    untied = "untied" in given["model"]
    config = {
        **{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        **{"n_layer": sizes["layers"], "n_embd": sizes["d_model"], "n_head": sizes["heads"]},
        **{"n_inner": sizes["ffn"], "vocab_size": sizes["vocab"], "n_positions": _length(given)},
        **{"activation_function": "gelu", "tie_word_embeddings": not untied},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    return Model(hf_config=_text(config), doubt="qkv biases added" if untied else "")


def _bert(size: str, given: Mapping[str, str], doubt: str = "") -> Model:
    layers, width, heads, hidden = BERT[size]
    _stated(given, BERT[size])
    config = {
        **{"architectures": ["BertForQuestionAnswering"], "model_type": "bert"},
        **{"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": hidden},
        **{"num_attention_heads": heads, "vocab_size": BERT_VOCABULARY, "hidden_act": "gelu"},
        "max_position_embeddings": max(512, _length(given)),
    }
    return Model(hf_config=_text(config), attn="eager", doubt=doubt)
