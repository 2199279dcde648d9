"""Translates Megatron-LM's flags into model configurations and attention kernels."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from itercast.eval.public.sources.models import gpt2_config
from itercast.microbench.assumptions import assumed
from itercast.microbench.importers.base import whole

Flags = Mapping[str, Any]
DIVISIBLE_BY = 128  # --make-vocab-size-divisible-by, times the tensor-parallel degree
DROPOUT = assumed(__file__, "dropout")
ENGINE = assumed(__file__, "engine")
VOCABULARIES = assumed(__file__, "vocabularies")
# Flags of parts that no configuration states, and the word for each.
UNKNOWN_PARTS = {
    "--num-experts": "experts without a gate",
    "--is-hybrid-model": "state-space layers",
    "--img-h": "images beside text",
    "--encoder-seq-length": "encoder and decoder of different lengths",
    "--multi-latent-attention": "multi-latent attention",
    "--qk-layernorm": "norms of queries and keys",
    "--group-query-attention": "grouped queries in a GPT of layer norms",
    "--swiglu": "gated layers in a GPT of layer norms",
    "--spec": "a layer specification",
}
SPEC_AS_DEFAULT = ("local",)


def padded_vocabulary(tokens: int, tp: int) -> int:
    """Rows of Megatron's embedding: a multiple of 128 on each tensor-parallel rank."""
    each = DIVISIBLE_BY * tp
    return -(-tokens // each) * each


def model_of(flags: Flags) -> str:
    """The model's configuration as JSON; ValueError names a part that no configuration has."""
    for flag, word in UNKNOWN_PARTS.items():
        if flags.get(flag) and flags[flag] not in SPEC_AS_DEFAULT:
            raise ValueError(f"model has {word} ({flag})")
    if "bert" in str(flags.get("--data-path", "")):
        return _bert(flags)
    if flags.get("--position-embedding-type") == "rope":
        return _rotary(flags)
    n = _sizes(flags)
    return gpt2_config(
        n_layer=n["layers"],
        n_embd=n["width"],
        n_head=n["heads"],
        n_inner=n["hidden"],
        vocab_size=_vocabulary(flags, "gpt"),
        n_positions=n["positions"],
        tie_word_embeddings=not flags.get("--untie-embeddings-and-output-weights"),
        dropout=_dropout(flags),
    )


def attention_of(flags: Flags) -> str:
    """How attention is computed: ``sdpa`` by a fused kernel, ``eager`` by products and softmax.

    Transformer Engine takes a fused kernel unless told otherwise; the local layers never do.
    """
    backend = flags.get("--attention-backend")
    if backend in ("flash", "fused"):
        return "sdpa"
    local = flags.get("--transformer-impl") == "local" or flags.get("--use-legacy-models")
    return "eager" if backend in ("unfused", "local") or local else "sdpa"


def _sizes(flags: Flags) -> dict[str, int]:
    names = {"layers": "--num-layers", "width": "--hidden-size", "heads": "--num-attention-heads"}
    names |= {"positions": "--max-position-embeddings"}
    sizes = {ours: whole(flags.get(flag)) for ours, flag in names.items()}
    for ours, flag in names.items():
        if not sizes[ours]:
            raise ValueError(f"model's {ours} is not stated ({flag})")
    return {**sizes, "hidden": whole(flags.get("--ffn-hidden-size")) or 4 * sizes["width"]}


def _vocabulary(flags: Flags, kind: str) -> int:
    tp = whole(flags.get("--tensor-model-parallel-size")) or 1
    return padded_vocabulary(VOCABULARIES[kind], tp)


def _dropout(flags: Flags) -> float:
    """The dropout of hidden values and of attention, which must be one."""
    stated = {float(flags.get(f"--{what}-dropout", DROPOUT)) for what in ("hidden", "attention")}
    if len(stated) > 1:
        raise ValueError("dropout of hidden values differs from that of attention")
    return stated.pop()


def _bert(flags: Flags) -> str:
    """BERT for pre-training: masked tokens and the next sentence."""
    n, dropout = _sizes(flags), _dropout(flags)
    config = {
        "architectures": ["BertForPreTraining"],
        "model_type": "bert",
        "num_hidden_layers": n["layers"],
        "hidden_size": n["width"],
        "intermediate_size": n["hidden"],
        "num_attention_heads": n["heads"],
        "vocab_size": _vocabulary(flags, "bert"),
        "max_position_embeddings": n["positions"],
        "hidden_act": "gelu",
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return json.dumps(config, sort_keys=True)


def _rotary(flags: Flags) -> str:
    """A GPT with rotary positions, as GPT-NeoX has them, with layers one after the other."""
    n, dropout = _sizes(flags), _dropout(flags)
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_hidden_layers": n["layers"],
        "hidden_size": n["width"],
        "intermediate_size": n["hidden"],
        "num_attention_heads": n["heads"],
        "vocab_size": _vocabulary(flags, "gpt"),
        "max_position_embeddings": n["positions"],
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
        "attention_bias": not flags.get("--disable-bias-linear"),
        "hidden_act": "gelu",
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "tie_word_embeddings": not flags.get("--untie-embeddings-and-output-weights"),
    }
    return json.dumps(config, sort_keys=True)


def kind_of(case: str) -> str:
    """The kind of model that a test is of, by the folder it stands in."""
    return re.split(r"[/_]", case)[0]
