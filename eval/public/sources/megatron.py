"""Imports Megatron-LM's golden values: iterations and peak memory of small models on 8 A100."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import yaml

from itercast.eval.public.sources import plans
from itercast.eval.public.sources.models import gpt2_config, transformer
from itercast.microbench.assumptions import assumed
from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    Unreadable,
    number,
    read_json,
    refuse,
    whole,
)
from itercast.microbench.store import Facts, Row
from itercast.microbench.yaml_text import facts_of, load_yaml

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
RUNS, CONFIGS = "golden_runs.csv.gz", "model_configs.json.gz"
GPUS = 8
GPU = assumed(__file__, "gpu")
DROPOUT = assumed(__file__, "dropout")
ENGINE = assumed(__file__, "engine")
VOCABULARIES = assumed(__file__, "vocabularies")
DIVISIBLE_BY = 128  # --make-vocab-size-divisible-by, times the tensor-parallel degree
REFUSED: Mapping[str, str] = FACTS["refused"]
SPEC_AS_DEFAULT = ("local",)
STATED, STAGES, SIZES = (FACTS[name] for name in ("stated", "stages", "sizes"))
Flags = Facts


def read(path: Path) -> Imported:
    """Read a folder with the runs and the configurations that they name."""
    for name in (RUNS, CONFIGS):
        if not (path / name).is_file():
            raise refuse(path, "a folder of Megatron-LM's golden values", f"{RUNS} and {CONFIGS}")
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(path / RUNS, ("case", "cfg", "median_s", "mem_max_allocated", "date"))
    collector.iterations(path / RUNS, frame, partial(_row, _flags(path / CONFIGS)))
    return collector.done()


def _flags(path: Path) -> dict[str, Flags]:
    """Flags of the model and its plan, by the name of a configuration."""
    texts = read_json(path)
    if not isinstance(texts, Mapping):
        raise Unreadable("configurations are not by name")
    found: dict[str, Flags] = {}
    for name, text in texts.items():
        try:
            values = load_yaml(str(text))
        except yaml.YAMLError:
            continue
        flags = values.get("MODEL_ARGS") if isinstance(values, Mapping) else None
        if isinstance(flags, Mapping):
            found[str(name)] = {str(k): v for k, v in flags.items()}
    return found


def _row(known: Mapping[str, Flags], given: Mapping[str, str]) -> Row:
    """One run; ValueError names what cannot be said."""
    if given["cfg"] not in known:
        raise ValueError("configuration of the run is missing")
    flags = known[given["cfg"]]
    config, (plan, dp) = model_of(flags), plan_of(flags)
    peak = number(given["mem_max_allocated"]) if "pp=" not in plan else 0.0
    return {
        "op": "train_step",
        "gpu": GPU,
        "timer": "with_launch",
        "stack": f"megatron-lm-{given['date']}",
        "dtype": "bf16" if flags.get("--bf16") else "fp16" if flags.get("--fp16") else "fp32",
        "amp": False,
        "time_us": number(given["median_s"]) * 1e6,
        "memory_bytes": peak or np.nan,
        "case": given["case"],
        "d_model": whole(flags.get("--hidden-size")),
        "builder": "hf",
        "hf_config": config,
        "mode": "train",
        "plan": plan,
        "batch": whole(flags.get("--global-batch-size")) // dp,
        "seq": whole(flags.get("--seq-length")),
        "loss": "default",
        "optimizer": "adamw",
        "attn": attention_of(flags),
        "engine": ENGINE,
        "compile": False,
        "source": ABOUT.source,
        "machine": "dgx-a100",
        "world_size": GPUS,
        "ranks_per_node": GPUS,
    }


def model_of(flags: Flags) -> str:
    """The model's configuration as JSON; ValueError names a part that no configuration has."""
    for flag, word in REFUSED.items():
        if flags.get(flag) and flags[flag] not in SPEC_AS_DEFAULT:
            raise ValueError(f"run has {word} ({flag})")
    sizes = [whole(flags.get(flag)) for flag in SIZES.values()]
    for (ours, flag), size in zip(SIZES.items(), sizes, strict=True):
        if not size:
            raise ValueError(f"model's {ours} is not stated ({flag})")
    *sizes, positions = sizes
    sizes.append(whole(flags.get("--ffn-hidden-size")) or 4 * sizes[1])
    kind = "bert" if "bert" in str(flags.get("--data-path", "")) else "gpt"
    vocabulary = _padded(VOCABULARIES[kind], whole(flags.get(STATED["tp"])) or 1)
    dropout = _dropout(flags)
    tied = not flags.get("--untie-embeddings-and-output-weights")
    if kind == "bert":
        rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        return transformer("BertForPreTraining", "bert", sizes, vocabulary, positions, **rates)
    if flags.get("--position-embedding-type") == "rope":
        return transformer(
            *("GPTNeoXForCausalLM", "gpt_neox", sizes, vocabulary, positions),
            rotary_pct=1.0,
            use_parallel_residual=False,  # layers one after the other
            attention_bias=not flags.get("--disable-bias-linear"),
            hidden_dropout=dropout,
            attention_dropout=dropout,
            tie_word_embeddings=tied,
        )
    names = dict(zip(("n_layer", "n_embd", "n_head", "n_inner"), sizes, strict=True))
    names |= {"vocab_size": vocabulary, "n_positions": positions, "tie_word_embeddings": tied}
    return gpt2_config(**names, dropout=dropout)


def _padded(tokens: int, tp: int) -> int:
    """Rows of Megatron's embedding: a multiple of 128 on each tensor-parallel rank."""
    each = DIVISIBLE_BY * tp
    return -(-tokens // each) * each


def _dropout(flags: Flags) -> float:
    """The dropout of hidden values and of attention, which must be one."""
    stated = {float(flags.get(f"--{what}-dropout", DROPOUT)) for what in ("hidden", "attention")}
    if len(stated) > 1:
        raise ValueError("dropout of hidden values differs from that of attention")
    return stated.pop()


def attention_of(flags: Flags) -> str:
    """How attention is computed: ``sdpa`` by a fused kernel, ``eager`` by products and softmax.

    Transformer Engine takes a fused kernel unless told otherwise; the local layers never do.
    """
    backend = flags.get("--attention-backend")
    if backend in ("flash", "fused"):
        return "sdpa"
    local = flags.get("--transformer-impl") == "local" or flags.get("--use-legacy-models")
    return "eager" if backend in ("unfused", "local") or local else "sdpa"


def plan_of(flags: Flags) -> tuple[str, int]:
    """Plan text, and dp; ValueError names what no plan states."""
    given = {column: str(flags.get(flag) or "") for column, flag in STATED.items()}
    stages = whole(given["pp"]) or 1
    virtual = _virtual(flags, stages)
    whole_model = flags.get("--data-parallel-sharding-strategy") == "optim_grads_params"
    sharded = "distributed optimizer" if flags.get("--use-distributed-optimizer") else ""
    given |= {
        "n_gpus": str(GPUS),
        "vp": str(virtual),
        "sharding": "FULL_SHARD" if whole_model else sharded,
        "framework": "Megatron" if flags.get("--sequence-parallel") else "",
    }
    text, dp = plans.plan_of(given)
    each = whole(given["micro_batch_per_gpu"])
    if not each or whole(given["global_batch"]) % (dp * each):
        raise ValueError("global batch is not a multiple of dp and micro-batch")
    parts = text.split(",")
    if instances := whole(flags.get("--num-distributed-optimizer-instances")):
        parts = _in_instances(parts, instances, dp * (whole(given["cp"]) or 1))
    uneven = {key: n for key, flag in STAGES.items() if (n := whole(flags.get(flag)))}
    if uneven and virtual > 1:
        raise ValueError("plan has uneven first and last stages, and interleaved ones")
    parts += [f"{key}={n}" for key, n in uneven.items() if stages > 1]
    return ",".join(parts), dp


def _in_instances(parts: list[str], instances: int, replicas: int) -> list[str]:
    """A plan whose replicas shard in groups by themselves: instances of the optimizer."""
    inner, rest = divmod(replicas, instances)
    if rest:
        raise ValueError("replicas do not divide into instances of the optimizer")
    zero = sum(int(part.removeprefix("zero=")) for part in parts if part.startswith("zero="))
    sharded = plans.sharded(zero, inner, replicas) if zero else {}
    kept = [part for part in parts if not part.startswith("zero=")]
    return [*kept, *(f"{key}={n}" for key, n in sharded.items())]


def _virtual(flags: Flags, stages: int) -> int:
    """Virtual stages per rank: as stated, or layers / (stages * layers of a virtual stage)."""
    if stated := whole(flags.get("--num-virtual-stages-per-pipeline-rank")):
        return stated
    each = whole(flags.get("--num-layers-per-virtual-pipeline-stage"))
    if not each or stages == 1:
        return 1
    virtual, rest = divmod(whole(flags.get("--num-layers")), stages * each)
    if rest:
        raise ValueError("layers do not divide into virtual stages")
    return virtual
