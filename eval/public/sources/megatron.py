"""Imports Megatron-LM's golden values: iterations and peak memory of small models on 8 A100."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from itercast.eval.public.sources.megatron_models import (
    ENGINE,
    Flags,
    attention_of,
    kind_of,
    model_of,
)
from itercast.eval.public.sources.plans import sharded
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
from itercast.microbench.yaml_text import load_yaml

ABOUT = About(
    source="megatron-lm",
    where="https://github.com/NVIDIA/Megatron-LM, golden values of its functional tests",
    licence="BSD-3 and Apache-2.0",
    conventions=(
        "time_us is the median iteration of a run on one DGX A100; batch is sequences per "
        "data-parallel replica and step. memory_bytes is torch's peak on the last rank, so it is "
        "taken without a pipeline only. Weights are in half precision; not said: the optimizer's "
        "copy of them in fp32, gradients summed in fp32, and exchanged after the backward pass "
        "where --overlap-grad-reduce is not set. Not stated, and assumed: the tokenizer's "
        "vocabulary and default dropout; fused kernels in an eager loop."
    ),
)
RUNS, CONFIGS = "golden_runs.csv.gz", "model_configs.json.gz"
GPUS = 8
MACHINE = "dgx-a100"
GPU = assumed(__file__, "gpu")
# Flags that no plan states, and the word for each.
UNKNOWN_PLANS = {
    "--account-for-embedding-in-pipeline-split": "an embedding counted as a layer of its stage",
    "--account-for-loss-in-pipeline-split": "a loss counted as a layer of its stage",
    "--encoder-pipeline-model-parallel-size": "a pipeline of the encoder by itself",
    "--encoder-tensor-model-parallel-size": "tensor parallelism of the encoder by itself",
    "--cp-comm-type": "context parallelism of another kind than a ring",
    "--combined-1f1b": "experts' messages overlapped with other micro-batches",
    "--freeze-LM": "frozen weights",
    "--use-packed-sequence": "packed sequences",
}
STAGES = {
    "first": "--decoder-first-pipeline-num-layers",
    "last": "--decoder-last-pipeline-num-layers",
}
INSTANCES = "--num-distributed-optimizer-instances"  # groups of replicas that shard by themselves
AXES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
}


def read(path: Path) -> Imported:
    """Read a folder with the runs and the configurations that they name."""
    for name in (RUNS, CONFIGS):
        if not (path / name).is_file():
            raise refuse(path, "a folder of Megatron-LM's golden values", f"{RUNS} and {CONFIGS}")
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(path / RUNS, ("case", "cfg", "median_s", "mem_max_allocated", "date"))
    rows = list(_rows(collector, frame, _flags(path / CONFIGS))) if frame is not None else []
    if rows:
        made = pd.DataFrame(rows).assign(run_id=collector.run_id(path / RUNS))
        collector.add("iteration", made, ("batch", "world_size", "ranks_per_node"))
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


def _rows(
    collector: RowCollector, frame: pd.DataFrame, flags: Mapping[str, Flags]
) -> Iterator[dict[str, Any]]:
    for given in frame.to_dict("records"):
        try:
            if given["cfg"] not in flags:
                raise ValueError("configuration of the run is missing")
            row = _row(flags[given["cfg"]], str(given["case"]))
        except ValueError as exc:
            collector.drop(str(exc))
            continue
        peak = number(given["mem_max_allocated"]) if "pp=" not in row["plan"] else 0.0
        yield {
            **row,
            "time_us": number(given["median_s"]) * 1e6,
            "memory_bytes": peak or np.nan,
            "stack": f"megatron-lm-{given['date']}",
            "origin": f"{collector.name(collector.root / RUNS)}:{given['line']}",
        }


def _row(flags: Flags, case: str) -> dict[str, Any]:
    """What the flags of a run state; ValueError names what cannot be said."""
    config = model_of(flags)
    plan, batch = plan_of(flags)
    return {
        "op": "train_step",
        "gpu": GPU,
        "timer": "with_launch",
        "dtype": "bf16" if flags.get("--bf16") else "fp16" if flags.get("--fp16") else "fp32",
        "amp": False,
        "case": case,
        "kind": kind_of(case),
        "d_model": whole(flags.get("--hidden-size")),
        "builder": "hf",
        "hf_config": config,
        "mode": "train",
        "plan": plan,
        "batch": batch,
        "seq": whole(flags.get("--seq-length")),
        "loss": "default",
        "optimizer": "adamw",
        "attn": attention_of(flags),
        "engine": ENGINE,
        "compile": False,
        "source": ABOUT.source,
        "machine": MACHINE,
        "world_size": GPUS,
        "ranks_per_node": GPUS,
    }


def plan_of(flags: Flags) -> tuple[str, int]:
    """Plan text, and sequences of a replica and step; ValueError names what no plan states."""
    for flag, word in UNKNOWN_PLANS.items():
        if flags.get(flag):
            raise ValueError(f"plan has {word} ({flag})")
    n = {axis: whole(flags.get(flag)) or 1 for axis, flag in AXES.items()}
    dp, rest = divmod(GPUS, n["tp"] * n["pp"] * n["cp"])
    if rest:
        raise ValueError("degrees of the plan do not fit the number of GPUs")
    batch, each = whole(flags.get("--global-batch-size")), whole(flags.get("--micro-batch-size"))
    if not batch or not each or batch % (dp * each):
        raise ValueError("global batch is not a multiple of dp and micro-batch")
    micro = batch // (dp * each)
    if _virtual(flags, n["pp"]) > 1 and micro % n["pp"]:
        raise ValueError("plan has interleaved stages and micro-batches that pp does not divide")
    parts: dict[str, Any] = {"dp": dp, **{axis: n[axis] for axis in ("tp", "pp", "cp", "ep")}}
    parts = {axis: degree for axis, degree in parts.items() if degree > 1}
    if n["ep"] > 1 and flags.get(AXES["etp"]) and n["etp"] != n["tp"]:
        parts["etp"] = n["etp"]
    if micro > 1:
        parts["micro" if n["pp"] > 1 else "accumulate"] = micro
    parts |= _options(flags, dp * n["cp"], n["pp"], n["tp"])
    return ",".join(f"{k}={v}".rstrip("=") for k, v in parts.items()), batch // dp


def _options(flags: Flags, replicas: int, stages: int, tp: int) -> dict[str, Any]:
    """Options of the plan beside its degrees."""
    parts: dict[str, Any] = {}
    if (virtual := _virtual(flags, stages)) > 1:
        parts["schedule"] = f"interleaved:{virtual}"
    parts |= {
        key: n for key, flag in STAGES.items() if stages > 1 and (n := whole(flags.get(flag)))
    }
    if virtual > 1 and parts.keys() & STAGES.keys():
        raise ValueError("plan has uneven first and last stages, and interleaved ones")
    if flags.get("--sequence-parallel") and tp > 1:
        parts["sp"] = ""
    if flags.get("--recompute-granularity"):
        parts["recompute"] = flags["--recompute-granularity"]
    if replicas > 1:
        whole_model = flags.get("--data-parallel-sharding-strategy") == "optim_grads_params"
        zero = 3 if whole_model else 1 if flags.get("--use-distributed-optimizer") else 0
        inner, rest = divmod(replicas, whole(flags.get(INSTANCES)) or 1)
        if rest or not inner:
            raise ValueError(
                f"replicas do not divide into instances of the optimizer ({INSTANCES})"
            )
        parts |= sharded(zero, inner, replicas) if zero else {}
    return parts


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
