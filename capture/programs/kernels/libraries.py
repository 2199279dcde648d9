"""Kernels of other libraries that are logged as torch's own: attention, numbers in 4 and 8 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
    """What logs an op of a library as ops of torch; None of one that nothing is known of."""
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


def by_name(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """An op's arguments by name."""
    names = (a.name for a in func._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def log_pass(log: OpLog, given: Mapping[str, Any], output: Any, written: Sequence[str] = ()) -> str:
    """Log bitsandbytes' casts to and from blocks of 4 or 8 bits, and updates with states in 8 bits.

    Each reads all once and writes its results, or the arguments of these names.
    """
    results = [*tree_leaves(output), *(given[name] for name in written)]
    read, made = (
        tuple(x for x in tree_leaves(values) if isinstance(x, torch.Tensor))
        for values in (given, results)
    )
    numel = max((t.numel() for t in (*read, *made)), default=0)
    log.add(FUSED, read, {"ops": 2, "numel": numel}, made)
    return QUANTISED


def log_product(log: OpLog, given: Mapping[str, Any], output: Any) -> str:
    """Log a product by a matrix in 4 bits: the matrix is made whole, then multiplied.

    So bitsandbytes (0.50, backends/cuda/ops.py) does with more than 1,536 rows, as in training.
    """
    x, rows = given["A"], list(given["shapeB"])
    whole = torch.empty(rows, dtype=x.dtype, device=x.device)
    log_pass(log, {n: v for n, v in given.items() if n not in ("A", "bias")}, whole)
    flat, made = x.reshape(-1, x.shape[-1]), output.view(-1, rows[0])
    bias = given.get("bias")
    factors = (flat, whole.t()) if bias is None else (bias, flat, whole.t())
    log.add("aten.mm.default" if bias is None else "aten.addmm.default", factors, {}, made)
    return QUANTISED


def log_int8_product(log: OpLog, given: Mapping[str, Any], output: Any) -> str:
    """Log a product of rows and a matrix in 8 bits as one in 16 bits, which has measured rows."""
    left, right = (given.get(f"C{name}", given.get(name)) for name in "AB")
    rows, matrix = (torch.empty(t.shape, dtype=torch.half).flatten(0, -2) for t in (left, right))
    made = output[0] if isinstance(output, tuple) else output
    log.add("aten.mm.default", (rows, matrix.t()), {}, made.view(-1, made.shape[-1]))
    return INT8


LOGGED: Mapping[str, Logged] = {
    "gemm_4bit": log_product,
    "int8_linear_matmul": log_int8_product,
    "int8_mixed_scaled_mm": log_int8_product,
    "int8_scaled_mm": log_int8_product,
}


def without_outliers(func: Any, given: Mapping[str, Any]) -> Any:
    """What an op returns, given its arguments; of LLM.int8() where no column has outliers.

    Its columns with outliers, whose number depends on data, are multiplied in 16 bits
    (arXiv:2208.07339: 0.1 % of the columns of large models).
    """
    name = func.__name__.partition(".")[0]
    if func.namespace == "bitsandbytes" and name == "int8_vectorwise_quant":
        return (*func(given["A"])[:2], None)
    if func.namespace == "bitsandbytes" and name == "int8_mixed_scaled_mm":
        factors = [given[name] for name in ("CA", "CB", "SCA", "SCB")]
        scaled = torch.ops.bitsandbytes.int8_scaled_mm
        return scaled(*factors, bias=given.get("bias"), dtype=given["A"].dtype), None
    return func(**given)


def log_attention(log: OpLog, given: Mapping[str, Any], output: Any, kernel: str) -> str:
    """Log a kernel of another library as attention of torch's, by this kernel if it is known.

    Its tensors are (batch, length, heads, width), or (tokens, heads, width) of sequences that
    ``cu_seqlens`` count, which are taken to be of mean length.
    """
    three = next(names for names in QKV if names[0] in given)
    starts = [x for name, x in given.items() if name.startswith("cu_seqlens") and x is not None]
    count = max(1, starts[0].numel() - 1) if starts else 1

    def laid(tensor: Any) -> Any:
        if tensor.dim() == 3:
            whole = tensor.shape[0] // count * count
            tensor = tensor[:whole].unflatten(0, (count, -1))
        return tensor.transpose(1, 2)

    read = tuple(laid(given[name]) for name in three)
    causal = given.get("causal", given.get("is_causal", False))
    options = {"is_causal": bool(causal), "enable_gqa": read[0].shape[1] != read[1].shape[1]}
    options |= {"dropout_p": float(given.get("dropout_p") or 0.0), "masked": False}
    options |= by_kernel(kernel)
    made = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
    gradient = next((x for name, x in given.items() if name in GRADIENTS), None)
    if gradient is None:
        log.add("itercast.sdpa", read, options, laid(made[0]))
    else:
        log.add("itercast.sdpa_backward", (laid(gradient), *read), options, list(read))
    return ATTENTION + (kernel or "torch's own")
