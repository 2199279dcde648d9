"""Checkpoints of layers: in backward they run forward again, but for results that are saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from itercast.capture.opcall import Places, layer_key
from itercast.microbench.store import Facts, Row

SDPA = "itercast.sdpa"


def numbered_layers(model: Any) -> list[Any]:
    """Numbered layers: members of the outermost module lists, in order."""
    keys = dict.fromkeys(layer_key(name) for name, _ in model.named_parameters())
    return [model.get_submodule(key) for key in keys if key]


def checkpoint_layers(model: Any, kept: Sequence[Places] = ()) -> None:
    """Checkpoint each numbered layer: its forward pass runs again in backward.

    ``kept``: for each layer the ops whose results are saved instead (``selective_context``); the
    layers after the last one given save none.
    """
    from torch.utils.checkpoint import checkpoint  # lazy: plans are parsed without torch

    layers = numbered_layers(model)
    for layer, names in zip(layers, [*kept, *[()] * len(layers)], strict=False):
        options = {"context_fn": selective_context(names)} if names else {}
        layer.forward = _checkpointed(checkpoint, layer.forward, options)


def _checkpointed(checkpoint: Any, forward: Callable[..., Any], options: Row) -> Callable[..., Any]:
    def run(*args: object, **kwargs: object) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def selective_context(kept: Places) -> Callable[[], Any]:
    """The ``context_fn`` of torch.utils.checkpoint that saves the results of these ops.

    Each is the name of an op, as ``aten.mm.default``, and how many calls of it come before;
    ``itercast.sdpa`` is whichever kernel of scaled_dot_product_attention runs.
    """
    from torch.utils import checkpoint  # lazy, as above

    wanted, policies = set(kept), checkpoint.CheckpointPolicy

    def contexts() -> Any:
        seen: Counter[tuple[str, bool]] = Counter()

        def policy(context: Any, op: object, *args: object, **kwargs: object) -> Any:
            name = SDPA if "scaled_dot_product" in str(op) else str(op)
            place = seen[name, context.is_recompute]
            seen[name, context.is_recompute] += 1
            found = (name, place) in wanted
            return policies.MUST_SAVE if found else policies.PREFER_RECOMPUTE

        return checkpoint.create_selective_checkpoint_contexts(policy)

    return contexts


def places_by_layer(entries: Sequence[Facts]) -> list[Places]:
    """The ops that each layer saves; an entry has those ``kept`` of ``count`` layers in a row."""
    return [
        tuple((str(name), int(place)) for name, place in entry["kept"])
        for entry in entries
        for _ in range(int(entry["count"]))
    ]
