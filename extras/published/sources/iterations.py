"""Imports published step times: tables with plans of many models, and timm's benchmarks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.yaml_text import facts_of
from itercast.extras.imports.base import About, Imported, RowCollector, number, refuse, whole
from itercast.extras.published.sources.device_names import form_assumed, memory_is_open, unknown_gpu
from itercast.extras.published.sources.models import Model, model_of
from itercast.extras.published.sources.plans import network_doubt, plan_of
from itercast.extras.published.sources.timm_models import timm_config
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.store import Row

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
TABLE = ("model", "n_gpus", "precision", "global_batch", "step_time_s", "gpu", "gpu_detail")
TIMM = ("model", "train_step_time", "train_batch_size", "train_img_size")
TIMM_NAME = re.compile(r"benchmark-train-amp-(nhwc|nchw)-pt(\d)(\d+)-cu(\d+)-(\w+)\.csv(\.gz)?")
COPIED: tuple[str, ...] = tuple(FACTS["copied"])
OPEN_GPUS: Mapping[str, str] = assumed(__file__, "open_gpus")
NOT_STEPS: Mapping[str, str] = assumed(__file__, "not_steps")
ENGINES, DTYPES, OF_TIMM = FACTS["engines"], FACTS["dtypes"], FACTS["timm"]
EXACTLY: Mapping[str, str] = FACTS["optimizers"]
COUNTS = ("num_params", "layers", "d_model", "heads", "ffn", "vocab")


def read(path: Path) -> Imported:
    """Read a folder of CSV tables of iterations, or one table."""
    files = sorted(p for p in path.rglob("*") if ".csv" in p.suffixes) if path.is_dir() else [path]
    if not files:
        raise refuse(path, "a folder of iteration tables", "*.csv and timm/*.csv")
    collector = RowCollector(ABOUT, path)
    for file in files:
        if file.name.startswith("benchmark-"):
            _timm(collector, file)
        else:
            collector.add_iterations(file, collector.csv(file, TABLE), _row)
    return collector.done()


def _row(given: Mapping[str, str]) -> Row:
    """One row of the dataset; ValueError says what the table does not state."""
    if not given["model"]:
        raise ValueError("model is not stated")
    if given.get("source") in NOT_STEPS:
        raise ValueError(NOT_STEPS[given["source"]])
    gpu, gpu_doubt = gpu_of(given["gpu"], given["gpu_detail"], given.get("source", ""))
    dtype, amp = dtype_of(given["precision"])
    plan, dp = plan_of(given)
    batch = whole(given["global_batch"])
    if not batch:
        raise ValueError("global batch is not stated")
    if batch % dp:
        raise ValueError("global batch is not a multiple of dp")
    model = model_of(given)
    optimizer, optimizer_doubt = optimizer_of(given.get("optimizer", ""), model.optimizer)
    precision_doubt = given["precision"] if "probable" in given["precision"] else ""
    plan_doubt = "sequence parallelism assumed" if "sp" in plan.split(",") else ""
    doubts = [given.get("doubts"), gpu_doubt, plan_doubt, precision_doubt, model.doubt]
    doubts += [optimizer_doubt, network_doubt(given)]
    return {
        "op": "train_step",
        "gpu": gpu,
        "timer": "with_launch",
        "stack": "torch-" + given["torch"] if given.get("torch") else given.get("framework", ""),
        "dtype": dtype,
        "amp": amp,
        "time_us": number(given["step_time_s"]) * 1e6,
        "case": model.case or given["model"],
        "builder": model.builder,
        "hf_config": model.hf_config,
        "mode": "train",
        "plan": plan,
        "batch": batch // dp,
        "loss": "default",
        "optimizer": optimizer,
        "optimizer_stated": given.get("optimizer", ""),
        **_kernels(given, model),
        **_stated(given),
        "doubts": "; ".join(d for d in doubts if d),
    }


def _kernels(given: Mapping[str, str], model: Model) -> Row:
    """Columns on how kernels are chosen and launched: attention, compilation, CUDA graphs."""
    compiled, attention = given.get("compile", ""), given.get("attention_kernel", "")
    engines = [engine for pattern, engine in ENGINES.items() if re.match(pattern, compiled)]
    return {
        "attn": "sdpa" if attention else model.attn,
        "compile": compiled.startswith("torch.compile"),
        "engine": next(iter(engines), "eager"),
        "cuda_graphs": "CUDA graphs" in compiled,
        "memory_format": "nhwc" if "memory_format nhwc" in given.get("model_note", "") else "",
    }


def _stated(given: Mapping[str, str]) -> Row:
    """Columns copied from the table: sizes, numbers of GPUs, what it says about the GPUs."""
    gpus = whole(given["n_gpus"])
    return {
        "seq": whole(given.get("seq_len_tokens")) or None,
        "image_size": whole(given.get("image_size")) or None,
        "micro_batch": whole(given.get("micro_batch_per_gpu")) or None,
        "world_size": gpus,
        "ranks_per_node": min(gpus, whole(given.get("gpus_per_node")) or gpus),
        **{name: whole(given.get(name)) or None for name in COUNTS},
        **{name: given.get(name, "") for name in COPIED},
        "gpu_stated": f"{given['gpu']}; {given['gpu_detail']}",
    }


def optimizer_of(stated: str, usual: str) -> tuple[str, str]:
    """Returns an optimizer's name (``usual`` if none is stated), and a note if it was assumed."""
    if not stated:
        return usual, f"optimizer not stated, {usual} assumed"
    if stated in EXACTLY:
        return EXACTLY[stated], ""
    if "Muon" not in stated:
        for pattern, name in (("adam", "adamw"), ("lamb", "lamb"), ("sgd", "sgd")):
            if pattern in stated.lower():
                return name, ""
    raise ValueError(f"unknown optimizer: {stated[:40]!r}")


def gpu_of(gpu: str, detail: str, source: str) -> tuple[str, str]:
    """Returns a GPU's name, and a note if it was assumed; ValueError if missing or unknown."""
    if not gpu:
        raise ValueError("gpu is not stated")
    if source in OPEN_GPUS:
        return OPEN_GPUS[source], f"{OPEN_GPUS[source]} assumed"
    size = re.search(r"(\d+) ?G", detail.partition("(")[2] or detail)
    form = re.search(r"DGX|SXM|PCIe", detail.partition(" assumed")[0])
    whole_name = f"{gpu} {form[0] if form else ''} {size[1] + 'GB' if size else ''}"
    for name in (gpu, whole_name):  # a detail may contradict the name, or speak of the host
        if (found := gpu_named(name)) and not form_assumed(name):
            return found, ""
    found = gpu_named(whole_name) or gpu_named(gpu)
    if found is None:
        raise ValueError(unknown_gpu(gpu))
    if memory_is_open(whole_name):
        raise ValueError(f"gpu variant is not stated: {gpu!r}")
    return found, form_assumed(whole_name)


def dtype_of(precision: str) -> tuple[str, bool]:
    """dtype of matrix products, and whether weights are kept in fp32 (amp)."""
    for pattern, (dtype, amp) in DTYPES.items():
        if re.search(pattern, precision):
            return dtype, amp
    raise ValueError("precision is not stated" if not precision else "unknown precision")


def _timm(collector: RowCollector, path: Path) -> None:
    """Collect one benchmark file of timm; its name states memory format, torch and GPU."""
    named = TIMM_NAME.fullmatch(path.name)
    gpu = gpu_named(named[5]) if named else None
    if named is None or gpu is None:
        return collector.drop("file of timm whose name states no layout, torch and known gpu")
    stack = f"torch-{named[2]}.{named[3]}+cu{named[4]}"
    stated = {"gpu": gpu, "stack": stack, "memory_format": named[1]}

    def row(given: Mapping[str, str]) -> Row:
        return {
            **OF_TIMM,
            **stated,
            "time_us": number(given["train_step_time"]) * 1e3,
            "case": given["model"],
            "hf_config": timm_config(given["model"], whole(given["train_img_size"])),
            "batch": whole(given["train_batch_size"]),
            "image_size": whole(given["train_img_size"]),
            "num_params": number(given.get("param_count")) * 1e6 or None,
        }

    return collector.add_iterations(path, collector.csv(path, TIMM), row)
