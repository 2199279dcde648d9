"""Models named in published tables, as configurations to build them from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from itercast.eval.public.sources.timm_models import by_timm
from itercast.microbench.assumptions import assumed
from itercast.microbench.importers.base import whole
from itercast.microbench.yaml_text import facts_of

FACTS = facts_of(__file__)
LLAMA, GPT3, BERT, EXPERTS = (FACTS[name] for name in ("llama", "gpt3", "bert", "experts"))
# "Llama-3.1-8B", "llama31_8b", "meta-llama/Meta-Llama-3-70B": 3.1 differs from 3 in its positions.
LLAMA_NAME = re.compile(
    r"(?:[\w-]+/)?(?:meta-)?llama[-_ ]?(\d)(?:[._]?\d(?=[-_ ]))?[-_ ]?(\d+)b", re.IGNORECASE
)
# Sources: PyTorch/LanguageModeling/BERT, and lddl/dask/bert/binning.py in it, of
# https://github.com/NVIDIA/DeepLearningExamples: pre-training packs batches by length.
GPT3_VOCABULARY = assumed(__file__, "gpt3_vocabulary")
BERT_VOCABULARY = assumed(__file__, "bert_vocabulary")
BERT_SIZE = assumed(__file__, "bert_size")
# ResNeXt and its SE form, as ConvNets of the same repository names them.
BY_TIMM = {"resnext101-32x4d": "resnext101_32x4d", "se-resnext101-32x4d": "seresnext101_32x4d"}
# Models of the same repository with a case of their own, and their optimizers.
CASES = {"DLRM small": "dlrm-criteo", "SSD": "ssd300"} | assumed(__file__, "transformer_xl_cases")
OPTIMIZERS = assumed(__file__, "optimizers")
DOUBTS = {
    name: "full softmax inferred from these step times, so not blind"
    for name in assumed(__file__, "transformer_xl_cases")
}
ONE_GPU_ONLY = assumed(__file__, "one_gpu_only")
TIMM_IMAGE_SIDE: int = assumed(__file__, "timm_image_side")
ADAPTERS = re.compile(r"\blora\b|low-rank adapt", re.IGNORECASE)
SAID_IN = ("model", "model_note", "section", "set", "row_id", "framework", "doubts")
STATED = ("layers", "d_model", "heads", "ffn")
GPT2_SIZES = {"n_layer": "layers", "n_embd": "d_model", "n_head": "heads"}
GPT2_SIZES |= {"n_inner": "ffn", "vocab_size": "vocab"}


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
    if found := LLAMA_NAME.fullmatch(name):
        return _llama(found[1], found[2], given)
    if name in EXPERTS:
        known = EXPERTS[name]
        config = _text(known["config"] | {"max_position_embeddings": _length(given)})
        return Model(hf_config=config, doubt=known["doubt"])
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
        doubt = f"taken as BERT-{BERT_SIZE}, the default of the recipe"
        return _bert(BERT_SIZE, given, doubt)
    if name in ("resnet50", "resnet50v1.5"):
        return Model(hf_config=RESNET50, optimizer="sgd")
    _check_one_gpu(given)
    if name in CASES:
        optimizer, doubt = OPTIMIZERS.get(name, "adamw"), DOUBTS.get(name, "")
        return Model(case=CASES[name], builder="case", optimizer=optimizer, doubt=doubt)
    if name in BY_TIMM:
        return Model(
            hf_config=by_timm(BY_TIMM[name], TIMM_IMAGE_SIDE), builder="timm", optimizer="sgd"
        )
    raise ValueError(f"no configuration for the model {name[:40]!r}")


def _check_one_gpu(given: Mapping[str, str]) -> None:
    """ValueError for runs on several GPUs that were not data parallel, as was inferred."""
    if (whole(given.get("n_gpus")) or 1) == 1:
        return
    for model, set_name, reason in ONE_GPU_ONLY:
        if given["model"] == model and set_name in ("", given.get("set")):
            raise ValueError(reason)


def _text(config: Mapping[str, object]) -> str:
    return json.dumps(config, sort_keys=True)


def transformer(
    architecture: str,
    model_type: str,
    sizes: Sequence[int],
    vocabulary: int,
    positions: int,
    **own: object,
) -> str:
    """A configuration of transformers as JSON; ``sizes``: layers, width, heads, hidden width."""
    layers, width, heads, hidden = sizes
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "hidden_act": "gelu",
    }
    return _text(config | own)


RESNET50 = _text(FACTS["resnet50"])


def _stated(given: Mapping[str, str], known: Sequence[int]) -> None:
    """ValueError where the sizes in a row differ from those of the model it names."""
    for column, size in zip(STATED, known, strict=True):
        if given.get(column) and whole(given[column]) != size:
            raise ValueError(f"{column} differs from that of the named model")


def _length(given: Mapping[str, str]) -> int:
    if seq := whole(given.get("seq_len_tokens")):
        return seq
    raise ValueError("sequence length is not stated")


def _llama(version: str, size: str, given: Mapping[str, str]) -> Model:
    if size not in LLAMA.get(version, ()):
        raise ValueError(f"no configuration for the model {given['model'][:40]!r}")
    kv_heads, vocabulary, *sizes = LLAMA[version][size]
    _stated(given, sizes)
    config = transformer(
        "LlamaForCausalLM",
        "llama",
        sizes,
        vocabulary,
        _length(given),
        hidden_act="silu",
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return Model(hf_config=config)


def _gpt3(size: str, given: Mapping[str, str]) -> Model:
    if size not in GPT3:
        raise ValueError(f"no configuration for the model {given['model'][:40]!r}")
    layers, width, heads, hidden = GPT3[size]
    sizes = {"layers": layers, "d_model": width, "heads": heads, "ffn": hidden}
    sizes |= {"vocab": GPT3_VOCABULARY}
    return _gpt({**given, **{k: str(v) for k, v in sizes.items()}})


def _gpt(given: Mapping[str, str]) -> Model:
    """A GPT-2 with these sizes (biases, layer norms, learned positions), as MPT has no own form."""
    sizes = {name: whole(given.get(name)) for name in (*STATED, "vocab")}
    for column, size in sizes.items():
        if not size:
            raise ValueError(f"model's {column} is not stated")
    untied = "untied" in given["model"]
    shape = {name: sizes[column] for name, column in GPT2_SIZES.items()}
    config = gpt2_config(**shape, n_positions=_length(given), tie_word_embeddings=not untied)
    return Model(hf_config=config, doubt="qkv biases added" if untied else "")


def gpt2_config(*, dropout: float = 0.0, **sizes: int) -> str:
    """GPT-2's configuration as JSON, from sizes named as in GPT2Config, and one dropout rate."""
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu",
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        **sizes,
    }
    return _text(config)


def _bert(size: str, given: Mapping[str, str], doubt: str = "") -> Model:
    _stated(given, BERT[size])
    length = max(512, _length(given))
    config = transformer("BertForQuestionAnswering", "bert", BERT[size], BERT_VOCABULARY, length)
    return Model(hf_config=config, attn="eager", doubt=doubt)
