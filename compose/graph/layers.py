"""Cuts a captured step into layers, the units of pipelines, sharding and folding.

A layer is the module behind the first number in a parameter's name (``blocks.3``); calls before and
after those are the layers "first" and "last". Cuts are placed where the fewest bytes cross, so that
a transformer block starts after the residual sum. Equal layers in a row are folded into one with a
``count``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from itercast.capture.opcall import (
    ITEMSIZE_BYTES,
    OpCall,
    ParamSpec,
    StepCapture,
    TensorSpec,
)
from itercast.compose.graph.lifetimes import (
    NO_RISE,
    Lifetime,
    MemoryRise,
    PhaseEdges,
    crossing_bytes,
    held_lives,
    lives_of,
    memory_rise,
    node_ends,
)
from itercast.compose.graph.rewrite import COLLECTIVE


@dataclass(frozen=True, kw_only=True)
class Layer:
    """``count`` equal layers in a row; ranges of calls and bytes are those of one of them.

    ``forward`` and ``backward`` are half-open ranges of the step's calls; ``ready_after`` of the
    parameters counts from the start of ``backward``. ``saved_bytes`` are made in forward and read
    in backward. ``output_bytes`` of its results cross to the next layer's forward, and so do
    ``passed_bytes`` of earlier layers' results. ``within_forward`` and ``within_backward`` are
    memory above that at the start of the pass, without gradients of parameters; ``peak_bytes`` is
    the peak of backward with them.
    """

    name: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    parameters: tuple[ParamSpec, ...]
    saved_bytes: int
    output_bytes: int
    passed_bytes: int = 0
    within_forward: MemoryRise = NO_RISE
    within_backward: MemoryRise = NO_RISE
    peak_bytes: int = 0
    from_inputs: bool = False  # its weights meet no result of an earlier layer
    count: int = 1

    @property
    def numbered(self) -> bool:
        """Whether it is one of a list of modules: those FSDP shards and checkpoints wrap."""
        return self.name not in ("first", "last")

    @cached_property
    def dense(self) -> Layer:
        """The layer without the parameters that ep spreads."""
        kept = tuple(p for p in self.parameters if not p.spread)
        return self if len(kept) == len(self.parameters) else replace(self, parameters=kept)

    @cached_property
    def experts(self) -> Layer:
        """The layer with the parameters alone that ep spreads."""
        return replace(self, parameters=tuple(p for p in self.parameters if p.spread))

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of one layer's parameters."""
        return sum(p.nbytes for p in self.parameters)

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of one layer's gradients."""
        return sum(p.nbytes for p in self.trained)

    @cached_property
    def trained(self) -> tuple[ParamSpec, ...]:
        """One layer's parameters with a gradient."""
        return tuple(p for p in self.parameters if p.ready_after >= 0)

    @cached_property
    def replicated(self) -> tuple[ParamSpec, ...]:
        """One layer's parameters that other replicas have too: all but shards of tables."""
        return tuple(p for p in self.parameters if not p.local)

    def padded_bytes(self, ranks: int, *, trained: bool) -> int:
        """Bytes of a layer's parameters if each of ``ranks`` holds whole rows of each (padded).

        FSDP2 cuts the first dimension, and pads it where it does not divide. Stacked experts that
        are fewer than the ranks are cut in the next dimension, as torchtitan does. ``trained``:
        count only parameters with a gradient.
        """
        if (ranks, trained) not in self._padded_bytes:
            padded = 0
            for nbytes, length, second in self._trained_rows if trained else self._replicated_rows:
                rows = second if second and length < ranks else length
                padded += nbytes // rows * (-(-rows // ranks) * ranks) if rows else 0
            self._padded_bytes[ranks, trained] = padded
        return self._padded_bytes[ranks, trained]

    @cached_property
    def _padded_bytes(self) -> dict[tuple[int, bool], int]:
        """Results of ``padded_bytes``: plans ask for few of them, but often."""
        return {}

    @cached_property
    def _trained_rows(self) -> list[tuple[int, int, int]]:
        return _rows(self.trained)

    @cached_property
    def _replicated_rows(self) -> list[tuple[int, int, int]]:
        return _rows(self.replicated)

    @cached_property
    def trained_numel(self) -> int:
        """Elements of one layer's gradients."""
        return sum(p.nbytes // ITEMSIZE_BYTES[p.dtype] for p in self.trained)


def is_expert(parameter: ParamSpec) -> bool:
    """Whether a parameter has the shape of a block's stacked experts: (experts, in, out)."""
    return len(parameter.shape) == 3 and parameter.layer != ""


def _rows(parameters: Sequence[ParamSpec]) -> list[tuple[int, int, int]]:
    """(bytes, first dimension, second dimension of stacked experts or 0) of each parameter."""
    return [(p.nbytes, (p.shape or (1,))[0], p.shape[1] if is_expert(p) else 0) for p in parameters]


def split_layers(
    capture: StepCapture, instead: Mapping[int, TensorSpec] = MappingProxyType({})
) -> list[Layer]:
    """Returns the step's layers in forward order, equal neighbours folded; at least one.

    ``capture.repeats`` counts, by prefix of their names, the layers that the capture left out.
    ``instead``: what backward holds in place of a forward's result (``lifetimes.read_instead``).
    """
    calls = capture.calls
    edges = _phase_edges(calls)
    starts = _forward_starts(capture, edges)
    names = [name for name, _ in starts]
    by_storage = lives_of(capture, edges)
    lives = list(by_storage.values())
    forward_cuts = _forward_cuts(capture, starts, lives, edges)
    owners = _owners(capture, names, forward_cuts)
    backward_cuts = _backward_cuts(owners, lives, edges)
    ends = {i: end for cut in backward_cuts for i, end in node_ends(calls, cut).items()}
    held = held_lives(capture, by_storage, ends, instead)
    results = _results(capture, edges)
    layers, passable = [], [v for s, v in by_storage.items() if s in results]
    for i, name in enumerate(names):
        forward, backward = forward_cuts[i : i + 2], backward_cuts[i]
        last = max(0, backward[1] - backward[0] - 1)  # index of the last call, from the first
        parameters = tuple(
            replace(p, ready_after=min(max(p.ready_after - backward[0], 0), last))
            if p.ready_after >= 0
            else p
            for p in owners[i]
        )
        layer = Layer(
            name=name,
            forward=(forward[0], forward[1]),
            backward=backward,
            parameters=parameters,
            saved_bytes=0,
            output_bytes=0,
            passed_bytes=sum(
                v.nbytes for v in passable if v.first < forward[0] and v.last_forward >= forward[1]
            ),
            from_inputs=_reads_inputs_only(
                calls[edges.forward : forward[0]], calls[slice(*forward)], parameters
            ),
        )
        layers.append(_with_bytes(layer, held, edges))
    return _folded(layers, capture)


def _reads_inputs_only(
    earlier: Sequence[OpCall], own: Sequence[OpCall], parameters: Sequence[ParamSpec]
) -> bool:
    """Whether the ops of a layer that use its weights read no floats that an earlier layer wrote.

    ``earlier``, ``own``: calls of earlier layers and of this one. What is computed from weights
    counts as weights. False for a layer without weights.
    """
    written = {t.storage for c in earlier for t in c.outputs if t.dtype.startswith(("fp", "bf"))}
    of_weights = {p.storage for p in parameters}
    for call in own:
        read = {t.storage for t in call.tensors()}
        if read & of_weights:
            if read & written:
                return False
            of_weights |= {t.storage for t in call.outputs}
    return bool(parameters)


def _results(capture: StepCapture, edges: PhaseEdges) -> set[int]:
    """Storages that forward computes from weights and inputs together, or receives.

    What depends on weights alone (casts) or inputs alone (masks) each pipeline stage makes itself.
    """
    of_weights, results = {p.storage for p in capture.parameters}, set[int]()
    for call in capture.calls[edges.forward : edges.backward]:
        read = {t.storage for t in call.tensors()}
        written = {t.storage for t in call.outputs}
        if read and read <= of_weights:
            of_weights |= written
        elif read & (of_weights | results) or call.op == COLLECTIVE:
            results |= written
    return results


def _phase_edges(calls: Sequence[OpCall]) -> PhaseEdges:
    """Where the phases of a step begin; where one is missing, the number of calls."""
    phases = [c.phase for c in calls]
    first = next((i for i, p in enumerate(phases) if p != "zero_grad"), len(phases))
    turn = next((i for i, p in enumerate(phases) if p in ("backward", "optimizer")), len(phases))
    end = next((i for i, p in enumerate(phases) if p == "optimizer"), len(phases))
    return PhaseEdges(forward=first, backward=turn, optimizer=end)


def _forward_starts(capture: StepCapture, edges: PhaseEdges) -> list[tuple[str, int]]:
    """Returns (layer, first call that uses one of its parameters), in order of use."""
    layer_of = {p.storage: p.layer for p in capture.parameters}
    uses = [
        (i, layer_of[t.storage])
        for i in range(edges.forward, edges.backward)
        for t in capture.calls[i].tensors()
        if t.storage in layer_of
    ]
    last_numbered = max((i for i, layer in uses if layer), default=-1)
    starts = [("first", edges.forward)]
    seen = {""}
    for i, layer in uses:
        if layer not in seen:
            seen.add(layer)
            starts.append((layer, i))
        elif not layer and i > last_numbered >= 0:
            starts.append(("last", i))
            break
    return starts


def _forward_cuts(
    capture: StepCapture,
    starts: Sequence[tuple[str, int]],
    lives: Sequence[Lifetime],
    edges: PhaseEdges,
) -> list[int]:
    """Returns the first call of each layer's forward, and the end of the last layer's.

    A layer begins where the fewest bytes cross, after the last use of any weight before its own.
    """
    storages = {p.storage for p in capture.parameters}
    spans = [(v.first, v.last_forward, v.nbytes) for v in lives if v.last_forward >= 0]
    crossing = crossing_bytes(spans, len(capture.calls))
    cuts = [edges.forward]
    for _, first_use in starts[1:]:
        low = cuts[-1]
        for i in range(first_use - 1, low - 1, -1):
            if any(t.storage in storages for t in capture.calls[i].tensors()):
                low = i + 1
                break
        cuts.append(min(range(low, first_use + 1), key=lambda i: (crossing[i], i)))
    return [*cuts, edges.backward]


def _owners(
    capture: StepCapture, names: Sequence[str], cuts: Sequence[int]
) -> list[list[ParamSpec]]:
    """Returns each layer's parameters: by name, else by the layer that uses them first."""
    index = {name: i for i, name in enumerate(names)}
    used: dict[int, int] = {}
    for i in range(len(names)):
        for call in capture.calls[cuts[i] : cuts[i + 1]]:
            for t in call.tensors():
                used.setdefault(t.storage, i)
    owners: list[list[ParamSpec]] = [[] for _ in names]
    for p in capture.parameters:
        owners[index.get(p.layer, used.get(p.storage, 0))].append(p)
    return owners


def _backward_cuts(
    owners: Sequence[Sequence[ParamSpec]], lives: Sequence[Lifetime], edges: PhaseEdges
) -> list[tuple[int, int]]:
    """Returns each layer's range of backward calls; layers run backward from the last one.

    A range ends where the fewest bytes cross, after the gradients of the layer's own parameters
    are ready and before the first one of earlier layers is.
    """
    begin, end = edges.backward, edges.optimizer
    spans = [(v.first, min(v.last, end), v.nbytes) for v in lives if v.first >= begin]
    crossing = crossing_bytes(spans, end + 1)
    ranges = [(end, end)] * len(owners)
    start = begin
    for i in range(len(owners) - 1, 0, -1):
        ready = [p.ready_after for p in owners[i] if p.ready_after >= begin]
        low = max([start, *(r + 1 for r in ready)])
        earlier = [p.ready_after for o in owners[:i] for p in o if p.ready_after >= begin]
        high = max(low, min([end, *earlier]))
        cut = min(range(low, high + 1), key=lambda i: (crossing[i], i))
        ranges[i] = (start, cut)
        start = cut
    ranges[0] = (start, end)
    return ranges


def _with_bytes(layer: Layer, lives: Sequence[Lifetime], edges: PhaseEdges) -> Layer:
    """The layer with its bytes, from the lifetimes of what the step makes."""
    begin, end = layer.forward
    made = [v for v in lives if begin <= v.first < end]
    no_gradients = [v for v in lives if v.first < edges.backward or v.last < edges.optimizer]
    spans = [(v.first, v.last, v.nbytes) for v in no_gradients]
    if len(no_gradients) < len(lives):
        whole = memory_rise(layer.backward, [(v.first, v.last, v.nbytes) for v in lives])
    else:  # no optimizer reads gradients: they stay from when they are ready
        start = layer.backward[0]
        ready = [(start + p.ready_after, edges.optimizer, p.nbytes) for p in layer.trained]
        whole = memory_rise(layer.backward, [*spans, *ready])
    return replace(
        layer,
        saved_bytes=sum(v.nbytes for v in made if v.last >= edges.backward),
        output_bytes=sum(v.nbytes for v in made if v.last_forward >= end),
        within_forward=memory_rise(layer.forward, spans),
        within_backward=MemoryRise(
            memory_rise(layer.backward, spans).peak, whole.left - layer.trained_bytes
        ),
        peak_bytes=whole.peak,
    )


def _signature(layer: Layer, calls: Sequence[OpCall]) -> tuple[object, ...]:
    """What equal layers have in common: ops, shapes, dtypes, rows looked up, parameters."""
    own_calls = [*calls[slice(*layer.forward)], *calls[slice(*layer.backward)]]
    ops = tuple(
        (
            call.op,
            tuple((t.shape, t.dtype) for t in call.touched),
            tuple(call.kwargs.get("stream", {}).items()),
        )
        for call in own_calls
    )
    return ops, tuple((p.shape, p.dtype) for p in layer.parameters)


def _in_order(layers: Sequence[Layer], capture: StepCapture) -> Sequence[Layer]:
    """The layers of the whole model, in order: a captured layer stands for equal ones of its list.

    ``capture.order`` has, by prefix of a list's names, the captured layer in each place.
    """
    for prefix, order in capture.order.items():
        own = {x.name: x for x in layers if x.name.rpartition(".")[0] == prefix}
        start = next(i for i, layer in enumerate(layers) if layer.name in own)
        after = [layer for layer in layers[start:] if layer.name not in own]
        layers = [*layers[:start], *(own[f"{prefix}.{i}"] for i in order), *after]
    return layers


def _folded(layers: Sequence[Layer], capture: StepCapture) -> list[Layer]:
    """Folds equal neighbours into one with a count; drops layers without calls and parameters.

    Layers that the capture left out of a list are added to the count of its middle captured layer
    (the second of three, the first of two), which they equal.
    """
    layers = _in_order(layers, capture)
    folded: list[Layer] = []
    signatures = {id(x): _signature(x, capture.calls) for x in {id(x): x for x in layers}.values()}
    before: tuple[object, ...] = ()
    prefixes = [layer.name.rpartition(".")[0] for layer in layers]
    for i, (layer, prefix) in enumerate(zip(layers, prefixes, strict=True)):
        middle = prefixes[:i].count(prefix) == (prefixes.count(prefix) - 1) // 2
        more = capture.repeats.get(prefix, 0) if middle else 0
        signature = signatures[id(layer)]
        if folded and signature == before:
            folded[-1] = replace(folded[-1], count=folded[-1].count + 1 + more)
        else:
            folded.append(replace(layer, count=1 + more))
        before = signature
    return [x for x in folded if x.forward[0] != x.forward[1] or x.parameters] or folded
