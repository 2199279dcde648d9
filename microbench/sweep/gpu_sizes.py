"""How a point is made larger or smaller: along the axes that batches, sequences and tables grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd, isqrt
from typing import Any, TypeVar, cast

from microbench.ops.lookup.embedding_bag import EmbeddingBag
from microbench.ops.lookup.index import INDEXED
from microbench.ops.lookup.index_calls import IndexOp
from microbench.ops.matrix.attention import Attention
from microbench.ops.matrix.conv import Conv
from microbench.ops.matrix.gemm import Gemm
from microbench.ops.memory.elementwise import Elementwise
from microbench.ops.memory.fused import Fused
from microbench.ops.memory.norm import Norm
from microbench.ops.memory.reduction import Reduction
from microbench.ops.step.optimizer import OptimizerOp

Point = TypeVar("Point")
WHOLE_ROWS = {"grouped_mm": 8, "scaled_mm": 16}  # elements that 16 bytes hold: kernels want those
THIN = 64  # a side of a product up to this stays: one token a sequence, few classes
MAX_SIDE = 2**18  # of a product: tokens of a batch, a vocabulary
MAX_ALIGNMENT = 128
MAX_PIXELS_A_SIDE = 512
MAX_BATCH = 1024
MAX_ROWS = 2**21
MAX_NUMEL = 2**31 - 1
BAGS = (512, 8192)
MAX_POOLING = 128
MAX_ROWS_OF_TABLE = 20_000_000
MAX_LENGTH = 32768  # of a sequence
LENGTHENED: tuple[str, ...] = ("cat", "split_with_sizes_copy", "slice_backward", "slice_scatter")
LENGTHENED += ("narrow_copy", "constant_pad_nd", "flip", "roll")
WIDENED = ("stack", "select_backward", "select_scatter")
STEP_COUNTERS = 4  # elements a tensor: lists of them are the optimizer's counters, not parameters


def aligned(wanted: float, old: int) -> int:
    """A whole number near ``wanted`` that the same power of two divides as ``old``, up to 128.

    Kernels for rows of 8, 16 or 128 elements differ; odd stays odd.
    """
    unit = gcd(old, MAX_ALIGNMENT)
    while unit > 1 and wanted < 4 * unit:
        unit //= 2
    if unit == 1 and old % 2:
        return max(1, 2 * round((wanted - 1) / 2) + 1)
    return max(1, unit * round(wanted / unit))


def spread(p: Point, factor: float, lean: float, limits: Mapping[str, int]) -> Point:
    """The first axis takes factor**lean, the others what is left; none passes its limit."""
    left, changes = factor, {}
    for number, (name, limit) in enumerate(limits.items()):
        old = getattr(p, name)
        share = lean if number + 1 < len(limits) else 1.0
        changes[name] = min(max(limit, old), aligned(old * left**share, old))
        left *= old / changes[name]
    return cast(Point, replace(cast(Any, p), **changes))


def _product(p: Gemm, factor: float, lean: float) -> Gemm:
    """All sides alike, so that proportions stay; of a batch of products, their number first."""
    if p.op == "bmm":
        batch = min(max(4096, p.batch), max(1, round(p.batch * factor**lean)))
        factor *= p.batch / batch
        p = replace(p, batch=batch)
    sides = {side: getattr(p, side) for side in "mnk"}
    wide = [side for side, n in sides.items() if n > THIN] or list(sides)
    step = factor ** (1 / len(wide))
    changed: dict[str, Any] = {s: min(MAX_SIDE, aligned(sides[s] * step, sides[s])) for s in wide}
    if p.op in WHOLE_ROWS:
        unit = WHOLE_ROWS[p.op]
        changed = {s: unit * max(1, round(n / unit)) for s, n in changed.items()}
    return replace(p, **changed)


def _attention(p: Attention, factor: float, lean: float) -> Attention:
    """Sequences, then their lengths; a single query stays one."""
    batch = min(max(MAX_BATCH, p.batch), max(1, round(p.batch * factor**lean)))
    left = factor * p.batch / batch
    if p.q_len == 1:
        return replace(p, batch=batch, kv_len=aligned(p.kv_len * left, p.kv_len))
    most = max(MAX_LENGTH, p.q_len, p.kv_len)
    q_len, kv_len = (min(most, aligned(n * left**0.5, n)) for n in (p.q_len, p.kv_len))
    return replace(p, batch=batch, q_len=q_len, kv_len=kv_len)


def _conv(p: Conv, factor: float, lean: float) -> Conv:
    """Images, then their sides, which stay as large as the kernel."""
    batch = min(max(MAX_BATCH, p.batch), max(1, round(p.batch * factor ** (0.5 + lean / 2))))
    left = factor * p.batch / batch
    flat = p.h == p.kernel_h == 1
    limit = MAX_SIDE // 2 if flat else MAX_PIXELS_A_SIDE

    def side(old: int, kernel: int, padding: int) -> int:
        least = max(1, p.dilation * (kernel - 1) + 1 - 2 * padding, padding + 1)
        wanted = aligned(old * left ** (1.0 if flat else 0.5), old)
        return max(least, min(max(limit, old), wanted))

    h = 1 if flat else side(p.h, p.kernel_h, p.padding_h)
    return replace(p, batch=batch, h=h, w=side(p.w, p.kernel_w, p.padding_w))


def _norm(p: Norm, factor: float, lean: float) -> Norm:
    """Rows of tokens, then their width; samples, then positions."""
    lean = 0.5 + lean / 2
    if p.op.startswith(("layer", "rms")):
        return spread(p, factor, lean, {"rows": MAX_ROWS, "cols": 16384})
    if p.cols == 1:
        found = spread(p, factor, 1.0, {"rows": MAX_SIDE})
    else:
        found = spread(p, factor, lean, {"rows": MAX_BATCH, "cols": MAX_PIXELS_A_SIDE**2})
    return replace(found, rows=max(2, found.rows)) if found.cols == 1 else found


def _elementwise(p: Elementwise, factor: float, lean: float) -> Elementwise:
    """Rows, then their length; strided rows stay a rectangle of rows."""
    if p.form in ("same", "scalar"):
        numel = min(MAX_NUMEL, aligned(p.numel * factor, p.numel))
        return replace(p, numel=numel, inner=numel)
    old = max(1, p.numel // p.inner)
    rows = max(2, round(old * factor ** (0.5 + lean / 2)))
    if p.form == "strided":
        half = max(2, isqrt(rows))
        rows = half * max(2, rows // half)
    left = factor * old / rows
    inner = min(max(MAX_SIDE, p.inner), max(2, aligned(p.inner * left, p.inner)))
    return replace(p, numel=min(MAX_NUMEL // inner, rows) * inner, inner=inner)


def _reduction(p: Reduction, factor: float, lean: float) -> Reduction:
    """Rows, then their length; a whole tensor; a loss that reads one class of each row stays."""
    if p.op in ("nll_loss_forward", "nll_loss2d_forward"):
        return p
    if p.outer == 1 and not p.op.startswith("nll"):
        return spread(p, factor, 1.0, {"size": MAX_NUMEL})
    if p.size == 1:
        return spread(p, factor, 1.0, {"outer": MAX_NUMEL})
    return spread(p, factor, 0.5 + lean / 2, {"outer": MAX_ROWS, "size": MAX_SIDE})


def _embedding_bag(p: EmbeddingBag, factor: float, lean: float) -> EmbeddingBag:
    """Bags, then look-ups a bag, then the width; rows of the table with a dense gradient of it."""
    pooling = max(1, round(p.lookups / p.bags))
    least, most = min(BAGS[0], p.bags), max(BAGS[1], p.bags)
    bags = min(most, max(least, round(p.bags * factor**lean)))
    left = factor * p.bags / bags
    wanted = min(max(MAX_POOLING, pooling), max(1, round(pooling * left)))
    left *= pooling / wanted
    dim = min(256, max(min(16, p.dim), aligned(p.dim * left, p.dim)))
    rows = p.rows
    if p.op == "backward":
        rows = min(MAX_ROWS_OF_TABLE, max(min(1000, p.rows), round(p.rows * factor)))
    return replace(p, bags=bags, lookups=bags * wanted, dim=dim, rows=rows)


def _index(p: IndexOp, factor: float, lean: float) -> IndexOp:
    """Leading axes where there are any; else indices, the joined or cut axis, runs, or rows."""
    if p.outer > 1:
        return spread(p, factor, 1.0, {"outer": MAX_NUMEL})
    if p.op in INDEXED:
        runs = 16384 if p.inner > 1 else 1
        return spread(p, factor, 0.5 + lean / 2, {"size": 2**23, "inner": runs})
    if p.op in LENGTHENED:
        size = max(p.tensors, aligned(p.size * factor, p.size))
        more = p.source - p.size
        more = more if p.op == "constant_pad_nd" else round(more * size / p.size)
        return replace(p, size=size, source=size + more)
    return spread(p, factor, 1.0, {"inner" if p.op in WIDENED else "outer": MAX_NUMEL})


def _optimizer(p: OptimizerOp, factor: float, lean: float) -> OptimizerOp:
    """Parameters of a wider model, as many tensors; step counters stay."""
    if p.numel <= STEP_COUNTERS * p.tensors:
        return p
    return replace(p, numel=max(p.tensors, round(p.numel * factor)))


def _fused(p: Fused, factor: float, lean: float) -> Fused:
    """Elements; bytes of each stay."""
    numel = max(1, round(p.numel * factor))
    inputs, results = p.read_bytes // p.numel, p.written_bytes // p.numel
    return replace(p, numel=numel, read_bytes=inputs * numel, written_bytes=results * numel)


def _along(*limits: tuple[str, int]) -> Callable[[Any, float, float], Any]:
    return lambda p, factor, lean: spread(p, factor, lean, dict(limits))


def _random(p: Any, factor: float, lean: float) -> Any:
    return spread(p, factor, 1.0, {"rows" if p.op == "multinomial" else "size": MAX_NUMEL})


GROWN: dict[str, Callable[[Any, float, float], Any]] = {
    "gemm": _product,
    "attention": _attention,
    "conv": _conv,
    "norm": _norm,
    "elementwise": _elementwise,
    "reduction": _reduction,
    "embedding": _along(("lookups", 2**20), ("dim", 8192), ("rows", 2**18)),
    "embedding_bag": _embedding_bag,
    "pooling": _along(("batch", MAX_BATCH), ("channels", 2048)),
    "index": _index,
    "random": _random,
    "optimizer": _optimizer,
    "recurrent": _along(("batch", MAX_BATCH), ("steps", 512)),
    "fused": _fused,
}


def grown(name: str, p: Any, factor: float, lean: float) -> Any:
    """The point with about ``factor`` times the work, as far as its axes go.

    ``lean`` (0 to 1) says how much of that the first axis takes; the others take the rest.
    """
    return GROWN[name](p, factor, lean) if name in GROWN else p
