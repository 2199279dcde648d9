"""Describes recurrent networks (LSTM, GRU, plain) over all steps of a sequence as one op.

On a CPU one op is an LSTM's layer in one direction, by oneDNN; a GRU there runs step by step in
C++. On a GPU cuDNN runs all layers and directions in one call. Input products, of all steps at
once, are priced as other products; rows measure the rest: the steps of one layer in one direction,
with ``inputs`` 1 (oneDNN's layers are measured whole).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.slow_imports import torch
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.opcall import CELLS, GATES, OpCall, torch_dtype
from itercast.microbench.hardware.spec import Gpu
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
    by_name,
    is_any,
    itemsize_bytes,
    logs,
)
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.sizes import MAX_BATCH, points_of, resize_along

CALL = "itercast.recurrent"  # a network's call on a GPU, whose parameters are its arguments
ONE_DNN = "lstm"  # oneDNN has layers of no other cell for PyTorch
SWEPT = facts_of(__file__)["sweep"]
MODE = 2  # an LSTM's number among recurrent networks, in torch and cuDNN
POINTWISE: float = assumed(__file__, "pointwise_flops")
STEP_KERNELS: Mapping[str, float] = assumed(__file__, "step_kernels")  # by architecture
SAVED = assumed(__file__, "saved_values")  # by cell
MAX_FLOPS = 2e9
MAX_BYTES = 1e8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """One call from ``steps`` x ``batch`` vectors of ``inputs`` to as many of ``hidden``.

    ``op`` is one of ``GATES``. Each of the ``layers`` reads what all ``directions`` of the one
    before made. Backward makes the gradients of the inputs, of the states, and of all weights.
    """

    op: str
    steps: int
    batch: int
    inputs: int
    hidden: int
    dtype: str = "fp32"
    layers: int = 1
    directions: int = 1


def cell_of(op: str) -> str:
    """The cell of a forward or backward op."""
    return op.removesuffix("_backward")


def _layer(inputs: int, hidden: int, **fields: Any) -> Recurrent:
    """A layer from sizes as the YAML file states them; ``inputs`` 0: as many as ``hidden``."""
    return Recurrent(inputs=inputs or hidden, hidden=hidden, **fields)


def _fits(p: Recurrent) -> bool:
    return bool(flops(p) <= MAX_FLOPS and bytes_moved(p) <= MAX_BYTES)


def _on_gpus(p: Recurrent, rng: np.random.Generator) -> Recurrent:
    """The steps of a layer of some cell: what rows of GPUs measure."""
    op = p.op.replace("lstm", str(rng.choice(list(CELLS))))
    return replace(p, op=op, inputs=1)


def build(p: Recurrent, device: str) -> Workload:
    """oneDNN's layer of an LSTM on a CPU; else the module's, its backward through autograd."""

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * 0.1).to(torch_dtype(p.dtype))

    x, h, c = (
        tensor(p.steps, p.batch, p.inputs),
        tensor(p.batch, p.hidden),
        tensor(p.batch, p.hidden),
    )
    wide = GATES[p.op] * p.hidden
    grad = tensor(p.steps, p.batch, p.hidden)
    if device == "cpu" and cell_of(p.op) == ONE_DNN:
        weights = [tensor(wide, p.inputs), tensor(wide, p.hidden), tensor(wide), tensor(wide)]
        return Workload(run=_by_one_dnn(p, x, h, c, weights, grad))
    x.requires_grad_(p.op not in CELLS)
    return Workload(
        run=_module(p, x, h, c, grad),
        baseline=None if p.op in CELLS else autograd_call(5, device),  # x and four of weights
        through_aten=False,
    )


def _by_one_dnn(
    p: Recurrent, x: Tensor, h: Tensor, c: Tensor, w: list[Tensor], grad: Tensor
) -> Callable[[], object]:
    """One layer of an LSTM by oneDNN: its forward, or its backward after one forward."""
    aten = torch.ops.aten
    settings = (MODE, p.hidden, 1, True)  # mode, hidden_size, num_layers, has_biases

    def forward() -> Point:  # not reversed, no batch sizes; not bidirectional, steps first, train
        return aten.mkldnn_rnn_layer(x, *w, h, c, False, [], *settings, False, False, True)

    if p.op in CELLS:
        return forward
    y, last_h, last_c, workspace = forward()
    states, grads = (h, c, y, last_h, last_c), (grad, None, None)
    back = aten.mkldnn_rnn_layer_backward
    return lambda: back(
        *(x, *w, *states, *grads, False, *settings), True, False, [], False, workspace
    )


def _module(p: Recurrent, x: Tensor, h: Tensor, c: Tensor, grad: Tensor) -> Callable[[], object]:
    """A call of torch's module (LSTM, GRU, RNN), or of its backward after one forward."""
    cell = cell_of(p.op)
    module = getattr(torch.nn, cell.upper())(p.inputs, p.hidden, device=x.device, dtype=x.dtype)
    states = (h[None], c[None]) if cell == "lstm" else h[None]
    if p.op in CELLS:  # a GPU's call makes one node for autograd, a CPU's steps make many
        return torch.set_grad_enabled(x.device.type == "cpu")(lambda: module(x, states)[0])
    y, leaves = module(x, states)[0], [x, *module.parameters()]
    return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def _backward(p: Recurrent) -> Numbers:
    return np.where(is_any(p.op, CELLS), 0.0, 1.0)


def _layer_inputs(p: Recurrent) -> Numbers:
    """Widths of the inputs of all layers, added up."""
    return p.inputs + 1.0 * (p.layers - 1) * p.directions * p.hidden


def _cells(p: Recurrent) -> Numbers:
    """How often a cell runs in one layer: steps * batch * directions."""
    return 1.0 * p.steps * p.batch * p.directions


def product_flops(p: Recurrent) -> Numbers:
    """Products of inputs and state with the weights of all gates; twice that backward."""
    rows: Numbers = by_name(p.op, GATES) * p.hidden
    widths = _layer_inputs(p) + p.layers * p.hidden
    return (1 + _backward(p)) * 2.0 * _cells(p) * rows * widths


def flops(p: Recurrent) -> Numbers:
    """FLOP of all products, and what the gates of each cell take."""
    gates = POINTWISE * _cells(p) * p.layers * p.hidden
    return product_flops(p) + (1 + _backward(p)) * gates


def bytes_moved(p: Recurrent) -> Numbers:
    """Inputs, outputs, gates and weights once; backward these and their gradients."""
    cells, gates, layers = 1.0 * p.steps * p.batch, by_name(p.op, GATES), p.layers * p.directions
    values: Numbers = cells * (_layer_inputs(p) + layers * (2 + gates) * p.hidden)
    rows: Numbers = gates * p.hidden * p.directions
    weights = rows * (_layer_inputs(p) + p.layers * (p.hidden + 2.0))
    return (1 + _backward(p)) * (values + weights) * itemsize_bytes(p.dtype)


def saved_numel(p: Recurrent) -> int:
    """How many numbers forward keeps for backward, beside its inputs and outputs."""
    cells = p.steps * p.batch * p.layers * p.directions
    return int(cells * p.hidden * SAVED[cell_of(p.op)])


def features(p: Recurrent, gpu: Gpu) -> dict[str, Numbers | str]:
    """Sizes, the work of one step, and the share of the cache that weights fill."""
    weights = by_name(p.op, GATES) * 1.0 * p.hidden * p.hidden * itemsize_bytes(p.dtype)
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


def from_layer(call: OpCall) -> Recurrent | None:
    """Describe mkldnn_rnn_layer(x, w, u, b, c, h, c, ...); its backward begins with the same."""
    x, weight = call.args[0], call.args[1]
    if min(x.shape) < 1:
        return None
    return Recurrent(
        op="lstm_backward" if "backward" in call.op else "lstm",
        steps=x.shape[0],
        batch=x.shape[1],
        inputs=x.shape[2],
        hidden=weight.shape[0] // GATES["lstm"],
        dtype=x.dtype,
    )


def fallback(p: Recurrent, measured: Measured) -> list[Part]:
    """A product of all inputs for each layer and direction, and the steps of each.

    Backward as many products again, for the gradients of weights. Steps are priced by rows of this
    very device, up to their largest state. Elsewhere each is a product of the state, a pass over
    the gates and the start of STEP_KERNELS kernels; backward adds the gradient of weights.
    """
    on_cpu, one_layer = measured.gpu.kind == "cpu", replace(p, inputs=1, layers=1, directions=1)
    was_measured = measured.seen if on_cpu else measured.measured_here
    measured_here = was_measured("recurrent", p.op, p.dtype)
    measured_here &= on_cpu or np.log2(p.hidden) <= measured.largest("recurrent", "log_hidden")
    if measured_here and (p == one_layer or (on_cpu and cell_of(p.op) == ONE_DNN)):
        return []
    cells, rows, forward = p.steps * p.batch, GATES[p.op] * p.hidden, p.op in CELLS
    layer_count = p.layers * p.directions

    def product(m: int, n: int, k: int, times: float = 1) -> Part:
        params = Gemm(op="mm", m=m, n=n, k=k, layout="nt", dtype=p.dtype)
        return Part(family="gemm", params=params, times=times)

    parts, between = [], p.directions * p.hidden
    for width, times in ((p.inputs, p.directions), (between, (p.layers - 1) * p.directions)):
        sizes = [(cells, rows, width)] if forward else [(cells, width, rows), (rows, width, cells)]
        parts += [product(*size, times) for size in sizes if times]
    if measured_here:
        return [*parts, Part(family="recurrent", params=one_layer, times=layer_count)]
    gates = memory_copy(2 * p.batch * rows * int(itemsize_bytes(p.dtype)))
    parts.append(replace(gates, times=p.steps * layer_count))
    if extra := STEP_KERNELS.get(measured.gpu.architecture, 0):
        parts.append(replace(memory_copy(1), times=p.steps * layer_count * extra))
    state = (rows, p.hidden) if forward else (p.hidden, rows)
    parts.append(product(p.batch, *state, p.steps * layer_count))
    return parts if forward else [*parts, product(rows, p.hidden, cells, layer_count)]


FAMILY = Family(
    name="recurrent",
    params=Recurrent,
    sweep=points_of(17, SWEPT, _layer, _fits),
    build=build,
    flops=flops,
    product_flops=product_flops,
    bytes_moved=bytes_moved,
    features=features,
    fallback=fallback,
    answers={
        "aten.mkldnn_rnn_layer.default": from_layer,
        "aten.mkldnn_rnn_layer_backward.default": from_layer,
        CALL: lambda call: Recurrent(**call.kwargs),
    },
    weight=1.6,
    gpu_sweep=GpuSweep(
        variant=_on_gpus,
        resize=resize_along({"batch": MAX_BATCH, "steps": 512}),
        slow_frac=0.02,
        compute_bound=True,
    ),
)
