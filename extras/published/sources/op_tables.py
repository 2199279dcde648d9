"""Imports tables of ops extracted from torch.profiler traces: kernel time by op and shapes."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from itercast.capture.base.yaml_text import facts_of
from itercast.extras.imports.base import About, Imported, RowCollector, number, refuse, whole
from itercast.extras.kineto.ops import answered, describe
from itercast.extras.published.sources.device_names import unknown_gpu
from itercast.microbench.hardware.names import gpu_named
from itercast.microbench.store import Row

FACTS = facts_of(__file__)
ABOUT = About(**FACTS["about"])
# torch launches it for operands that are strided or broadcast, and vectorized or unrolled kernels
# for others: gpu_kernel_impl in aten/src/ATen/native/cuda/CUDALoops.cuh.
STRIDED, CONTIGUOUS = "native::elementwise_kernel<", ("same", "scalar")
NEEDED = ("device", "op", "input_dims", "input_types", "calls", "kernel_us_median", "kernel_names")


def read(path: Path) -> Imported:
    """Read a folder of tables ops_*.csv, or one table."""
    files = [path]
    if path.is_dir():
        files = sorted(p for p in path.rglob("ops_*.csv*") if not p.is_dir())
        if not files:
            raise refuse(path, "a folder of tables of ops", "ops_*.csv and ops_*.csv.gz")
    collector = RowCollector(ABOUT, path)
    for file in files:
        if (frame := collector.csv(file, (*NEEDED, "concrete"))) is not None:
            _table(collector, file, frame)
    return collector.done()


def _table(collector: RowCollector, path: Path, frame: pd.DataFrame) -> None:
    """Collect the ops of a table that families describe, with the median over their calls."""
    rows: dict[str, list[Row]] = defaultdict(list)
    for line in frame.to_dict("records"):
        try:
            family, row = _row(line)
        except ValueError as exc:
            collector.drop(str(exc))
            continue
        origin = f"{collector.name(path)}:{line['line']}"
        rows[family].append({**row, "run_id": collector.run_id(path), "origin": origin})
    for family, found in rows.items():
        collector.add(family, pd.DataFrame(found))


def _row(line: dict[Any, Any]) -> tuple[str, Row]:
    """Family and row of one op; ValueError says why it is left out."""
    op, gpu = str(line["op"]), gpu_named(str(line["device"]))
    if gpu is None:
        raise ValueError(unknown_gpu(str(line["device"])))
    if any(way in str(line["kernel_names"]) for way in ("HtoD", "DtoH")):
        raise ValueError("copy between host and device")
    dims, types, values = (_list(line[c]) for c in ("input_dims", "input_types", "concrete"))
    if not answered(op) or len(dims) != len(types):
        raise ValueError(f"op not described by a family: {op[:60]}")
    if op == "aten::cudnn_batch_norm" and not values:  # its kernels say what the table does not
        training = str("::bn_fw_tr" in str(line["kernel_names"]))
        values = ["", "", "", "", "", training]
    found = describe(op, {"Input Dims": dims, "Input type": types, "Concrete Inputs": values})
    if found is None:
        raise ValueError(f"op whose shapes or scalars are missing: {op[:60]}")
    family, point = found
    contiguous = family == "elementwise" and point.form in CONTIGUOUS
    if contiguous and STRIDED in str(line["kernel_names"]):
        raise ValueError("kernel of operands in strides that the table does not state")
    return family, {
        "gpu": gpu,
        "stack": "torch",
        "timer": "device",
        "time_us": number(line["kernel_us_median"]),
        "samples": whole(line["calls"]),
        "kernel": "".join(c for c in str(line["kernel_names"])[:200] if c.isprintable()),
        **asdict(point),
    }


def _list(text: Any) -> list[Any]:
    """A list written as JSON; empty where the text is none."""
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []
