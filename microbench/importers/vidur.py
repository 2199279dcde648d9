"""Imports Vidur (MLSys'24): NCCL collectives on three kinds of node, ops of transformer blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.microbench.importers.base import (
    About,
    Imported,
    RowCollector,
    integers,
    positive,
    refuse,
)

ABOUT = About(
    source="vidur",
    where="Vidur (MLSys'24), Microsoft, https://github.com/microsoft/vidur",
    licence="MIT",
    conventions=(
        "Medians of kernel times on rank 0, upstream in ms with 1 us resolution, here in us; fp16. "
        "Rows with more workers than devices per node cross a network that is not stated: left "
        "out. Projections are mm with a transposed weight and per-rank widths; norms are RMS norms "
        "where the MLP is gated, else layer norms."
    ),
)
NODES = {
    "a100_dgx": ("a100-sxm-80gb", "dgx-a100", "nvlink"),
    "h100_dgx": ("h100-sxm-80gb", "dgx-h100", "nvlink"),
    "a100_pairwise_nvlink": ("a100-pcie-80gb", "a100-pairwise", "pairwise"),
    "h100_pairwise_nvlink": ("h100-nvl", "h100-pairwise", "pairwise"),
    "a40_pairwise_nvlink": ("a40", "a40-pairwise", "pairwise"),
}
GPUS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "a40": "a40"}
SHAPE: tuple[str, ...] = (
    "n_head",
    "n_kv_head",
    "n_embd",
    "n_expanded_embd",
    "num_tokens",
    "use_gated_mlp",
    "num_tensor_parallel_workers",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


def read(path: Path) -> Imported:
    """Read a checkout, or its data/profiling folder."""
    for base in (path, path / "data/profiling", path / "vidur/data/profiling"):
        if (base / "network").is_dir() or (base / "compute").is_dir():
            break
    else:
        raise refuse(path, "a Vidur checkout", "data/profiling/network and data/profiling/compute")
    collector = RowCollector(ABOUT, base)
    for kind, known in (("network", NODES), ("compute", GPUS)):
        for table in sorted(p for p in (base / kind).rglob("*") if ".csv" in p.suffixes):
            place = table.relative_to(base / kind).parts[0]
            if place not in known:
                collector.drop(f"file of an unknown machine: {place[:40]!r}")
            elif kind == "network":
                _network(collector, table, place)
            elif table.name.startswith("mlp.csv"):
                _compute(collector, table, place)
            else:
                collector.drop(f"file not imported: {table.name[:40]!r}")
    return collector.done()


def _common(collector: RowCollector, path: Path, gpu: str, f: pd.DataFrame) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "stack": "vidur",
        "timer": "device",
        "dtype": "fp16",
        "run_id": collector.run_id(path),
        "origin": f"{collector.name(path)}:" + f["line"].astype(str),
    }


def _network(collector: RowCollector, path: Path, place: str) -> None:
    """Collect one table of all_reduce or send_recv."""
    op = path.name.split(".csv")[0]
    median = f"time_stats.{op}.median"
    frame = collector.csv(path, ("size", "num_workers", "devices_per_node", "rank", median))
    if frame is None:
        return
    if op not in ("all_reduce", "send_recv"):
        return collector.drop(f"unknown collective: {op[:40]!r}", len(frame))
    first = pd.to_numeric(frame["rank"], errors="coerce") == 0
    collector.drop("row of a rank other than 0", int((~first).sum()))
    frame = frame[first]
    gpu, node, link = NODES[place]
    workers, local = positive(frame["num_workers"]), positive(frame["devices_per_node"])
    beyond = workers > local
    collector.drop("nodes joined by an unknown network", int(beyond.sum()))
    frame, workers, local = frame[~beyond], workers[~beyond], local[~beyond]
    # A bridge joins two GPUs; with more ranks in a node hops between pairs go over PCIe.
    within = np.where((link == "pairwise") & (workers > 2), "bridged", link)
    rows = {
        **_common(collector, path, gpu, frame),
        "op": op,
        "time_us": positive(frame[median]) * 1e3,
        "node": node,
        "link": within,
        "world_size": workers,
        "ranks_per_node": np.minimum(local, workers),
        "message_bytes": frame["size"],
    }
    sizes = ("world_size", "ranks_per_node", "message_bytes")
    collector.add("collective", pd.DataFrame(rows, index=frame.index), sizes)
    return None


def _compute(collector: RowCollector, path: Path, place: str) -> None:
    """Collect one table of transformer blocks: sizes of the model, and a column of times per op."""
    frame = collector.csv(path, SHAPE)
    if frame is None:
        return
    gated = frame["use_gated_mlp"].str.lower() == "true"
    width = {name: positive(frame[name]) for name in SHAPE if name != "use_gated_mlp"}
    for column in frame:
        named = re.fullmatch(r"time_stats\.(\w+)\.median", str(column))
        if named is None:
            continue
        op = named[1]
        family, described, known = describe(op, width, gated.to_numpy())
        collector.drop(f"unknown op: {op[:40]!r}", int((~known).sum()))
        rows = {
            **_common(collector, path, GPUS[place], frame),
            "time_us": positive(frame[column]) * 1e3,
            "module": op,
            **described,
        }
        sizes = [k for k in described if k in ("m", "n", "k", "rows", "cols", "numel")]
        collector.add(family, pd.DataFrame(rows, index=frame.index)[known], sizes)


def describe(op: str, w: dict[str, Any], gated: Any) -> tuple[str, dict[str, Any], Any]:
    """Family and parameters of an op of a block, and a mask of the rows that have them.

    Left out: emb and attn_rope (several kernels each), and the gated activation, which multiplies
    two halves in one kernel.
    """
    tokens, embd, tp = w["num_tokens"], w["n_embd"], w["num_tensor_parallel_workers"]
    tp = np.where(tp > 0, tp, np.inf)  # a missing degree makes widths 0, which are dropped
    ffn, heads = w["n_expanded_embd"] / tp, np.where(w["n_head"] > 0, w["n_head"], np.inf)
    qkv = (w["n_head"] + 2 * w["n_kv_head"]) * (embd / heads) / tp
    every = np.ones(len(tokens), dtype=bool)
    products = {
        "attn_pre_proj": (qkv, embd),
        "attn_post_proj": (embd, embd / tp),
        "mlp_up_proj": (np.where(gated, 2, 1) * ffn, embd),
        "mlp_down_proj": (embd, ffn),
    }
    if op in products:
        n, k = products[op]
        return "gemm", {"op": "mm", "m": tokens, "n": n, "k": k, "batch": 1, "layout": "nt"}, every
    if op in NORMS:
        kind = np.where(gated, "rms", "layer")
        shape = {"rows": tokens, "cols": embd, "channels": 1, "groups": 1}
        return "norm", {"op": kind, **shape}, every
    if op == "add":
        numel, mine, name, tensors = tokens * embd, every, "add", 2
    else:
        numel, mine, name, tensors = tokens * ffn, ~gated & (op == "mlp_act"), "gelu", 1
    form = {"op": name, "numel": numel, "inner": integers(numel), "tensors": tensors}
    return "elementwise", {**form, "form": "same"}, mine
