"""Imports peft's comparison of methods: LoRA on Llama-3.2-3B on one L40S."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.importers.base import About, Imported, RowCollector, number, refuse, whole

ABOUT = About(
    source="peft",
    where="https://github.com/huggingface/peft, method_comparison, all commits",
    licence="Apache-2.0",
    conventions=(
        "time_us is the mean step of a run over MetaMathQA in bf16, with adapters in fp32. Lengths "
        "vary up to max_seq: seq is the mean length, tokens_per_s * step / batch. lora is the rank "
        "of adapters on the layers that peft takes by default. Peak memory is left out: it is that "
        "of the longest batch."
    ),
)
FILE = "method_comparison.csv.gz"
COLUMNS: tuple[str, ...] = (
    "exp",
    "model",
    "dtype",
    "batch",
    "ms_per_step",
    "tokens_per_s",
    "trainable",
)
COLUMNS += ("compile", "gc", "optimizer", "peft", "r", "torch", "device")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 28,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
CONFIGS = {"meta-llama/Llama-3.2-3B": LLAMA}  # their config.json
# A rank, a scale by its root, or a shorter run; any other word is another method or other layers.
PLAIN = re.compile(r"rank\d+(-rslora)?(-steps\d+)?")


def read(path: Path) -> Imported:
    """Read the table of runs."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise refuse(path, "a folder of peft's comparison", FILE)
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(file, COLUMNS)
    rows = []
    for line in [] if frame is None else frame.to_dict("records"):
        try:
            row = _row({str(k): str(v) for k, v in line.items()})
        except ValueError as exc:
            collector.drop(str(exc))
            continue
        rows.append({**row, "origin": f"{collector.name(file)}:{line['line']}"})
    if rows:
        made = pd.DataFrame(rows).assign(run_id=collector.run_id(file))
        collector.add("iteration", made, ("batch", "seq", "world_size"))
    return collector.done()


def _row(given: Mapping[str, str]) -> dict[str, Any]:
    """Builds one row of the dataset; ValueError says what a row cannot express."""
    if given["model"] not in CONFIGS:
        raise ValueError(f"no configuration for the model {given['model'][:40]!r}")
    gpu = gpu_named(given["device"])
    if gpu is None:
        raise ValueError(f"unknown gpu: {given['device'][:40]!r}")
    rank = _rank(given)
    step_ms, batch = number(given["ms_per_step"]), whole(given["batch"])
    seq = round(number(given["tokens_per_s"]) * step_ms * 1e-3 / batch) if batch else 0
    if not seq:
        raise ValueError("batch or rate of tokens is not stated")
    return {
        "op": "train_step",
        "gpu": gpu,
        "timer": "with_launch",
        "stack": f"torch-{given['torch']}",
        "dtype": "bf16",
        "amp": False,
        "time_us": step_ms * 1e3,
        "case": given["exp"].rpartition("/")[2],
        "builder": "hf",
        "hf_config": json.dumps(CONFIGS[given["model"]], sort_keys=True),
        "lora": rank,
        "num_params_trained": whole(given["trainable"].removesuffix(".0")) or None,
        "mode": "train",
        "plan": "recompute=full" if given["gc"] == "True" else "",
        "batch": batch,
        "seq": seq,
        "loss": "default",
        "optimizer": "adamw",
        "attn": "sdpa",
        "engine": "eager",
        "compile": False,
        "source": ABOUT.source,
        "world_size": 1,
        "ranks_per_node": 1,
        "doubts": "lengths vary, taken at their mean",
    }


def _rank(given: Mapping[str, str]) -> int:
    """The rank of plain LoRA; ValueError names another method or variant."""
    if given["peft"] != "LORA":
        raise ValueError(f"method of fine-tuning is not LoRA: {given['peft'][:40]}")
    rank = whole(given["r"].removesuffix(".0"))
    name = given["exp"].rpartition("/")[2]
    variant = name[name.find("rank") :] if "rank" in name else name
    if not rank or not PLAIN.fullmatch(variant):
        raise ValueError(f"variant of LoRA: {re.sub(r'^rank[0-9]+-?', '', variant)[:40]!r}")
    if given["optimizer"] != "AdamW":
        raise ValueError(f"unknown optimizer: {given['optimizer'][:40]!r}")
    if (given["dtype"], given["compile"]) != ("bfloat16", "False"):
        raise ValueError("base is not in bf16, or compiled")
    return rank
