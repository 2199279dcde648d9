"""Messages that are compressed: kernels that encode and decode them, and what is sent instead.

- A share of the bytes (``0.1``): sparse or low-rank, one kernel packs and one unpacks.
- A dtype (``int8``, ``fp8``, ``int4``): numbers in blocks, with a scale each. Codes cannot be
  summed, so that an all_reduce becomes an all_to_all of codes, a kernel that sums them, and an
  all_gather, as in ZeRO++ (arXiv:2306.10209) and Flash Communication (arXiv:2412.04964).
- A cosine transform (``dct:0.25``): each block of numbers is multiplied by the first rows of the
  transform's matrix (JPEG's zonal coding; DeMo, arXiv:2411.19870, transforms in such blocks).
  Coefficients are summed as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from itercast.capture.base.assumptions import assumed
from itercast.capture.opcall import ITEMSIZE_BYTES, OpCall, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import DCT, QUANTISED
from itercast.compose.graph.rewrite import COLLECTIVE, StepBuilder, fresh_storages
from itercast.microbench.ops.memory.fused import CALL

BITS: Mapping[str, int] = assumed(__file__, "bits")
BLOCK, SCALE_BITS = assumed(__file__, "block_and_scale_bits")
DCT_BLOCK: int = assumed(__file__, "dct_block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How a tensor is compressed before it is sent.

    ``kind``: a dtype of QUANTISED, DCT, or "share". ``kept``: of DCT the coefficients of a block of
    DCT_BLOCK numbers, of "share" the share of the bytes.
    """

    kind: str
    kept: float = 1.0

    @classmethod
    def of(cls, text: str) -> Codec | None:
        """The codec that a plan's value names ("int8", "dct:0.25", "0.1"); None for ""."""
        if not text:
            return None
        name, _, share = text.partition(":")
        if name in QUANTISED:
            return cls(kind=name)
        if name == DCT:
            return cls(kind=DCT, kept=max(1, round(float(share) * DCT_BLOCK)))
        return cls(kind="share", kept=float(name))

    @property
    def summable(self) -> bool:
        """Whether the sum of two codes is the code of the sum."""
        return self.kind not in QUANTISED

    def ratio(self, dtype: str) -> float:
        """Bytes of the codes over bytes of the tensor."""
        if self.kind in QUANTISED:
            return float(BITS[self.kind] + SCALE_BITS / BLOCK) / (8 * ITEMSIZE_BYTES[dtype])
        return self.kept / DCT_BLOCK if self.kind == DCT else self.kept

    def coded(self, t: TensorSpec, storage: int, parts: int = 1) -> TensorSpec:
        """The codes of a tensor, or one of ``parts`` of them."""
        numbers = -(-t.numel // parts)
        if self.kind == DCT:
            shape: tuple[int, ...] = (-(-numbers // DCT_BLOCK), int(self.kept))
        else:
            shape = (max(1, round(numbers * self.ratio(t.dtype))),)
        return replace(t, shape=shape, stride=(), storage=storage)

    def encode(self, t: TensorSpec, codes: TensorSpec, phase: str) -> OpCall:
        """The kernel that reads a tensor and writes its codes."""
        return self._kernel(t, codes, t, phase)

    def decode(self, codes: TensorSpec, t: TensorSpec, phase: str) -> OpCall:
        """The kernel that reads codes and writes a tensor, or the sum of its parts."""
        return self._kernel(codes, t, t, phase)

    def _kernel(self, read: TensorSpec, made: TensorSpec, t: TensorSpec, phase: str) -> OpCall:
        """A pass over ``read`` and ``made``; a cosine transform multiplies ``t`` in blocks."""
        if self.kind != DCT:
            facts = {"ops": 2, "numel": max(read.numel, made.numel)}  # scale and round
            return OpCall(op=CALL, args=(read,), kwargs=facts, outputs=(made,), phase=phase)
        encodes, rows = read is t, -(-t.numel // DCT_BLOCK)
        blocks = replace(t, shape=(rows, DCT_BLOCK), stride=())
        shape = (DCT_BLOCK, int(self.kept)) if encodes else (int(self.kept), DCT_BLOCK)
        transform = TensorSpec(shape=shape, dtype=t.dtype, storage=-1)
        factor, product = (blocks, made) if encodes else (read, blocks)
        args = (factor, transform)
        return OpCall(op="aten.mm.default", args=args, outputs=(product,), phase=phase)


def compressed(capture: StepCapture, plan: ParallelPlan) -> StepCapture:
    """Replaces the collectives of tp and ep that the plan compresses."""
    codecs = {"tp": Codec.of(plan.compress_tp), "ep": Codec.of(plan.compress_ep)}
    if not any(codecs.values()):
        return capture
    made, fresh = StepBuilder(capture), fresh_storages(capture)
    for i, call in enumerate(capture.calls):
        axis = call.kwargs["axis"] if call.op == COLLECTIVE else ""
        shape: tuple[int, ...] = call.args[0].shape if axis else ()
        activations = len(shape) > 1 and shape[-1] > 1  # the loss sends a number per token
        codec = codecs.get(axis) if activations else None
        made.calls += [call] if codec is None else _coded(call, codec, getattr(plan, axis), fresh)
        made.done(i)
    return made.step()


def _coded(call: OpCall, codec: Codec, ranks: int, fresh: Iterator[int]) -> Iterator[OpCall]:
    """A collective between the kernels that encode what is sent and decode what arrives.

    Codes that cannot be summed are exchanged (all_to_all), and each rank sums its part. ``ranks``
    take part; ``fresh`` yields unused storages.
    """
    whole, phase, kind = call.args[0], call.phase, call.kwargs["kind"]
    own = call.args[1] if len(call.args) > 1 else whole  # this rank's part, which is gathered
    made = call.outputs[0] if call.outputs else whole  # the result; else in place
    codes, arrived = codec.coded(whole, next(fresh)), codec.coded(whole, next(fresh))
    part = codec.coded(whole, next(fresh), ranks)
    if kind == "all_gather":
        part = codec.coded(own, part.storage, ranks if own is whole else 1)
        yield codec.encode(own, part, phase)
        yield _sent(call, kind, codes, part)
        yield codec.decode(codes, made, phase)
        return
    yield codec.encode(whole, codes, phase)
    if codec.summable or kind == "all_to_all":
        yield _sent(call, kind, codes, arrived)
        yield codec.decode(arrived, made, phase)
        return
    yield _sent(call, "all_to_all", codes, arrived)
    if kind == "reduce_scatter":
        yield codec.decode(arrived, made, phase)
        return
    yield codec.encode(arrived, part, phase)  # sums, and encodes the sum
    yield _sent(call, "all_gather", codes, part)
    yield codec.decode(codes, made, phase)


def _sent(call: OpCall, kind: str, codes: TensorSpec, made: TensorSpec) -> OpCall:
    """The collective of codes, which runs beside no other call."""
    facts = {**call.kwargs, "kind": kind, "overlaps_next": False, "until_read": False}
    return replace(call, args=(codes,), kwargs=facts, outputs=(made,))
