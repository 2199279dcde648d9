"""Ops to price, priced ops, and sums of time that rests on assumed numbers.

Names of assumptions are ``module.entry`` of an ``assumptions.yaml``, with a key behind it where the
entry is a table (``host.event_us.launch``), or ``fallbacks.<family>`` where other ops are priced
instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from itercast.capture.opcall import BLOCK_SCALED, PADDABLE, OpCall
from itercast.compose.graph.attention_kernels import has_unequal_widths
from itercast.compose.machines.contention import Slowdowns
from itercast.compose.machines.factors import Factors
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import find_family
from itercast.microbench.ops.family import Family, Part, Point

UNMODELLED = "unmodelled"
AssumedShares = tuple[tuple[str, float], ...]  # name of an assumption, share of a time
# The host waits for a number that it reads, and for shapes (torch.Tag.dynamic_output_shape).
SHAPED_BY_DATA = (
    *("_local_scalar_dense", "bincount", "masked_select", "nonzero", "repeat_interleave"),
    *("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive"),
)


@dataclass
class AssumedTime:
    """A sum of times, and by assumption the part of the sum that rests on it."""

    total_us: float = 0.0
    by_name_us: dict[str, float] = field(default_factory=dict)

    def add_us(self, time_us: float, shares: AssumedShares) -> None:
        """Add a time, and to each assumption its share of it."""
        self.total_us += time_us
        for name, share in shares:
            self.by_name_us[name] = self.by_name_us.get(name, 0.0) + share * time_us

    def add_all(self, other: AssumedTime, times: float = 1.0) -> None:
        """Add all of another sum, ``times`` times."""
        self.total_us += times * other.total_us
        for name, us in other.by_name_us.items():
            self.by_name_us[name] = self.by_name_us.get(name, 0.0) + times * us

    @property
    def shares(self) -> AssumedShares:
        """Each assumption's share of the whole sum."""
        if not self.total_us:
            return ()
        return tuple((name, us / self.total_us) for name, us in self.by_name_us.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One call with its duration; ``family`` is "unmodelled" where no learned model priced it.

    ``call_launches``: host time of its call over that of a pointwise op; it launches ``kernels``
    kernels of equal length.
    ``assumed``: shares of ``duration_us`` that rest on assumptions, by their names. ``leads``: the
    share of the step's host time that comes before it, where a CUDA graph launches all ops.
    ``waits``: the host waits for its end. ``nbytes``: of a message or copy. ``nodes``: among how
    many a message is sent. ``product``: a matrix product, convolution or attention. ``beside``: by
    how much a message and compute slow each other; None: as any two tasks of the device.
    ``hidden_us``: more time that a message takes, beside compute, which is no part of the duration.
    """

    op: str
    family: str
    phase: str
    duration_us: float
    flops: float = 0.0
    kernels: int = 1
    call_launches: float = 1.0
    assumed: AssumedShares = ()
    leads: float = 0.0
    waits: bool = False
    nbytes: float = 0.0
    nodes: int = 1
    product: bool = False
    beside: Slowdowns | None = None
    hidden_us: float = 0.0

    def over(self, n: float) -> PricedOp:
        """The op's mean over n steps, if only every n-th step runs it, such as a message."""
        if n == 1:
            return self
        return replace(self, duration_us=self.duration_us / n, hidden_us=self.hidden_us / n)

    def among(self, size: int, per_node: int, machine: Factors) -> PricedOp:
        """The message scaled by the factor of a machine for links among ``size`` ranks."""
        factor, nodes = machine.of_message(size, per_node), -(-size // per_node)
        if factor == nodes == 1:
            return self
        return replace(self, duration_us=factor * self.duration_us, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priceable:
    """An op to price: its parameters in the family that answers for it, and its tensors' bytes.

    ``cold``: the share of its bytes that no cache holds. ``kernel``: the attention kernel, where
    the step states one; ``unequal``: attention's values are of another width than its queries.
    ``paddable``: a product whose operands inductor pads where that is faster.
    ``channels_last``: images are NHWC in memory. ``waits``: the host waits for its end.
    """

    op: str
    phase: str
    family: Family | None
    params: Point
    bytes_moved: float
    cold: float
    kernel: str = ""
    unequal: bool = False
    paddable: bool = False
    channels_last: bool = False
    waits: bool = False

    @property
    def name(self) -> str:
        """Name of the family that answers for it."""
        return self.family.name if self.family is not None else UNMODELLED

    @property
    def kind(self) -> str:
        """Which of its family's ops it is."""
        return str(getattr(self.params, "op", ""))

    @property
    def call_name(self) -> str:
        """The name under which host times of calls are learned: its calls launch alike."""
        name_of = self.family.call_name if self.family is not None else None
        return str(name_of(self.params)) if name_of is not None else self.kind

    def is_priced_as(self, part: Part) -> bool:
        """Whether a part is the same op of the op's own family, or a checked law for it."""
        by_fp8_rows = getattr(self.params, "dtype", "") in BLOCK_SCALED
        same = part.family == self.name and getattr(part.params, "op", "") == self.kind
        return part.checked or (same and not by_fp8_rows)

    def run_by(self, gpu: Gpu) -> Priceable:
        """The op as a GPU runs it: in fp32 if it has no TF32 units, or no TF32 kernel for it."""
        if getattr(self.params, "dtype", "") != "tf32":
            return self
        without = self.family.without_tf32 if self.family is not None else ()
        if "tf32" in gpu.peak_flops_per_s and gpu.vendor not in without:
            return self
        return replace(self, params=replace(self.params, dtype="fp32"))

    def bytes_on(self, gpu: Gpu) -> float:
        """Bytes read and written: by the family's formula, else every tensor once."""
        if self.family is None:
            return self.bytes_moved
        if self.family.cached_bytes is not None:
            return float(self.family.cached_bytes(self.params, gpu))
        return float(self.family.bytes_moved(self.params))

    def matmul_s(self, gpu: Gpu) -> float:
        """Seconds of its matrix products at the GPU's peak, 0 without any."""
        family = self.family
        flops_of = family and (family.flops if family.matmul else family.product_flops)
        return float(flops_of(self.params)) / gpu.peak(self.params.dtype) if flops_of else 0.0

    def assumed_shares(self, parts: int, other_frac: float) -> AssumedShares:
        """Names the assumption that a share ``other_frac`` of the op's time rests on.

        ``parts``: how many ops price it. 0: the roofline prices it, which rests on an assumed
        overhead; else these may be other ops than its own, a fallback.
        """
        if not parts:
            return (("price_book.roofline_overhead_us", other_frac),)
        return ((f"fallbacks.{self.name}", other_frac),) if other_frac else ()


def priceable(call: OpCall, cold: float = 1.0) -> Priceable:
    """Finds an op call's family and parameters, so that it can be priced.

    ``cold``: the share of its bytes that are read from memory, not from a cache.
    """
    family, params = find_family(call)
    return Priceable(
        op=call.op,
        phase=call.phase,
        family=family,
        params=params,
        bytes_moved=call.touched_bytes,
        cold=cold,
        kernel=str(call.kwargs.get("kernel", "")),
        unequal=has_unequal_widths(call),
        paddable=PADDABLE in call.kwargs,
        channels_last=_channels_last(call),
        waits=_shaped_by_data(call),
    )


def _shaped_by_data(call: OpCall) -> bool:
    """Whether the shape of the result depends on data: also of elements chosen by a mask."""
    indices = call.tensors()[1:] if call.op == "aten.index.Tensor" else ()
    by_mask = any(t.dtype == "bool" for t in indices)
    return by_mask or call.op.removeprefix("aten.").split(".")[0] in SHAPED_BY_DATA


def _channels_last(call: OpCall) -> bool:
    """Whether the images that an op reads are NHWC; one channel is both, and counts as NCHW."""
    images = [t for t in call.tensors() if len(t.shape) == 4 and t.shape[1] > 1 and t.stride]
    return bool(images) and images[0].stride[1] == 1 and not images[0].contiguous
