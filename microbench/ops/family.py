"""Defines the types that describe an op family: one value holds all about one kind of op."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeAlias, get_type_hints

import numpy as np

from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import ELEMENT_BYTES, OpCall
from itercast.microbench.hardware.spec import Gpu

DRAWN = 2**16
Tensor: TypeAlias = "torch.Tensor"
Point = Any  # parameters of one op of any family; in formulas also columns, an array for each
Values = Any  # a number, truth value or text for one op; an array of them for columns
Numbers = float | np.ndarray[tuple[int, ...], np.dtype[np.float64]]  # of one op; of columns
# Types of a family's parameters by name, also where its file postpones annotations.
parameter_types: Callable[[Any], Mapping[str, type]] = cache(get_type_hints)
# no assumption: shares of a sweep
TRAINING_DTYPES: Mapping[str, float] = {"fp32": 0.48, "bf16": 0.49, "fp16": 0.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A function to time: ``run`` only launches, everything it needs is allocated already.

    ``calls`` is how many calls of the op one run makes; times are per call. The time of
    ``baseline``, where given, is subtracted. ``through_aten``: ``run`` calls ``torch.ops.aten``,
    whose Python wrapper no real step runs: its cost on the host is subtracted; false where ``run``
    calls torch's own binding.
    """

    run: Callable[[], object]
    calls: int = 1
    baseline: Callable[[], object] | None = None
    through_aten: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTerm:
    """One term of a Gaussian process's covariance: ``amplitude**2 * exp(-distance**2 / 2)``.

    ``amplitude`` is a standard deviation of the log time. ``length_scales`` holds, by feature, the
    difference that counts as distance 1: in log2 units for features that are logarithms. Text
    features (and ``name=value``: whether the feature has this value) are 0 or 1: a length below 0.5
    makes points that differ in them nearly unrelated. Features that are not named do not count.
    """

    amplitude: float
    length_scales: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An op that is priced in place of another, ``times`` times."""

    family: str
    params: Point
    times: float = 1.0
    checked: bool = False  # on measured kernels: such times are not assumed


class Measured(Protocol):
    """What a fallback can ask: the device that is forecast and the ops that models have rows of."""

    @property
    def gpu(self) -> Gpu:
        """The device that is forecast."""

    @property
    def channels_last(self) -> bool:
        """Whether the op's images lie in memory as NHWC."""

    def has_model(self, family: str) -> bool:
        """Whether the family has a model learned from rows."""

    def seen(self, family: str, op: str, dtype: str) -> bool:
        """Whether there are rows of this op in this dtype, on this GPU or on similar ones."""

    def measured_here(self, family: str, op: str, dtype: str) -> bool:
        """Whether this very GPU has rows of this op in this dtype."""

    def largest(self, family: str, feature: str) -> float:
        """The largest value that a number among a family's features has in its rows."""

    def software_shares(self, family: str, op: str, dtype: str) -> Mapping[str, float]:
        """Weight of each software (torch, vllm...) whose rows forecast this op on this GPU."""


def _unchanged(p: Point, *_: Point) -> Point:
    return p


def _retyped(p: Point, dtype: str, gpu: Gpu) -> Point:
    return replace(p, dtype=dtype)


def _nothing(p: Point) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSweep:
    """How a family is swept on a GPU, where that differs from its sweep for all devices.

    - ``points(rng)`` yields points for GPUs; None: those of ``Family.sweep``.
    - ``dtypes``: points in fp32 are spread over these dtypes by these shares.
    - ``variant(point, rng)`` is the call that a GPU makes in place of a point captured on a CPU;
      None where it launches nothing.
    - ``retype(point, dtype, gpu)`` changes the dtype after that; None where a GPU has no such call.
    - ``resize(point, factor, first_share)`` makes the work ``factor`` times as large:
      factor**first_share along the first axis (0..1), the rest along others.
    - ``allocated_bytes``: operands that are not all read: embedding tables, classes of a loss.
    - ``slow_frac``: the share of the roofline that its slow kernels achieve; it bounds sizes.
    - ``compute_bound``: the memory's bandwidth does not bound sizes.
    - ``weight``: its share of the sweep's time relative to other families.
    """

    points: Callable[[np.random.Generator], Iterator[Point]] | None = None
    dtypes: Mapping[str, float] = field(default_factory=lambda: TRAINING_DTYPES)
    variant: Callable[[Point, np.random.Generator], Point] = _unchanged
    retype: Callable[[Point, str, Gpu], Point] = _retyped
    resize: Callable[[Point, float, float], Point] = _unchanged
    allocated_bytes: Callable[[Point], float] = _nothing
    slow_frac: float = 0.05  # no assumption: share of a sweep
    compute_bound: bool = False
    weight: float = 0.2  # no assumption: share of a sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that is known about one kind of op: parameters, formulas, how to build and sweep it.

    ``flops``, ``bytes_moved`` and ``features`` take either one parameter object or *columns*: any
    object with the same attribute names whose values are numpy arrays. They therefore use numpy
    functions only (``np.maximum``, ``np.ceil``; no ``if p.m > 1``). ``features`` values may be
    numbers or strings; strings are one-hot encoded by the learner.

    Calls:
    ``answers`` maps an op name as captured ("aten.mm.default") to a function that turns the call
    into parameters, or returns None for a call the family cannot describe. ``layouts`` of tensors
    that it describes: "" strided, "coo", "csr", "csc"; calls with others never reach it.

    Bounds and features:
    ``rate`` is the FLOP/s that an op's kernels cannot pass, whatever the dtype's peak.
    ``least_flops(params, gpu, rate)`` at the GPU's peak take the least time that a kernel needs, so
    that no forecast is below it; None: any may be. ``rate``: FLOP/s of large products, by dtype.
    ``cached_bytes(params, gpu)`` prices an op without a learned model in place of ``bytes_moved``
    where what it reads may be in the last cache.
    ``floor_us`` replaces max(flops / peak, bytes / memory bandwidth) where that is not the bound.
    ``gpu_memory_us(params, gpu, cold, stack)`` replaces bytes / bandwidth in the roofline of GPUs:
    ``cold`` is 1 where no cache holds operands, else 0; ``stack`` the software, "" for eager torch.
    ``op_name`` is the op under which a row is counted as measured; None: parameter ``op``.
    ``call_name`` tells apart calls of one op that launch unlike numbers of kernels; None: ``op``.
    ``op_aliases`` names ops that run the same kernels, with the parameters to change along with
    the op: one that was not measured in a dtype is priced as the first of them that was.
    ``tiled``: kernels go by tiles per SM, so that an unseen GPU keeps its own features where it
    is priced by rows of another GPU. ``at_achieved_rate``: large ops achieve
    ``achieved_flops_per_s`` of a GPU's file. ``place`` names the cluster a row was measured in,
    nothing where the GPU says it.
    ``without_tf32``: makers of GPUs whose libraries run it in fp32 where TF32 is allowed.
    ``kernel`` is the covariance of log times where they are smooth ``along`` some features (log2
    of sizes); outside ``ends`` of the first of these features, not in log2, the ratio to the
    roofline stays as it is at the end.

    Roles:
    ``fallback(params, measured)`` are the ops that it is priced as on a device where no model has
    seen it, empty where its own model answers. ``by_roofline``: on a GPU without rows it takes the
    multiple of its roofline that other architectures take. ``matmul``: its flops count as products
    in MFU, and it runs at their rate. ``product_flops``: what counts so of another family's ops.
    ``fusible``: torch.compile fuses it with its neighbours. ``compiled``: torch.compile writes its
    kernels, so that each call costs the host something else. ``on_host``: its points are events of
    the host, which run no kernel. ``note(points, plan)`` yields what a reader should know of a step
    with these points under a plan.

    Sweeps:
    a family with ``ranks`` > 1 is built and timed in that many processes at once. One that is
    ``on_demand`` is swept only where it is named: its points take seconds to build. ``weight`` is
    its share of a CPU's sweep beside other families': many kinds of ops need more points.
    """

    name: str
    params: type[Point]
    sweep: Callable[[], Iterator[Point]]
    build: Callable[[Point, str], Workload]
    flops: Callable[[Point], Numbers]
    bytes_moved: Callable[[Point], Numbers]
    features: Callable[[Point, Gpu], Mapping[str, Numbers | str]]
    answers: Mapping[str, Callable[[OpCall], Point]]
    layouts: tuple[str, ...] = ("",)
    cached_bytes: Callable[[Point, Gpu], Numbers] | None = None
    floor_us: Callable[[Point, Gpu], Numbers] | None = None
    gpu_memory_us: Callable[[Point, Gpu, Values, Values], Numbers] | None = None
    rate: Callable[[Point, Gpu], Numbers] | None = None
    least_flops: Callable[[Point, Gpu, Callable[[str], float]], Numbers] | None = None
    op_name: Callable[[Point], Point] | None = None
    call_name: Callable[[Point], Values | str] | None = None
    kernel: Sequence[KernelTerm] = ()
    along: tuple[str, ...] = ()
    ends: tuple[float, float] = (0.0, np.inf)
    op_aliases: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tiled: bool = False
    at_achieved_rate: bool = False
    without_tf32: tuple[str, ...] = ()
    place: Callable[[Point], Numbers] | None = None
    fallback: Callable[[Point, Measured], Sequence[Part]] | None = None
    by_roofline: bool = False
    matmul: bool = False
    product_flops: Callable[[Point], Numbers] | None = None
    fusible: bool = False
    compiled: bool = False
    on_host: bool = False
    note: Callable[[Sequence[Point], Any], Iterator[str]] | None = None
    ranks: int = 1
    on_demand: bool = False
    weight: float = 1.0
    gpu_sweep: GpuSweep = field(default_factory=GpuSweep)


def autograd_call(leaves: int, device: str) -> Callable[[], object]:
    """Return a backward pass to ``leaves`` leaf tensors that launches no kernel.

    Its time is the overhead of ``torch.autograd.grad`` itself.
    """
    inputs = [torch.ones(1, device=device, requires_grad=True) for _ in range(leaves)]
    outputs = [x.view(1) for x in inputs]
    gradients = [torch.ones(1, device=device) for _ in inputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def differentiated(output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> Workload:
    """The backward pass from an output to leaves, whose graph is kept for all repetitions."""
    return Workload(
        run=lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True),
        baseline=autograd_call(len(leaves), output.device.type),
        through_aten=False,
    )


def itemsize_bytes(dtype: str) -> Numbers:
    """Bytes per element of a dtype name, or of an array of names; ValueError for an unknown one."""
    try:
        if isinstance(dtype, str):
            return ELEMENT_BYTES[dtype]
        return np.fromiter(map(ELEMENT_BYTES.__getitem__, dtype), np.float64, len(dtype))
    except KeyError as exc:
        dtypes = ", ".join(ELEMENT_BYTES)
        raise ValueError(f"unknown dtype {exc.args[0]!r}; known: {dtypes}") from None


def is_any(op: str, names: Collection[str]) -> Values:
    """Whether a name is one of these; an array of names gives a mask."""
    if isinstance(op, str):
        return op in names
    return np.fromiter(map(frozenset(names).__contains__, op), bool, len(op))


def by_name(op: str, values: Mapping[str, float]) -> Values:
    """Looks up the value of a name, or of each of an array of names; all must have one."""
    if isinstance(op, str):
        return values[op]
    return np.fromiter(map(values.__getitem__, op), float, len(op))


def logs(p: Point, *names: str) -> dict[str, Numbers]:
    """Sizes of an op as features ``log_NAME``, to the base 2."""
    return {f"log_{name}": np.log2(getattr(p, name)) for name in names}


def repeated(draw: Callable[..., Tensor], shape: tuple[int, ...], device: str) -> Tensor:
    """A tensor of 65,536 random numbers repeated, drawn by a torch function.

    Drawing all of a large tensor takes longer than timing an op on it.
    """
    numel = math.prod(shape)
    if numel <= DRAWN:
        return draw(shape, device=device)
    return draw(DRAWN, device=device).repeat(-(-numel // DRAWN))[:numel].reshape(shape)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    """An integer drawn log-uniformly from [low, high]."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
