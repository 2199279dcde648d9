"""What an op family is: facts and formulas about one kind of op, bundled as a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from microbench.hardware.spec import Gpu
from microbench.opcall import ITEMSIZE_BYTES, OpCall

DRAWN = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something to time: ``run`` only launches; everything it needs is allocated already.

    ``calls`` is how many calls of the op one run makes; times are per call. Where ``baseline`` is
    given, its time is taken off: the op is what ``run`` does more. ``through_aten``: ``run`` calls
    ``torch.ops.aten``, whose Python wrapper no real step runs, and its cost on the host is taken
    off; false where ``run`` calls torch's own binding.
    """

    run: Callable[[], object]
    calls: int = 1
    baseline: Callable[[], object] | None = None
    through_aten: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What curves of measurements have in common: so much of the log time, between likes.

    ``amplitude`` is a standard deviation of the log time. ``reach`` says which features make two
    measurements alike, and how far apart they may be (octaves for logarithms; below 0.5 text must
    be equal, of ``name=value`` whether it is that value); those not named do not matter.
    """

    amplitude: float
    reach: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One op family.

    ``flops``, ``bytes_moved`` and ``features`` take either one parameter object or *columns*: any
    object with the same attribute names whose values are numpy arrays. They therefore use numpy
    functions only (``np.maximum``, ``np.ceil``; no ``if p.m > 1``). ``features`` values may be
    numbers or strings; strings are one-hot encoded by the learner.
    ``answers`` maps an op name as captured ("aten.mm.default") to a function that turns the call
    into parameters, or returns None for a call the family cannot describe.
    ``rate`` is FLOP/s that an op's kernels cannot pass, whatever the dtype's peak.
    ``floor_us`` replaces max(flops / peak, bytes / memory bandwidth) where that is not the bound;
    a family with ``ranks`` > 1 is built and timed in that many processes at once. One that is
    ``on_demand`` is swept only where it is named: its points take seconds to build.
    ``curve`` says what measurements tell about each other where times run smoothly ``along`` some
    features (log2 of sizes, apart by a constant), and a learner may carry on beyond the measured.
    Far below and above ``ends`` of the first of these features, not in log2, nothing changes.
    ``alike`` names ops whose kernels are alike, and what else makes an op that one: what was not
    measured in a dtype is priced as the first of them that was. ``tiled``: kernels go by tiles per
    SM, so that a GPU never seen is described by its own features even where it is priced as
    another. ``large`` is the op of a dtype that reaches a GPU's ``reached_flops_per_s``.
    ``place`` names the cluster a row was measured in, nothing where the GPU says it all.
    ``weight`` is its share of a CPU's sweep beside the other families': those of many kinds of ops
    need more points; ``gpu_weight`` its share of the time of a GPU's, larger where iterations
    spend more.
    """

    name: str
    params: type[Any]
    sweep: Callable[[], Iterator[Any]]
    build: Callable[[Any, str], Workload]
    flops: Callable[[Any], Any]
    bytes_moved: Callable[[Any], Any]
    features: Callable[[Any, Gpu], dict[str, Any]]
    answers: Mapping[str, Callable[[OpCall], Any]]
    floor_us: Callable[[Any, Gpu], Any] | None = None
    rate: Callable[[Any, Gpu], Any] | None = None
    ranks: int = 1
    on_demand: bool = False
    curve: Sequence[Part] = ()
    along: tuple[str, ...] = ()
    ends: tuple[float, float] = (0.0, np.inf)
    alike: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tiled: bool = False
    large: Callable[[str], Any] | None = None
    place: Callable[[Any], Any] | None = None
    weight: float = 1.0
    gpu_weight: float = 0.2


def autograd_call(leaves: int, device: str) -> Callable[[], object]:
    """A backward that does next to nothing: what ``torch.autograd.grad`` itself costs."""
    import torch  # lazy: formulas must import where torch is absent

    inputs = [torch.ones(1, device=device, requires_grad=True) for _ in range(leaves)]
    outputs = [x.view(1) for x in inputs]
    gradients = [torch.ones(1, device=device) for _ in inputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def itemsize_bytes(dtype: Any) -> Any:
    """Bytes per element of a dtype name, or of an array of names."""
    if isinstance(dtype, str):
        return ITEMSIZE_BYTES[dtype]
    return np.fromiter(map(ITEMSIZE_BYTES.__getitem__, dtype), np.int64, len(dtype))


def is_any(op: Any, names: Collection[str]) -> Any:
    """Whether a name, or each of an array of names, is one of these."""
    if isinstance(op, str):
        return op in names
    return np.fromiter(map(frozenset(names).__contains__, op), bool, len(op))


def torch_dtype(name: str) -> Any:
    """The torch dtype behind our name; tf32 is stored as fp32."""
    import torch  # lazy: formulas must import where torch is absent

    return {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "tf32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8": torch.float8_e4m3fn,
        "int64": torch.int64,
        "int32": torch.int32,
        "bool": torch.bool,
    }[name]


def repeated(draw: Callable[..., Any], shape: tuple[int, ...], device: str) -> Any:
    """Random numbers of a torch function, 65,536 of them over and over.

    Drawing all of a large tensor takes longer than timing an op on it.
    """
    numel = math.prod(shape)
    if numel <= DRAWN:
        return draw(shape, device=device)
    return draw(DRAWN, device=device).repeat(-(-numel // DRAWN))[:numel].reshape(shape)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    """An integer drawn log-uniformly from [low, high]."""
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
