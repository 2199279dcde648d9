"""Finds which weights tensor parallelism cuts, and how, by following data from product to product.

A linear layer whose result reaches another one without a norm of the whole width or a residual sum
between them is cut by columns (its outputs), the other one by rows (its inputs), as in Megatron-LM
(arXiv:1909.08053). Calls between the two work on a shard of the heads or columns: attention,
activations, norms of each head. Of an adapter B A x beside a layer (LoRA) only the factor is cut
that meets the layer's cut: B by columns beside columns, A by rows beside rows, as in Megatron-LM's
and torch's examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.compose.graph.rewrite import with_tensors
from itercast.microbench.ops.matrix.gemm import GROUPED

LINEAR_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
EXPERT_PRODUCTS = ("aten.bmm.default", GROUPED)
COPIES = ("_to_copy", "clone", "native_dropout", "mul")  # between the products of an adapter
CHOICES = ("topk", "sort", "argmax", "max")  # after these come indices, not data
DTYPE_CAST = "aten._to_copy.default"
NORMS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "mean", "_log_softmax")


def weight_copies(capture: StepCapture) -> dict[int, int]:
    """Storages of autocast's copies of weights, each with the weight's."""
    weights = {p.storage for p in capture.parameters}
    return {
        c.outputs[0].storage: c.args[0].storage
        for c in capture.calls
        if c.op == DTYPE_CAST and c.args[0].storage in weights
    }


def alias_weight_casts(capture: StepCapture) -> StepCapture:
    """Gives autocast's copy of a weight the storage of the weight, so that both count as one."""
    weight_of = weight_copies(capture)
    if not weight_of:
        return capture

    def aliased(call: OpCall) -> OpCall:
        copies = [t for t in call.touched if t.storage in weight_of]
        return with_tensors(call, {t: replace(t, storage=weight_of[t.storage]) for t in copies})

    return replace(capture, calls=tuple(map(aliased, capture.calls)))


def weight_roles(capture: StepCapture, *, experts: bool = True) -> dict[int, str]:
    """Returns the storages of weights to cut, each with "column", "row" or "vocabulary".

    ``experts``: stacked weights of experts (experts, in, out) are cut too.
    """
    weights = {p.storage for p in capture.parameters if len(p.shape) in (2, 3 if experts else 2)}
    roles: dict[int, str] = {}
    forward = [c for c in capture.calls if c.phase in ("forward", "loss")]
    adapters = list(find_adapters(forward, weights))
    forward = without_adapters(forward, adapters)
    written = {t.storage for c in forward for t in c.outputs}
    for i, call in enumerate(forward):
        weight = _weight(call, weights)
        if weight is None or roles.get(weight.storage) == "row":
            continue
        partner = _partner(forward[i + 1 :], call.outputs[0], weights, written)
        if partner == "loss":
            roles[weight.storage] = "vocabulary"
        elif isinstance(partner, int) and partner not in roles:
            roles[weight.storage] = "column"
            roles[partner] = "row"
        elif isinstance(partner, int) and roles[partner] == "row":
            roles[weight.storage] = "column"
    head_shapes = {p.shape for p in capture.parameters if roles.get(p.storage) == "vocabulary"}
    shapes = {p.storage: p.shape for p in capture.parameters if not p.local}
    looked_up = [c.args[0].storage for c in forward if c.op == "aten.embedding.default"]
    tables = [s for s in looked_up if shapes.get(s) in head_shapes]
    if tables and not any(s in roles for s in tables):  # no head is tied to one of them
        roles[tables[0]] = "vocabulary"  # others, of positions, may have its shape
    for adapter in adapters:
        if role := roles.get(adapter.base):
            roles[adapter.down if role == "row" else adapter.up] = role
    return roles


def _weight(call: OpCall, weights: set[int]) -> TensorSpec | None:
    """The weight of a linear layer or of experts, a product's second factor; else None."""
    if call.op not in (*LINEAR_PRODUCTS, *EXPERT_PRODUCTS):
        return None
    second: TensorSpec = call.args[1] if call.op in EXPERT_PRODUCTS else call.args[-1]
    return second if second.storage in weights else None


def _partner(
    calls: Sequence[OpCall], start: TensorSpec, weights: set[int], made: set[int]
) -> int | str | None:
    """Follows the data computed from ``start`` and returns what they reach first.

    - A weight that multiplies them: its storage.
    - The loss, or the end of the step: "loss". Language model heads are cut by vocabulary with and
      without a loss, as in Megatron-LM.
    - A residual sum, a choice of experts, a norm that is not of each head, or a product of a whole
      tensor with itself, which sums over columns (the interaction of a DLRM's features): None.
      Queries and keys that one layer made are parts of a tensor.

    Passed over are norms of each head and sums before a softmax (mask or bias of attention).
    """
    derived = {start.storage: start.numel}
    for i, call in enumerate(calls):
        tensors = call.tensors()
        inputs = [t for t in tensors if t.storage in derived]
        if not inputs:
            continue
        weight = _weight(call, weights)
        if weight is not None:
            return weight.storage
        name = call.op.split(".")[1]
        if name == "_log_softmax":
            return "loss"
        others = [t for t in tensors if t.storage in made and t.storage not in derived]
        residual = name in ("add", "add_") and any(t.numel == inputs[0].numel for t in others)
        if name in CHOICES or (residual and not _is_softmaxed(call, calls[i + 1 :])):
            return None
        if name == "bmm" and _is_square(call, derived):
            return None
        if name in NORMS and not _by_head(inputs[0], start):
            return None
        derived |= {t.storage: max(t.numel, derived.get(t.storage, 0)) for t in call.outputs}
    return "loss"


def _is_square(product: OpCall, sizes: dict[int, int]) -> bool:
    """Whether a product is of a whole tensor with itself; ``sizes``: elements by storage."""
    a, b = product.tensors()[:2]
    is_same = a.storage == b.storage and a.numel == b.numel
    return is_same and a.numel == sizes.get(a.storage)


def _by_head(normed: TensorSpec, start: TensorSpec) -> bool:
    """Whether a norm is of each head: over fewer columns than there are, with more rows.

    The norm of a latent, to which keys and values are compressed, has fewer columns but not more
    rows.
    """
    fewer = normed.shape[-1] < start.shape[-1]
    return fewer and normed.numel * start.shape[-1] > start.numel * normed.shape[-1]


def _is_softmaxed(call: OpCall, later: Sequence[OpCall]) -> bool:
    """Whether a sum is of attention scores: only masks and casts come before a softmax of it."""
    storage = call.outputs[0].storage
    for user in later:
        if not any(t.storage == storage for t in user.tensors()):
            continue
        name = user.op.split(".")[1]
        if name not in ("add", "add_", "_to_copy", "masked_fill", "where", "maximum", "clone"):
            return name == "_softmax"
        storage = user.outputs[0].storage
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Weights of an adapted layer and of its adapter, by storage.

    ``calls``: numbers of the adapter's two products, and of the sum, which reads ``result`` of W.
    """

    base: int
    down: int  # A
    up: int  # B
    calls: tuple[int, int, int]
    result: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A linear layer's product: index of its call, storage of its weight, its result."""

    number: int
    read: int  # storage of what it multiplies, before casts
    weight: int
    made: TensorSpec


def find_adapters(calls: Sequence[OpCall], weights: set[int]) -> Iterator[Adapter]:
    """Yields the adapters among the calls of a forward pass: sums W x + B (A x), A x narrow."""
    makers = {t.storage: c for c in calls for t in c.outputs}
    products = {
        c.outputs[0].storage: _Product(
            number=i, read=_root(c.args[-2], makers), weight=c.args[-1].storage, made=c.outputs[0]
        )
        for i, c in enumerate(calls)
        if c.op in LINEAR_PRODUCTS and c.args[-1].storage in weights
    }
    for i, call in enumerate(calls):
        terms = call.tensors()
        if call.op.split(".")[1] not in ("add", "add_") or len(terms) != 2:
            continue
        for result, of_adapter in (terms, terms[::-1]):
            base, up = (products.get(_root(t, makers)) for t in (result, of_adapter))
            down = products.get(up.read) if up is not None else None
            if base is None or up is None or down is None or base.read != down.read:
                continue
            inputs = calls[down.number].args[-2].shape[-1]
            if down.made.shape[-1] < min(up.made.shape[-1], inputs):
                yield Adapter(
                    base=base.weight,
                    down=down.weight,
                    up=up.weight,
                    calls=(down.number, up.number, i),
                    result=result,
                )


def without_adapters(calls: Sequence[OpCall], adapters: Sequence[Adapter]) -> list[OpCall]:
    """The calls without the adapters' two products; the sums read the layers' results instead."""
    gone = {i for x in adapters for i in x.calls[:2]}
    sums = {x.calls[2]: x.result for x in adapters}
    return [
        replace(call, args=(sums[i],)) if i in sums else call
        for i, call in enumerate(calls)
        if i not in gone
    ]


def _root(t: TensorSpec, makers: dict[int, OpCall]) -> int:
    """The storage of which ``t`` is a copy, scaled or in another dtype."""
    storage = t.storage
    while (call := makers.get(storage)) is not None and call.op.split(".")[1] in COPIES:
        source = call.tensors()[0].storage
        if source == storage:
            break
        storage = source
    return storage
