"""Describes an LSTM layer over all steps of a sequence, in one direction, as one op.

Forward and backward. Other recurrent networks are captured step by step, as ops of other families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from itercast.microbench.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.opcall import OpCall
from itercast.microbench.ops.family import (
    Family,
    GpuSweep,
    Measured,
    Numbers,
    Part,
    Point,
    Tensor,
    Workload,
    autograd_call,
    itemsize_bytes,
    log_uniform,
    logs,
    torch_dtype,
)
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_BATCH, resize_along
from itercast.microbench.slow_imports import torch

GATES = 4  # input, forget, cell, output
MODE = 2  # an LSTM's number among recurrent networks, in torch and cuDNN
POINTWISE: float = assumed(__file__, "pointwise_flops")
MAX_FLOPS = 2e9
MAX_BYTES = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """One call from ``steps`` x ``batch`` vectors of ``inputs`` to as many of ``hidden``.

    Its backward makes the gradients of the inputs, of both states, and of all weights.
    """

    op: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str = "fp32"


def _width(rng: np.random.Generator) -> int:
    n = log_uniform(rng, 8, 1024)
    return max(8, 8 * round(n / 8)) if rng.random() < 0.8 else n


def sweep() -> Iterator[Recurrent]:
    """Yields points without end: widths of 8 to 1024, up to 256 steps and 128 sequences."""
    rng = np.random.default_rng(17)
    while True:
        hidden = _width(rng)
        p = Recurrent(
            op=str(rng.choice(["lstm", "lstm_backward"])),
            steps=log_uniform(rng, 1, 256),
            batch=log_uniform(rng, 1, 128),
            inputs=hidden if rng.random() < 0.4 else _width(rng),  # layers after the first
            hidden=hidden,
        )
        if flops(p) <= MAX_FLOPS and bytes_moved(p) <= MAX_BYTES:
            yield p


def build(p: Recurrent, device: str) -> Workload:
    """oneDNN's layer on a CPU, cuDNN's on a GPU, its backward through autograd."""

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * 0.1).to(torch_dtype(p.dtype))

    x, h, c = (
        tensor(p.steps, p.batch, p.inputs),
        tensor(p.batch, p.hidden),
        tensor(p.batch, p.hidden),
    )
    wide = GATES * p.hidden
    weights = [tensor(wide, p.inputs), tensor(wide, p.hidden), tensor(wide), tensor(wide)]
    grad = tensor(p.steps, p.batch, p.hidden)
    x.requires_grad_(p.op != "lstm" and device != "cpu")
    run = _on_cpu if device == "cpu" else _on_cuda
    through_autograd = p.op != "lstm" and device != "cpu"
    return Workload(
        run=run(p, x, h, c, weights, grad),
        baseline=autograd_call(1 + len(weights), device) if through_autograd else None,
        through_aten=device == "cpu",
    )


def _on_cpu(
    p: Recurrent, x: Tensor, h: Tensor, c: Tensor, w: list[Tensor], grad: Tensor
) -> Callable[[], object]:
    aten = torch.ops.aten
    how = (MODE, p.hidden, 1, True)

    def forward() -> Point:
        return aten.mkldnn_rnn_layer(x, *w, h, c, False, [], *how, False, False, True)

    if p.op == "lstm":
        return forward
    y, last_h, last_c, workspace = forward()
    states, grads = (h, c, y, last_h, last_c), (grad, None, None)
    back = aten.mkldnn_rnn_layer_backward
    return lambda: back(*(x, *w, *states, *grads, False, *how), True, False, [], False, workspace)


def _on_cuda(
    p: Recurrent, x: Tensor, h: Tensor, c: Tensor, w: list[Tensor], grad: Tensor
) -> Callable[[], object]:
    module = torch.nn.LSTM(p.inputs, p.hidden, device=x.device, dtype=x.dtype)
    flat: list[torch.Tensor] = list(
        module.parameters()
    )  # in one piece of memory, as cuDNN wants them
    for own, given in zip(flat, w, strict=True):
        own.data.copy_(given)
    states = (h[None], c[None])

    def forward() -> Tensor:
        return torch.lstm(x, states, flat, True, 1, 0.0, True, False, False)[0]

    if p.op == "lstm":
        return torch.no_grad()(forward)
    y = forward()
    leaves = [x, *flat]
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def _backward(p: Recurrent) -> Numbers:
    return np.where(np.equal(p.op, "lstm"), 0.0, 1.0)


def flops(p: Recurrent) -> Numbers:
    """Products of inputs and state with the weights of four gates; twice that backward."""
    cells = 1.0 * p.steps * p.batch
    products = 2.0 * cells * GATES * p.hidden * (p.inputs + p.hidden)
    return (1 + _backward(p)) * (products + POINTWISE * cells * p.hidden)


def bytes_moved(p: Recurrent) -> Numbers:
    """Inputs, outputs, gates and weights once; backward these and their gradients."""
    cells = 1.0 * p.steps * p.batch
    values = cells * (p.inputs + (2 + GATES) * p.hidden)
    weights = 1.0 * GATES * p.hidden * (p.inputs + p.hidden + 2)
    return (1 + _backward(p)) * (values + weights) * itemsize_bytes(p.dtype)


def features(p: Recurrent, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, the work of one step, and the share of the cache that weights fill."""
    weights = 1.0 * GATES * p.hidden * p.hidden * itemsize_bytes(p.dtype)
    return {
        "op": p.op,
        "dtype": p.dtype,
        **logs(p, "steps", "batch", "inputs", "hidden"),
        "log_step_flops": np.log2(flops(p) / p.steps),
        "log_weights_per_cache": np.log2(weights / gpu.l2_bytes),
        "hidden_mod_16": p.hidden % 16,
        "inputs_mod_16": p.inputs % 16,
        "batch_mod_16": p.batch % 16,
    }


def from_call(call: OpCall) -> Recurrent | None:
    """Describe mkldnn_rnn_layer(x, w, u, b, c, h, c, ...), or its backward, which begins alike."""
    x, weight = call.args[0], call.args[1]
    if min(x.shape) < 1:
        return None
    return Recurrent(
        op="lstm_backward" if "backward" in call.op else "lstm",
        steps=x.shape[0],
        batch=x.shape[1],
        inputs=x.shape[2],
        hidden=weight.shape[0] // GATES,
        dtype=x.dtype,
    )


def fallback(p: Recurrent, measured: Measured) -> list[Part]:
    """A product of all inputs, one of the state at each step, and a pass over the gates at each.

    Backward as many again, and one product for each of the two weights' gradients.
    """
    if measured.seen("recurrent", p.op, p.dtype):
        return []
    cells, wide = p.steps * p.batch, GATES * p.hidden
    gates = memory_copy(2 * p.batch * wide * int(itemsize_bytes(p.dtype)))

    def product(m: int, n: int, k: int, times: int = 1) -> Part:
        params = Gemm(op="mm", m=m, n=n, k=k, layout="nt", dtype=p.dtype)
        return Part(family="gemm", params=params, times=times)

    parts = [replace(gates, times=p.steps)]
    if p.op == "lstm":
        parts += [product(cells, wide, p.inputs), product(p.batch, wide, p.hidden, p.steps)]
        return parts
    parts += [product(cells, p.inputs, wide), product(p.batch, p.hidden, wide, p.steps)]
    parts += [product(wide, p.inputs, cells), product(wide, p.hidden, cells)]
    return parts


FAMILY = Family(
    name="recurrent",
    params=Recurrent,
    sweep=sweep,
    build=build,
    flops=flops,
    bytes_moved=bytes_moved,
    features=features,
    fallback=fallback,
    answers={
        "aten.mkldnn_rnn_layer.default": from_call,
        "aten.mkldnn_rnn_layer_backward.default": from_call,
    },
    weight=0.5,
    gpu_sweep=GpuSweep(
        resize=resize_along({"batch": MAX_BATCH, "steps": 512}),
        slow_frac=0.02,
        compute_bound=True,
    ),
)
