"""Runs some of a model's equal layers: others of their kind repeat what these launch.

Two layers in a row that launch the same, given the same, show what others launch, on other memory.
The first layers of each kind run in each step, to show it, and so do the last, as backward comes to
them first. Hooks on a layer, and on its parameters, run each time: what DDP and FSDP do. A layer
whose launches wait for some outside it, or that has hooks inside, runs each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten

from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.repeated.alike import Place, places
from itercast.capture.programs.repeated.layer_passes import (
    Again,
    Given,
    Kind,
    Measured,
    Numbers,
    Recording,
)
from itercast.capture.programs.repeated.passes import UnlikeError, form_of


class Layers:
    """Watches the layers of the models that a program trains, and repeats those that are alike."""

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.calls = log, log.calls
        self.places, self.models, self.kinds = dict[int, Place](), set[int](), list[Kind]()
        self.cast = dict[int, bool]()  # whether layers are repeated, since casts were forgotten
        self.repeated = False  # whether any was

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note inside the context when autocast forgets the weights that it cast.

        UnlikeError in place of an error after any layer was repeated: without it may not fail.
        """
        original_clear = torch.clear_autocast_cache

        def clear() -> None:
            self.cast.clear()
            original_clear()

        with patch.object(torch, "clear_autocast_cache", clear):
            try:
                yield
            except Exception as exc:
                if self.repeated:
                    raise UnlikeError from exc
                raise

    def find(self, model: torch.nn.Module) -> None:
        """Find a model's layers; what was found in an earlier step is forgotten."""
        if self.calls is not self.log.calls:
            self.calls = self.log.calls
            self.places, self.models, self.kinds = {}, set(), []
        if id(model) not in self.models:
            self.models.add(id(model))
            self.places |= places(model)

    def run(self, layer: Any, run: Callable[[], Any]) -> Any:
        """Run a layer with ``_forward``, which may repeat, in place of its forward."""
        place, own = self.places.pop(id(layer)), layer.__dict__.get("forward")
        layer.__dict__["forward"] = partial(self._forward, layer, place, layer.forward)
        try:
            return run()
        finally:
            self.places[id(layer)] = place
            layer.__dict__.pop("forward")
            if own is not None:
                layer.__dict__["forward"] = own

    def _forward(self, layer: Any, place: Place, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Repeat a layer's forward if equal layers showed what it launches, else run and note it.

        Layers are equal that hold the same (``place.held``), get inputs of the same forms, and run
        under the same autocast, modes and stream. One that cannot be repeated is only run.
        """
        log, (leaves, structure) = self.log, tree_flatten((args, kwargs))
        run = partial(forward, *args, **kwargs)
        forms = [form_of(leaf, log, trains=True) for leaf in leaves]
        trained = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        has_one_input = None not in forms and len(trained) == 1 and trained[0].grad_fn is not None
        held = place.held() if has_one_input and not log.host_memory else None
        if held is None:
            return run()
        cast_before = self._cast_before(layer)
        casts = [
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
        ]
        modes = [type(mode) for mode in _get_current_function_mode_stack()]
        around = casts, cast_before, modes, log.stream, bool(log.compiled.running)
        kind, given = self._kind((held, structure, forms, around)), Given(layer, leaves, log)
        if "backward" in kind.shown or ("forward" in kind.shown and not place.runs):
            self.cast[id(layer)] = self.repeated = True
            return Again(log, kind, given).output()
        return self._recorded(kind, given, run, place)

    def _cast_before(self, layer: Any) -> bool:
        """Whether autocast still has the cast weights of a layer, since it ran before.

        UnlikeError where the layer was repeated, not run: its weights were not cast then.
        """
        casts = torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        if casts and self.cast.get(id(layer)):
            raise UnlikeError
        before = casts and id(layer) in self.cast
        self.cast[id(layer)] = False
        return before

    def _kind(self, key: Any) -> Kind:
        """The kind of layers with this key; keys can be compared but not hashed."""
        for kind in self.kinds:
            if kind.key == key:
                return kind
        self.kinds.append(Kind(key=key))
        return self.kinds[-1]

    def _recorded(self, kind: Kind, given: Given, run: Callable[[], Any], place: Place) -> Any:
        """Run forward and note what it launches; let ``Recording`` note what backward launches.

        Not if that cannot be repeated: random numbers were drawn, tensors returned that are older
        or still awaited, or the layer changed.
        """
        log, drawn, networks = self.log, random.getstate(), len(self.log.networks)
        names = Numbers.names(log, given)
        measured, first_node = Measured(log), int(torch._C._autograd._get_sequence_nr())
        output = run()
        calls = [names.call(call) for call in log.calls[measured.start :]]
        leaves, structure = tree_flatten(output)
        forms = [form_of(leaf, log, trains=True) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        storages = list(map(log.storage, tensors)) if None not in forms else []
        forward = measured.launched(calls, (forms, structure), list(map(names.of, storages)))
        trained = [t for t in tensors if t.grad_fn is not None] if storages else []
        are_new = len({*storages}) == len(storages) and all(n >= names.since[0] for n in storages)
        drew_nothing = random.getstate() == drawn and len(log.networks) == networks
        stayed_the_same = drew_nothing and place.held() == kind.key[0]
        arrived = log.arrives.keys().isdisjoint(storages)
        if len(trained) == 1 and are_new and stayed_the_same and arrived and forward.can_repeat():
            kind.note("forward", forward)
            Recording(log, kind, forward, names).watch(given, trained[0], first_node)
        return output
