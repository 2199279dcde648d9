"""Captured steps stored on disk as gzip JSON, which is read without torch and never executed."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from itercast.microbench.opcall import Argument, OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.microbench.store import write_atomic

log = logging.getLogger(__name__)
TENSOR = "t"


def _pack(value: Argument) -> Argument:
    if isinstance(value, TensorSpec):
        place = (value.stride, value.storage, value.zero_frac, value.layout, value.nnz)
        return {TENSOR: [value.shape, value.dtype, *place]}
    if isinstance(value, tuple | list):
        return [_pack(v) for v in value]
    return value


def _pack_all(values: Mapping[str, Argument]) -> dict[str, Argument]:
    return {k: _pack(v) for k, v in values.items()}


def _unpack(value: Argument) -> Argument:
    if isinstance(value, dict):
        shape, dtype, stride, storage, zeros, layout, nnz = value[TENSOR]
        return TensorSpec(
            shape=tuple(shape),
            dtype=dtype,
            stride=tuple(stride),
            storage=storage,
            zero_frac=zeros,
            layout=layout,
            nnz=nnz,
        )
    return tuple(_unpack(v) for v in value) if isinstance(value, list) else value


def dumps(capture: StepCapture) -> bytes:
    """The capture as gzip JSON."""
    calls = [
        [
            c.op,
            _pack(c.args),
            _pack_all(c.kwargs),
            _pack(c.outputs),
            c.phase,
            c.module,
            c.stream,
            c.compiled,
        ]
        for c in capture.calls
    ]
    parameters = [
        [p.name, p.shape, p.dtype, p.storage, p.ready_after, p.layout, p.nnz]
        for p in capture.parameters
    ]
    plain = {
        "calls": calls,
        "parameters": parameters,
        "host": dict(capture.host),
        "samples": capture.samples,
        "tokens": capture.tokens,
        "repeats": dict(capture.repeats),
        "optimizer": capture.optimizer,
        "inputs": _pack(capture.inputs),
    }
    return gzip.compress(json.dumps(plain).encode(), 3)


def loads(data: bytes) -> StepCapture:
    """The capture that ``dumps`` wrote; ValueError for anything else."""
    try:
        plain = json.loads(gzip.decompress(data))
        calls = tuple(
            OpCall(
                op=op,
                args=_unpack(args),
                kwargs={k: _unpack(v) for k, v in kwargs.items()},
                outputs=_unpack(outputs),
                phase=phase,
                module=module,
                stream=stream,
                compiled=compiled,
            )
            for op, args, kwargs, outputs, phase, module, stream, compiled in plain["calls"]
        )
        parameters = tuple(
            ParamSpec(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                storage=storage,
                ready_after=ready,
                layout=layout,
                nnz=nnz,
            )
            for name, shape, dtype, storage, ready, layout, nnz in plain["parameters"]
        )
        return StepCapture(
            calls=calls,
            parameters=parameters,
            host=plain["host"],
            samples=plain["samples"],
            tokens=plain["tokens"],
            repeats=plain["repeats"],
            optimizer=plain["optimizer"],
            inputs=_unpack(plain["inputs"]),
        )
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"not a captured step: {exc}") from exc


def cached(key: str, make: Callable[[], StepCapture], folder: Path) -> StepCapture:
    """Read the capture stored under ``key``; make and store it if it is missing or unreadable.

    Where nothing can be written it is made every time.
    """
    path = folder / f"{key}.json.gz"
    try:
        return loads(path.read_bytes())
    except (OSError, ValueError):
        capture = make()
    try:
        write_atomic(path, dumps(capture))
    except OSError as exc:
        log.warning("captures are not kept: %s", exc)
    return capture
