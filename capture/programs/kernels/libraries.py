"""Kernels of other libraries that are logged as torch's own: attention, numbers in 4 and 8 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from itercast.capture.collectives import tensors_in
from itercast.capture.recorder.attention import by_kernel
from itercast.capture.recorder.log import OpLog

QKV = (("q", "k", "v"), ("query", "key", "value"))  # names of arguments
GRADIENTS = ("dout", "dO", "do", "grad", "grad_out", "grad_output")
FUSED = "itercast.fused"  # a kernel that passes over tensors
ATTENTION = "attention in {}'s kernels takes the time of "
FLASH = re.compile(r"_?flash_attn_?([34]?)")  # namespaces of Dao's packages, and of the hub's
QUANTISED = "kernels of {} pass over their tensors once, products are torch's"
INT8 = "products of {} in 8 bits take the time of 16 bits; no column has outliers"
# Logs a call by the names of its arguments and its result; returns what was guessed.
Logged = Callable[[OpLog, Mapping[str, Any], Any], str]


@cache
def as_of_torch(func: Any) -> Logged | None:
    """The function that logs an op of a library as ops of torch; None for an unknown op.

    An op with arguments for queries, keys and values is attention.
    """
    if func.namespace == "bitsandbytes":
        aliases = {a.name: a.alias_info for a in func._schema.arguments}
        written = tuple(name for name, alias in aliases.items() if alias and alias.is_write)
        name = func.__name__.partition(".")[0]
        return LOGGED.get(name, partial(log_pass, written=written))
    names = {a.name for a in func._schema.arguments}
    if not any(names.issuperset(three) for three in QKV):
        return None
    flash = FLASH.match(func.namespace)
    return partial(log_attention, kernel=f"flash-{flash[1] or 2}" if flash else "")


def log_pass(
    log: OpLog, arguments: Mapping[str, Any], output: Any, written: Sequence[str] = ()
) -> str:
    """Log a kernel that reads its arguments once and writes its results once.

    Such kernels are bitsandbytes' casts to and from blocks of 4 or 8 bits, and its optimizers with
    8-bit states. ``written``: names of arguments that it writes.
    """
    results = [*tree_leaves(output), *(arguments[name] for name in written)]
    inputs, outputs = (tuple(tensors_in(values)) for values in (arguments, results))
    numel = max((t.numel() for t in (*inputs, *outputs)), default=0)
    log.add(FUSED, inputs, {"ops": 2, "numel": numel}, outputs)
    return QUANTISED


def log_product(log: OpLog, arguments: Mapping[str, Any], output: Any) -> str:
    """Log a product by a matrix in 4 bits: the matrix is made whole, then multiplied.

    bitsandbytes does this with more than 1,536 rows, as in training (0.50, backends/cuda/ops.py).
    """
    x, shape, bias = arguments["A"], list(arguments["shapeB"]), arguments.get("bias")
    weight = torch.empty(shape, dtype=x.dtype, device=x.device)
    log_pass(log, {n: v for n, v in arguments.items() if n not in ("A", "bias")}, weight)
    rows, result = x.reshape(-1, x.shape[-1]), output.view(-1, shape[0])
    if bias is None:
        log.add("aten.mm.default", (rows, weight.t()), {}, result)
    else:
        log.add("aten.addmm.default", (bias, rows, weight.t()), {}, result)
    return QUANTISED


def log_int8_product(log: OpLog, arguments: Mapping[str, Any], output: Any) -> str:
    """Log a product in 8 bits as one in 16 bits, as only these were measured."""
    left, right = (arguments.get(f"C{name}", arguments.get(name)) for name in "AB")
    rows, matrix = (torch.empty(t.shape, dtype=torch.half).flatten(0, -2) for t in (left, right))
    result = output[0] if isinstance(output, tuple) else output
    log.add("aten.mm.default", (rows, matrix.t()), {}, result.view(-1, result.shape[-1]))
    return INT8


LOGGED: Mapping[str, Logged] = {
    "gemm_4bit": log_product,
    "int8_linear_matmul": log_int8_product,
    "int8_mixed_scaled_mm": log_int8_product,
    "int8_scaled_mm": log_int8_product,
}


def without_outliers(func: Any, arguments: Mapping[str, Any]) -> Any:
    """Run an op of a library; those of LLM.int8() as if no column had outliers.

    Columns with outliers, whose number depends on data, would be multiplied in 16 bits
    (arXiv:2208.07339: 0.1 % of the columns of large models).
    """
    name = func.__name__.partition(".")[0]
    if func.namespace == "bitsandbytes" and name == "int8_vectorwise_quant":
        return (*func(arguments["A"])[:2], None)
    if func.namespace == "bitsandbytes" and name == "int8_mixed_scaled_mm":
        factors = [arguments[name] for name in ("CA", "CB", "SCA", "SCB")]
        scaled = torch.ops.bitsandbytes.int8_scaled_mm
        return scaled(*factors, bias=arguments.get("bias"), dtype=arguments["A"].dtype), None
    return func(**arguments)


def log_attention(log: OpLog, arguments: Mapping[str, Any], output: Any, kernel: str) -> str:
    """Log an attention kernel of another library as torch's attention.

    ``kernel``: its name, "" if unknown. Its tensors are (batch, length, heads, width), or (tokens,
    heads, width) of sequences whose bounds ``cu_seqlens`` has: all are taken to be of mean length.
    """
    names = next(names for names in QKV if names[0] in arguments)
    bounds = [x for name, x in arguments.items() if name.startswith("cu_seqlens") and x is not None]
    sequences = max(1, bounds[0].numel() - 1) if bounds else 1

    def heads_first(tensor: Any) -> Any:
        if tensor.dim() == 3:
            divisible = tensor.shape[0] // sequences * sequences
            tensor = tensor[:divisible].unflatten(0, (sequences, -1))
        return tensor.transpose(1, 2)

    qkv = tuple(heads_first(arguments[name]) for name in names)
    causal = arguments.get("causal", arguments.get("is_causal", False))
    options = {"is_causal": bool(causal), "enable_gqa": qkv[0].shape[1] != qkv[1].shape[1]}
    options |= {"dropout_p": float(arguments.get("dropout_p") or 0.0), "masked": False}
    options |= by_kernel(kernel)
    results = tensors_in(output)
    gradient = next((x for name, x in arguments.items() if name in GRADIENTS), None)
    if gradient is None:
        log.add("itercast.sdpa", qkv, options, heads_first(results[0]))
    else:
        log.add("itercast.sdpa_backward", (heads_first(gradient), *qkv), options, list(qkv))
    return ATTENTION + (kernel or "torch's own")
