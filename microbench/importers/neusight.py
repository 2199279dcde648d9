"""Imports NeuSight (ASPLOS'25): fp32 times of single ops and of whole models on five GPUs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    Unreadable,
    integers,
    number,
    positive,
    read_json,
    refuse,
)

SAMPLES = 25
ABOUT = About(
    source="neusight",
    where="NeuSight (ASPLOS'25), https://github.com/sitar-lab/NeuSight",
    licence="MIT",
    conventions=(
        "Times are means of the 5 fastest of 25 runs, upstream in ms, with host launch (timer "
        "with_launch); fp32 without TF32. linear is addmm with a transposed weight; the other ops "
        "work on (B, H). conv is taken as square and with bias (nn.Conv2d's default). Whole "
        "models: eager attention, no loss and no optimizer, backward from the output; batch is "
        "per replica."
    ),
)
COLUMNS = ("OPName", "Latency", "Device", "Torch Version", "CUDNN Version", "CUDA Version")
LABEL = re.compile(
    r"(?P<model>.+?)-(?P<mode>inf|train)-(?P<seq>\d{1,9})-(?P<batch>\d{1,9})(-(?P<suffix>.+))?"
)
SUFFIX = re.compile(r"(?P<axis>dp|tp|pp)(?P<degree>\d{1,6})(_(?P<micro>\d{1,6}))?")


def read(path: Path) -> Imported:
    """Read op times and iteration times of a NeuSight checkout, or of its scripts/asplos."""
    for base in (path, path / "scripts/asplos", path / "NeuSight/scripts/asplos"):
        if (base / "data/dataset").is_dir() or (base / "label").is_dir():
            break
    else:
        looked_for = "scripts/asplos/data/dataset and scripts/asplos/label"
        raise refuse(path, "a NeuSight checkout", looked_for)
    collector = RowCollector(ABOUT, base)
    for part in ("train", "test"):
        folder = base / "data/dataset" / part
        tables = {p for p in folder.rglob("*") if p.name.endswith((".csv", ".csv.gz"))}
        for table in sorted(tables):
            _table(collector, table, part)
    for label in sorted((base / "label").rglob("*")):
        if label.name.endswith((".json", ".json.gz")):
            _label(collector, label, base)
        elif label.is_file():
            collector.drop("file not imported: per-node times of a traced layer")
    return collector.done()


def _gemm(f: pd.DataFrame) -> dict[str, Any]:
    """Columns of (B,M,N) x (B,N,K), summed over N, in BLAS names."""
    linear = f["OPName"] == "linear"
    batch, m = positive(f["B"]), positive(f["M"])
    return {
        "op": np.where(linear, "addmm", "bmm"),
        "m": np.where(linear, batch * m, m),
        "n": f["K"],
        "k": f["N"],
        "batch": np.where(linear, 1.0, batch),
        "layout": np.where(linear, "nt", "nn"),
    }


def _elementwise(f: pd.DataFrame) -> dict[str, Any]:
    """Columns of an elementwise op: two tensors, one and a scalar (name ends in u), or one.

    Ops get the names of captured calls. powu is taken as a general power, not a square: it takes
    longer than mulu where bandwidth is no limit.
    """
    numel = positive(f["B"]) * positive(f["H"])
    two = f["OPName"].isin(["add", "mul", "div", "pow"])
    return {
        "op": f["OPName"].replace(CANONICAL),
        "numel": numel,
        "inner": integers(numel),
        "tensors": np.where(two, 2, 1),
        "form": np.where(f["OPName"].isin(CANONICAL) & ~two, "scalar", "same"),
    }


def _softmax(f: pd.DataFrame) -> dict[str, Any]:
    return {"op": "_softmax", "outer": f["B"], "size": f["H"], "inner": 1}


def _norm(f: pd.DataFrame) -> dict[str, Any]:
    return {"op": "layer", "rows": f["B"], "cols": f["H"], "channels": 1, "groups": 1}


def _conv(f: pd.DataFrame) -> dict[str, Any]:
    """Columns of a convolution with square input and kernel; padding may be 0."""
    flags = {"bias": True, "transposed": False, "need_input_grad": True, "need_weight_grad": True}
    return {
        "op": "forward",
        "batch": f["B"],
        "in_channels": f["Input_Channel"],
        "out_channels": f["Output_Channel"],
        "h": f["Input_Size"],
        "w": f["Input_Size"],
        "kernel_h": f["Kernel_Szie"],
        "kernel_w": f["Kernel_Szie"],  # upstream's spelling
        "stride": f["Stride"],
        "padding_h": integers(f["Padding"]),
        "padding_w": integers(f["Padding"]),
        "dilation": 1,
        "groups": 1,
        **flags,
    }


Form = tuple[str, Callable[[pd.DataFrame], dict[str, Any]], tuple[str, ...], tuple[str, ...]]
CANONICAL = {
    "addu": "add",
    "mulu": "mul",
    "divu": "mul",
    "powu": "pow_general",
    "pow": "pow_general",
}
POINTWISE = ("add", "addu", "div", "divu", "gelu", "mul", "mulu", "pow", "powu", "relu", "tanh")
CONV = ("B", "Input_Channel", "Output_Channel", "Kernel_Szie", "Input_Size", "Stride", "Padding")
CONV_SIZES = ("batch", "in_channels", "out_channels", "h", "w", "kernel_h", "kernel_w", "stride")
FORMS: dict[str, Form] = {
    **dict.fromkeys(
        ("bmm", "linear"), ("gemm", _gemm, ("B", "M", "N", "K"), ("m", "n", "k", "batch"))
    ),
    **dict.fromkeys(POINTWISE, ("elementwise", _elementwise, ("B", "H"), ("numel",))),
    "softmax": ("reduction", _softmax, ("B", "H"), ("outer", "size")),
    "ln": ("norm", _norm, ("B", "H"), ("rows", "cols")),
    "conv": ("conv", _conv, CONV, CONV_SIZES),
}


def _table(collector: RowCollector, path: Path, part: str) -> None:
    """Collect the rows of one CSV of op times."""
    frame = collector.csv(path, COLUMNS)
    if frame is None:
        return
    frame = collector.mapped(frame, "OPName", {op: op for op in FORMS})
    devices = {str(d): gpu_named(str(d)) or "" for d in frame["Device"].unique()}
    frame = collector.mapped(frame, "Device", {d: gpu for d, gpu in devices.items() if gpu})
    for op, mine in frame.groupby("OPName"):
        family, describe, needed, sizes = FORMS[str(op)]
        missing = [name for name in needed if name not in mine]
        if missing:
            collector.drop(f"rows of a table without column {missing[0]!r}", len(mine))
            continue
        common = {
            "gpu": mine["Device"],
            "stack": _stack(mine),
            "timer": "with_launch",
            "dtype": "fp32",
            "time_us": positive(mine["Latency"]) * 1e3,
            "samples": SAMPLES,
            "kernel": mine.get("Kernel Name", ""),
            "split": part,
            "run_id": collector.run_id(path),
            "origin": f"{collector.name(path)}:" + mine["line"].astype(str),
        }
        rows = pd.DataFrame({**common, **describe(mine)}, index=mine.index)
        collector.add(family, rows, sizes)


def _stack(f: pd.DataFrame) -> Any:
    torch = f["Torch Version"].str.removeprefix("p")
    return "torch-" + torch + "+" + f["CUDA Version"] + " cudnn-" + f["CUDNN Version"]


def _label(collector: RowCollector, path: Path, base: Path) -> None:
    """Collect the row of one label file: an iteration of a whole model."""
    try:
        found = read_json(path)
    except Unreadable as exc:
        return collector.unreadable(str(exc))
    collector.readable += 1
    gpu = gpu_named(path.parent.name)
    named = LABEL.fullmatch(path.name.removesuffix(".gz").removesuffix(".json"))
    if not isinstance(found, dict) or named is None:
        return collector.drop("label without a known form")
    if gpu is None:
        return collector.drop(f"unknown Device: {path.parent.name[:40]!r}")
    options = _suffix(named["suffix"] or "")
    if options is None:
        return collector.drop(f"label with unknown suffix {named['suffix'][:20]!r}")
    dp = options.pop("dp")
    if int(named["batch"]) % dp:
        return collector.drop("global batch is not a multiple of dp")
    config = base / "data/DLmodel_configs" / f"{named['model']}.json"
    try:
        model = read_json(config)
    except Unreadable:
        return collector.drop(f"label of a model without a configuration: {named['model'][:40]!r}")
    row = {
        **_label_columns(named, found),
        "gpu": gpu,
        "hf_config": json.dumps(model, sort_keys=True),
        "batch": int(named["batch"]) // dp,
        "ranks_per_node": options["world_size"],
        **options,
        "engine": "compile" if options["compile"] else "eager",
        "run_id": collector.run_id(path),
        "origin": collector.name(path),
    }
    return collector.add("iteration", pd.DataFrame([row]), ("batch", "seq", "world_size"))


def _label_columns(named: re.Match[str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Columns from the name and the times of a label."""
    return {
        "op": "train_step" if named["mode"] == "train" else "infer_step",
        "stack": "torch-2.1.0",
        "timer": "with_launch",
        "dtype": "fp32",
        "time_us": number(found.get("e2e_latency")) * 1e3,
        "case": named["model"],
        "source": "neusight",
        "builder": "hf",
        "mode": "train" if named["mode"] == "train" else "infer",
        "seq": int(named["seq"]),
        "forward_us": number(found.get("fw_latency")) * 1e3,
        "backward_us": number(found.get("bwall_latency")) * 1e3,
        "loss": "none",
        "optimizer": "none",
        "attn": "eager",
        "amp": False,
    }


def _suffix(text: str) -> dict[str, Any] | None:
    """Settings in a label's suffix: fusion, dp4, tp4, pp4_1 (one micro-batch); None if unknown."""
    if text in ("", "fusion"):
        return {"dp": 1, "plan": "", "world_size": 1, "compile": text == "fusion"}
    found = SUFFIX.fullmatch(text)
    degree = int(found["degree"]) if found else 0
    if found is None or degree < 1 or (found["micro"] is not None and found["axis"] != "pp"):
        return None
    micro = f",micro={int(found['micro'])}" if found["micro"] else ""
    plan = f"{found['axis']}={degree}{micro}"
    dp = degree if found["axis"] == "dp" else 1
    return {"dp": dp, "plan": plan, "world_size": degree, "compile": False}
