"""Pooled vectors of sharded tables, and their gradients, that travel as codes."""

from __future__ import annotations

from dataclasses import replace

from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, StepCapture
from itercast.compose.graph.codecs import Codec
from itercast.compose.graph.rewrite import COLLECTIVE, StepBuilder, fresh_storages

VECTORS = ("send vectors", "send gradients")  # exchanges of sharded tables, of pooled vectors


def compressed_vectors(step: StepCapture, codec: Codec | None) -> StepCapture:
    """The step of a rank with sharded tables whose pooled vectors and gradients travel as codes.

    They are encoded when they are sent and decoded before they are read; what ran beside the
    exchange still does.
    """
    of_vectors = [c for c in step.calls if c.op == COLLECTIVE and c.module in VECTORS]
    if codec is None or not of_vectors:
        return step
    dtype = of_vectors[0].outputs[0].dtype
    made, ids = StepBuilder(step), fresh_storages(step)
    waiting: dict[int, OpCall] = {}  # by storage that is received, what decodes it
    for i, call in enumerate(step.calls):
        for decode in [d for s, d in waiting.items() if s in {t.storage for t in call.tensors()}]:
            made.calls.append(replace(decode, phase=call.phase))
            waiting = {s: d for s, d in waiting.items() if d is not decode}
        if call not in of_vectors:
            made.add(i, call)
            continue
        numbers = call.args[0].nbytes // ITEMSIZE_BYTES[dtype]
        whole = replace(call.args[0], shape=(numbers,), stride=(), dtype=dtype)
        codes, arrived = codec.coded(whole, next(ids)), codec.coded(whole, next(ids))
        made.calls.append(replace(codec.encode(whole, codes, call.phase), module=call.module))
        made.add(i, replace(call, args=(codes,), outputs=(arrived,)))
        decode = codec.decode(arrived, whole, call.phase)
        decode = replace(decode, outputs=call.outputs, module=call.module)
        waiting |= {t.storage: decode for t in call.outputs}
    return made.step()
