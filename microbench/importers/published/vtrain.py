"""Imports vTrain (MICRO'24): iterations of GPT on 2 and 4 A100, all_reduce of 2 to 8 A100."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.microbench.assumptions import assumed
from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    number,
    positive,
    refuse,
    whole,
)
from itercast.microbench.importers.published.megatron_models import (
    DROPOUT,
    ENGINE,
    VOCABULARIES,
    padded_vocabulary,
)
from itercast.microbench.importers.published.models import gpt2_config

ABOUT = About(
    source="vtrain",
    where="https://github.com/VIA-Research/vTrain, data/ground_truth_single.csv and trace",
    licence="MIT",
    conventions=(
        "time_us is one optimizer step of Megatron-DeepSpeed's GPT in fp16, 1F1B, full "
        "recomputation; batch is sequences per data-parallel replica and step. Not stated, and "
        "assumed: the vocabulary, dropout, the form of the A100, fused kernels and unfused "
        "attention, as Megatron has them by default. all_reduce: nccl-tests' in-place times of "
        "fp32 on a node, upstream in ns; the size is the whole array."
    ),
)
FILE = "data/ground_truth_single.csv"
SIZES = {  # as the table names them, without the number sign
    "gpus": "GPUs",
    "batch": "global batch",
    "micro": "micro batch",
    "width": "hidden size",
    "heads": "attention heads",
    "layers": "layers",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
TIME = "iteration time (ms)"
ALL_REDUCE = "trace/a100/AR_GPU*_LUT*"
MESSAGE = ("size", "count", "type", "out_ns", "out_busbw", "in_ns", "in_busbw")  # columns
GPU, NODE = assumed(__file__, "gpu"), assumed(__file__, "node")
TOKENS = VOCABULARIES["gpt"]
DOUBTS = f"assumed: {GPU}, vocabulary of {TOKENS} padded, dropout {DROPOUT}, fused kernels"


def read(path: Path) -> Imported:
    """Read a checkout of vTrain, or its table of iterations."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise refuse(path, "a checkout of vTrain", FILE)
    collector = RowCollector(ABOUT, path)
    frame = collector.csv(file, (TIME,))
    rows = []
    for line in [] if frame is None else frame.to_dict("records"):
        given = {str(k).lstrip("# "): str(v) for k, v in line.items()}
        try:
            row = _row({ours: whole(given.get(theirs)) for ours, theirs in SIZES.items()})
        except ValueError as exc:
            collector.drop(str(exc))
            continue
        time = {"time_us": number(given[TIME]) * 1e3}
        rows.append({**row, **time, "origin": f"{collector.name(file)}:{given['line']}"})
    if rows:
        frame = pd.DataFrame(rows).assign(run_id=collector.run_id(file))
        collector.add("iteration", frame, ("batch", "world_size", "ranks_per_node"))
    for table in sorted(path.glob(ALL_REDUCE)) if path.is_dir() else ():
        _all_reduce(collector, table)
    return collector.done()


def _all_reduce(collector: RowCollector, path: Path) -> None:
    """Collect one table of nccl-tests' all_reduce; the file's name says on how many GPUs."""
    ranks = re.search(r"_GPU(\d{1,4})_", path.name)
    if ranks is None:
        return collector.drop(f"file without a number of GPUs: {path.name[:40]!r}")
    frame = collector.csv(path, (), MESSAGE)
    if frame is None:
        return None
    frame = frame[frame["size"] != "size(B)"]  # the header, which names two columns alike
    frame = collector.mapped(frame, "type", {"float": "fp32"})
    rows = {
        "op": "all_reduce",
        "gpu": GPU,
        "stack": "nccl",
        "timer": "device",
        "dtype": frame["type"],
        "time_us": positive(frame["in_ns"]) * 1e-3,
        "node": NODE,
        "link": "nvlink",
        "world_size": int(ranks[1]),
        "ranks_per_node": int(ranks[1]),
        "message_bytes": frame["size"],
        "run_id": collector.run_id(path),
        "origin": f"{collector.name(path)}:" + frame["line"].astype(str),
        "doubts": f"assumed: {GPU}, {NODE}",
    }
    sizes = ("world_size", "ranks_per_node", "message_bytes")
    return collector.add("collective", pd.DataFrame(rows, index=frame.index), sizes)


def _row(n: Mapping[str, int]) -> dict[str, Any]:
    """One row of the dataset by its sizes; ValueError where the plan does not fit."""
    missing = next((SIZES[name] for name, size in n.items() if not size), "")
    if missing:
        raise ValueError(f"{missing} is not a positive whole number")
    return {
        "op": "train_step",
        "gpu": GPU,
        "timer": "with_launch",
        "stack": "megatron-deepspeed",
        "dtype": "fp16",
        "amp": False,
        "case": f"gpt-{n['layers']}x{n['width']}",
        "builder": "hf",
        "hf_config": gpt2_config(
            n_layer=n["layers"],
            n_embd=n["width"],
            n_head=n["heads"],
            n_inner=4 * n["width"],
            vocab_size=padded_vocabulary(TOKENS, n["tp"]),
            n_positions=n["seq"],
            dropout=DROPOUT,
        ),
        "mode": "train",
        "plan": _plan(n),
        "batch": n["batch"] // n["dp"],
        "seq": n["seq"],
        "loss": "default",
        "optimizer": "adamw",
        "attn": "eager",
        "engine": ENGINE,
        "compile": False,
        "source": "vtrain",
        "world_size": n["gpus"],
        "ranks_per_node": n["gpus"],
        "doubts": DOUBTS,
    }


def _plan(n: Mapping[str, int]) -> str:
    """Text of the plan; micro-batches = global batch / (dp * micro-batch), also where pp = 1."""
    if n["dp"] * n["tp"] * n["pp"] != n["gpus"]:
        raise ValueError("degrees of the plan do not fit the number of GPUs")
    micro, rest = divmod(n["batch"], n["dp"] * n["micro"])
    if rest or not micro:
        raise ValueError("global batch is not a multiple of dp and micro-batch")
    parts = [f"{axis}={n[axis]}" for axis in ("dp", "tp", "pp") if n[axis] > 1]
    if n["pp"] > 1:
        parts.append(f"micro={micro}")
    elif micro > 1:
        parts.append(f"accumulate={micro}")
    return ",".join([*parts, "recompute=full"])
