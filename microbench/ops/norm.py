"""Normalisation: layer and batch norm, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall
from microbench.ops.family import Family, Workload, itemsize_bytes, log_uniform, torch_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """layer: rows x cols, cols normalised. batch: rows samples, channels, cols positions each."""

    op: str
    rows: int
    cols: int
    channels: int = 1
    dtype: str = "fp32"


OPS = ("layer", "layer_backward", "batch", "batch_backward")


def sweep() -> Iterator[Norm]:
    """Endless: rows x cols up to 16M elements."""
    rng = np.random.default_rng(3)
    while True:
        op = str(rng.choice(OPS))
        rows, cols, channels = log_uniform(rng, 1, 16384), log_uniform(rng, 16, 8192), 1
        if op.startswith("batch"):
            rows, cols, channels = (log_uniform(rng, *r) for r in ((1, 128), (1, 4096), (8, 1024)))
        if rows * cols * channels <= 2**23:
            yield Norm(op=op, rows=rows, cols=cols, channels=channels)


def build(p: Norm, device: str) -> Workload:
    """Statistics for the backward come from a real forward."""
    import torch  # lazy: formulas must import where torch is absent

    aten, dtype = torch.ops.aten, torch_dtype(p.dtype)
    if p.op.startswith("layer"):
        x = torch.randn(p.rows, p.cols, device=device).to(dtype)
        w = torch.ones(p.cols, device=device, dtype=dtype)
        if p.op == "layer":
            return Workload(run=lambda: aten.native_layer_norm(x, [p.cols], w, w, 1e-5))
        y, mean, rstd = aten.native_layer_norm(x, [p.cols], w, w, 1e-5)
        back = aten.native_layer_norm_backward
        return Workload(run=lambda: back(y, x, [p.cols], mean, rstd, w, w, [True, True, True]))
    x = torch.randn(p.rows, p.channels, p.cols, 1, device=device).to(dtype)
    w = torch.ones(p.channels, device=device, dtype=dtype)
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    if p.op == "batch":
        run = aten.native_batch_norm
        return Workload(run=lambda: run(x, w, w, mean, var, True, 0.1, 1e-5))
    y, save_mean, save_std = aten.native_batch_norm(x, w, w, mean, var, True, 0.1, 1e-5)
    grad, mask = torch.randn_like(y), [True, True, True]
    back = aten.native_batch_norm_backward
    return Workload(run=lambda: back(grad, x, w, mean, var, save_mean, save_std, True, 1e-5, mask))


def flops(p: Any) -> Any:
    """About eight operations per element."""
    return 8.0 * p.rows * p.cols * p.channels


def bytes_moved(p: Any) -> Any:
    """Forward reads and writes once; backward reads two tensors and writes one."""
    passes = np.where(np.isin(p.op, ["layer", "batch"]), 2, 3)
    return 1.0 * passes * p.rows * p.cols * p.channels * itemsize_bytes(p.dtype)


def features(p: Any, gpu: Gpu) -> dict[str, Any]:
    """Sizes and rows per core."""
    return {
        "op": p.op,
        "dtype": p.dtype,
        "log_rows": np.log2(p.rows),
        "log_cols": np.log2(p.cols),
        "log_channels": np.log2(p.channels),
        "rows_per_core": np.log2(p.rows * p.channels / gpu.sm_count),
        "cols_mod_16": p.cols % 16,
    }


def from_layer(call: OpCall) -> Norm:
    """native_layer_norm(x, shape, ...), native_layer_norm_backward(grad, x, shape, ...)."""
    backward = "backward" in call.op
    x, shape = call.args[1:3] if backward else call.args[:2]
    cols = prod(shape)
    op = "layer_backward" if backward else "layer"
    return Norm(op=op, rows=max(1, x.numel // cols), cols=cols, dtype=x.dtype)


def from_batch(call: OpCall) -> Norm:
    """native_batch_norm(x, ...), native_batch_norm_backward(grad, x, ...): N, C, positions."""
    x = call.args[0]
    return Norm(
        op="batch_backward" if "backward" in call.op else "batch",
        rows=x.shape[0],
        cols=max(1, prod(x.shape[2:])),
        channels=x.shape[1],
        dtype=x.dtype,
    )


FAMILY = Family(
    name="norm",
    params=Norm,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    answers={
        "aten.native_layer_norm.default": from_layer,
        "aten.native_layer_norm_backward.default": from_layer,
        "aten.native_batch_norm.default": from_batch,
        "aten._native_batch_norm_legit.default": from_batch,
        "aten.native_batch_norm_backward.default": from_batch,
    },
)
