"""Imports AIConfigurator: matrix products, prefill attention and NCCL collectives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from itercast.microbench.importers.base import About, Imported, RowCollector, positive, refuse
from itercast.microbench.importers.parquet import read_parquet
from itercast.microbench.opcall import ITEMSIZE_BYTES

ABOUT = About(
    source="aiconfigurator",
    where="AIConfigurator, NVIDIA, https://github.com/ai-dynamo/aiconfigurator",
    licence="Apache-2.0",
    conventions=(
        "Upstream times are in ms and message sizes in elements, here in us and bytes. gemm is a "
        "linear layer without bias (fp8: scaled_mm, presumably without quantisation of inputs). "
        "Attention is causal prefill without earlier keys; rows with a sliding window are left "
        "out. Collectives are within one node, sizes as in nccl-tests."
    ),
)
SYSTEMS = {
    "a100_sxm": ("a100-sxm-80gb", "dgx-a100"),
    "h100_sxm": ("h100-sxm-80gb", "dgx-h100"),
    "h200_sxm": ("h200-sxm-141gb", "dgx-h200"),
    "b200_sxm": ("b200-sxm", "dgx-b200"),
    "gb200": ("gb200", "gb200-nvl72"),
    "gb200_sxm": ("gb200", "gb200-nvl72"),
    "gb300": ("gb300", "gb300-nvl72"),
    "l40s": ("l40s", "l40s-pcie"),
    "rtx_pro_6000_server": ("rtx-pro-6000", "rtx-pro-6000-pcie"),
}
DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp8": "fp8",
    "int8": "int8",
    "float": "fp32",
    "float32": "fp32",
}
OPTIONAL = ("kernel_source", "window_size")
COLLECTIVES = {
    "all_gather": "all_gather",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
}


def read(path: Path) -> Imported:
    """Read a checkout, its systems folder, or a data folder of the same layout."""
    places = ("systems/data", "src/aiconfigurator/systems/data", "data", ".")
    for base in (path / place for place in places):
        if base.is_dir() and any((base / system).is_dir() for system in SYSTEMS):
            break
    else:
        raise refuse(path, "an AIConfigurator checkout", "systems/data/<system>/**/*_perf.parquet")
    collector = RowCollector(ABOUT, base)
    for table in sorted(base.rglob("*_perf.*")):
        system = table.relative_to(base).parts[0]
        kind = table.name.split("_perf.")[0]
        if system not in SYSTEMS:
            collector.drop(f"file of an unknown system: {system[:40]!r}")
        elif kind not in TABLES:
            collector.drop(f"file not imported: table {kind[:40]!r}")
        elif (frame := _frame(collector, table, TABLES[kind][0])) is not None:
            TABLES[kind][1](collector, table, system, frame)
    return collector.done()


def _frame(collector: RowCollector, path: Path, needed: tuple[str, ...]) -> pd.DataFrame | None:
    """A Parquet or CSV table with a column ``line``; None (and counted) if unreadable."""
    needed = ("framework", "version", *needed, "latency")
    if path.suffix != ".parquet":
        return collector.csv(path, needed)
    return read_parquet(collector, path, needed, OPTIONAL)


def _common(collector: RowCollector, path: Path, system: str, f: pd.DataFrame, dtype: str) -> Any:
    return {
        "gpu": SYSTEMS[system][0],
        "stack": f["framework"].astype(str).str.lower() + "-" + f["version"].astype(str),
        "timer": "device",
        "dtype": f[dtype],
        "time_us": positive(f["latency"]) * 1e3,
        "kernel": f["kernel_source"].astype(str) if "kernel_source" in f else "",
        "run_id": collector.run_id(path),
        "origin": f"{collector.name(path)}:" + f["line"].astype(str),
    }


def _gemm(collector: RowCollector, path: Path, system: str, f: pd.DataFrame) -> None:
    f = collector.mapped(f, "gemm_dtype", DTYPES)
    rows = {
        **_common(collector, path, system, f, "gemm_dtype"),
        "op": np.where(f["gemm_dtype"] == "fp8", "scaled_mm", "mm"),
        **{name: f[name] for name in ("m", "n", "k")},
        "batch": 1,
        "layout": "nt",
    }
    collector.add("gemm", pd.DataFrame(rows, index=f.index), ("m", "n", "k"))


def _attention(collector: RowCollector, path: Path, system: str, f: pd.DataFrame) -> None:
    f = collector.mapped(f, "attn_dtype", DTYPES)
    window = f["window_size"] if "window_size" in f else pd.Series(0, index=f.index)
    reasons = {
        "attention with a sliding window: no such parameter in the family": positive(window) > 0,
        "attention over earlier keys (step > 0)": positive(f["step"]) > 0,
    }
    keep = np.ones(len(f), dtype=bool)
    for reason, hit in reasons.items():
        collector.drop(reason, int((keep & hit).sum()))
        keep &= ~hit
    f = f[keep]
    rows = {
        **_common(collector, path, system, f, "attn_dtype"),
        "op": "forward",
        "batch": f["batch_size"],
        "heads": f["num_heads"],
        "kv_heads": f["num_key_value_heads"],
        "q_len": f["isl"],
        "kv_len": f["isl"],
        "head_dim": f["head_dim"],
        "causal": True,
        "masked": False,
        "dropout": False,
    }
    sizes = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    collector.add("attention", pd.DataFrame(rows, index=f.index), sizes)


def _nccl(collector: RowCollector, path: Path, system: str, f: pd.DataFrame) -> None:
    f = collector.mapped(collector.mapped(f, "nccl_dtype", DTYPES), "op_name", COLLECTIVES)
    node = SYSTEMS[system][1]
    rows = {
        **_common(collector, path, system, f, "nccl_dtype"),
        "op": f["op_name"],
        "stack": "nccl-" + f["version"].astype(str),
        "node": node,
        "link": "pcie" if node.endswith("pcie") else "nvlink",
        "world_size": f["num_gpus"],
        "ranks_per_node": f["num_gpus"],
        "message_bytes": positive(f["message_size"]) * f["nccl_dtype"].map(ITEMSIZE_BYTES),
    }
    sizes = ("world_size", "ranks_per_node", "message_bytes")
    collector.add("collective", pd.DataFrame(rows, index=f.index), sizes)


Reader = Callable[[RowCollector, Path, str, pd.DataFrame], None]
HEADS = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "attn_dtype", "step")
TABLES: dict[str, tuple[tuple[str, ...], Reader]] = {
    "gemm": (("gemm_dtype", "m", "n", "k"), _gemm),
    "context_attention": (HEADS, _attention),
    "nccl": (("op_name", "nccl_dtype", "num_gpus", "message_size"), _nccl),
}
