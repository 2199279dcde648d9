"""Parameters of ops in a trace, from the shapes, types and values that it logs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import OpCall, TensorSpec
from itercast.microbench.ops import families
from itercast.microbench.store import Facts

FACTS = facts_of(__file__)
DTYPES: Mapping[str, str] = FACTS["dtypes"]
OVERLOADS: tuple[str, ...] = tuple(FACTS["overloads"].split())
RENAMED: Mapping[str, str] = FACTS["renamed"]
INPUTS: Mapping[str, int] = FACTS["inputs"]
WHOLE = 2  # arguments of a reduction over the whole tensor, at most: the tensor and a dtype
TRAINING = 5  # position of batch norm's training flag
# Positions of query, bias, dropout and causal flag among the arguments (-1: not an argument).
# Source: aten/src/ATen/native/native_functions.yaml of PyTorch.
ATTENTION = {
    "_flash_attention_forward": (0, -1, 7, 8),
    "_flash_attention_backward": (1, -1, 10, 11),
    "_efficient_attention_forward": (0, 3, 8, 9),
    "_efficient_attention_backward": (1, 4, 11, 14),
}


@cache
def _answers(name: str) -> tuple[tuple[str, str], ...]:
    """(family, captured name) of each overload of an op that a family describes."""
    op_name = RENAMED.get(name.removeprefix("aten::"), name.removeprefix("aten::"))
    overloads = [f"aten.{op_name}.{overload}" for overload in OVERLOADS]
    all_families = families().values()
    return tuple((f.name, op) for op in overloads for f in all_families if op in f.answers)


def answered(name: str) -> bool:
    """Whether some op family describes calls of this op, so that its times can be rows."""
    if not name.startswith("aten::"):
        return False
    return name.removeprefix("aten::") in ATTENTION or bool(_answers(name))


def describe(name: str, args: Facts) -> tuple[str, Any] | None:
    """Family and parameters of a call; None where no family describes it or shapes are missing."""
    if not answered(name):
        return None
    try:
        values = _arguments(args)[: INPUTS.get(name.removeprefix("aten::"))]
        if "cudnn_batch_norm" in name:
            values = _with_training(name, values)
        if name.removeprefix("aten::") in ATTENTION:
            return _attention(name.removeprefix("aten::"), values)
        for family, op in _answers(name):
            if family == "reduction" and len(values) > WHOLE and values[1] is None:
                return None  # its axes are not logged
            call = OpCall(op=op, args=values, outputs=_output(values))
            if (point := families()[family].answers[op](call)) is not None:
                hash(point)
                return family, point
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return None
    return None


def _arguments(args: Facts) -> tuple[Any, ...]:
    """Arguments: tensors where type and shape are logged, else logged values."""
    dims, types = args["Input Dims"], args.get("Input type", args.get("Input Types"))
    strides, values = args.get("Input Strides", []), args.get("Concrete Inputs", [])
    arguments: list[Any] = []
    for position, (shape, kind) in enumerate(zip(dims, types, strict=True)):
        if kind in DTYPES:
            stride = strides[position] if position < len(strides) else []
            arguments.append(_tensor(shape, DTYPES[kind], stride))
        else:
            arguments.append(_value(values[position]) if position < len(values) else None)
    return tuple(arguments)


def _tensor(shape: list[Any], dtype: str, stride: list[Any]) -> TensorSpec:
    """A tensor as a trace logs it; ValueError for a shape that none has."""
    sizes, steps = (tuple(int(n) for n in side) for side in (shape, stride))
    if min((*sizes, *steps), default=0) < 0 or max(sizes, default=0) > 2**53:
        raise ValueError(f"impossible shape {sizes}")
    return TensorSpec(shape=sizes, dtype=dtype, stride=steps if len(steps) == len(sizes) else ())


def _value(text: Any) -> Any:
    """A logged value: numbers, booleans or lists of them; None for others."""
    if not isinstance(text, str) or len(text) > 1000:
        return None
    try:
        value = json.loads(text.replace("True", "true").replace("False", "false"))
    except (ValueError, RecursionError):
        return None
    return tuple(value) if isinstance(value, list) else value


def _output(values: tuple[Any, ...]) -> tuple[TensorSpec, ...]:
    """The output, which traces do not log, of an op that only takes sizes; empty for others."""
    if values and isinstance(values[0], tuple) and all(isinstance(n, int) for n in values[0]):
        return (TensorSpec(shape=values[0], dtype="fp32"),)
    return ()


def _with_training(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of cuDNN's batch norm as native_batch_norm(_backward) takes them.

    Its backward is that of training alone. ValueError where a forward's flag is not logged: the
    two modes are different ops.
    """
    if name.endswith("backward"):
        return (*values[:3], None, None, None, None, True)
    if not isinstance(values[TRAINING], bool):
        raise ValueError("whether it trains is not logged")
    return values


def _attention(name: str, values: tuple[Any, ...]) -> tuple[str, Any] | None:
    """Fused attention; the log has (batch, length, heads, dim), the family heads before length."""
    query, bias, dropout, causal = ATTENTION[name]
    tensors = list[TensorSpec]()
    for t in values[: query + 3]:
        batch, length, heads, dim = t.shape
        tensors.append(TensorSpec(shape=(batch, heads, length, dim), dtype=t.dtype))
    facts = {
        "is_causal": values[causal] in (True, 1, 2),  # a flag, or a kind of mask (0: none)
        "dropout_p": float(values[dropout] or 0.0),
        "masked": bias >= 0 and isinstance(values[bias], TensorSpec),
    }
    backward = query > 0
    op = "itercast.sdpa_backward" if backward else "itercast.sdpa"
    answer = families()["attention"].answers[op]
    point = answer(OpCall(op=op, args=tuple(tensors), kwargs=facts))
    return None if point is None else ("attention", point)
