"""Runs some passes of micro-batches and some of a model's equal layers: others repeat these.

A script that accumulates gradients calls its model many times before its optimizer steps. Once two
passes in a row launched the same ops, the model no longer runs: its launches, forward and backward,
are logged again on other memory, while the script's Python around it runs each time. This needs
equal inputs (values count only if the host reads them or a shape depends on them), equal
attributes, and the same gradients to add to. A model with hooks inside runs each time, unless they
are forward hooks that use their arguments alone. Without gradients only forward has to be equal.

Of equal layers the first few run in each step, and the last, which backward comes to first. Hooks
on a layer, and on its parameters, run each time: what DDP and FSDP do. A layer runs each time if
its launches wait for some outside it, or if it has hooks inside.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack

from itercast.capture.programs.backward import Backward, backward_passes
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.reducer import reached
from itercast.capture.programs.repeated.alike import OF_TORCH, Layer, Model, hooked, layers_of
from itercast.capture.programs.repeated.fold import again
from itercast.capture.programs.repeated.forms import (
    Form,
    Given,
    UnlikeError,
    form_of,
    opened,
    unlogged,
)
from itercast.capture.programs.repeated.growing import Growth
from itercast.capture.programs.repeated.holders import content, told, unchanged
from itercast.capture.programs.repeated.passes import (
    Inputs,
    Kind,
    Measured,
    Numbers,
    Repetition,
    stand_in,
)
from itercast.capture.programs.repeated.recordings import LayerPass, ModelPass, next_node, watched
from itercast.capture.programs.repeated.sizes import without_sizes
from itercast.capture.programs.trained.bare import is_wrapper
from itercast.capture.recorder.watch import attribute_values


class Repeats:
    """Watches the models that a program trains, and their layers, and repeats passes of them.

    ``kinds``: what passes were seen to launch, by the id of the model, the library whose hooks it
    has, whether gradients are on, and whether an optimizer has stepped just before. ``layers``: by
    id, the layers of the models that this step ``looked_in``. ``open``: passes whose backward has
    not run. ``kept``: finalizers that free the memory of repeated passes after their backward.
    ``cast``: by id of a module, whether it was repeated without filling autocast's cache of cast
    weights. ``wrapper``: the outermost wrapper (DDP...) that runs; ``inside``: the model that runs.
    """

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.calls = log, log.calls
        self.inside: torch.nn.Module | None = None
        self.kinds = dict[Any, list[Kind]]()
        self.layers, self.looked_in = dict[int, Layer](), set[int]()
        self.open = list[ModelPass]()
        self.kept: list[weakref.finalize[Any, Any]] = []
        self.cast = dict[int, bool]()
        self.wrapper: torch.nn.Module | None = None
        self.updates = dict[int, int]()  # by id of a model: optimizers' steps before its last pass

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch calls of modules, backward passes, and when autocast forgets the weights it cast.

        Where the script fails after a repetition, UnlikeError is raised instead: the caller runs it
        again without repetitions, which may not fail.
        """
        original_call, original_clear = torch.nn.Module._call_impl, torch.clear_autocast_cache

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            """As ``Module.__call__``: models, wrappers and layers run by methods of ours."""
            is_forward = self.log.phase == "forward" and self.log.after_graph is None
            outer = self.inside is None  # not ``not``: some raise in bool()
            if not (is_forward and (outer or id(module) in self._layers())):
                return original_call(module, *args, **kwargs)
            outermost = self._through if is_wrapper(module) else self._run_model
            around = outermost if outer else self._run_layer
            return around(module, partial(original_call, module, *args, **kwargs))

        def clear() -> None:
            self.cast.clear()
            original_clear()

        calls = patch.object(torch.nn.Module, "_call_impl", call)
        casts = patch.object(torch, "clear_autocast_cache", clear)
        with calls, casts, backward_passes(self._backward):
            try:
                yield
            except Exception as exc:
                if self.kept:
                    raise UnlikeError from exc
                raise

    @contextmanager
    def _backward(self, backward: Backward) -> Iterator[None]:
        """Note what a plain ``loss.backward()`` launches for each open pass that it reaches.

        Other calls (``autograd.grad``, or one that retains the graph) are not noted; if a repeated
        forward waits for its backward, they raise UnlikeError, as they cannot be repeated.
        """
        leaves_graph = backward.differentiable or backward.keeps_graph
        is_plain = backward.accumulates and not (backward.inputs or leaves_graph)
        if not is_plain and any(free.alive for free in self.kept):
            raise UnlikeError
        with ExitStack() as stack:
            for ran in self.open if is_plain else ():
                if ran.enter(backward.roots):
                    stack.callback(ran.leave)
            yield
        self.open.clear()

    def _through(self, wrapper: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a wrapper (DDP...), and remember the outermost one while it runs.

        Passes of the model inside are alike only while attributes of that wrapper stay the same.
        """
        before = self.wrapper
        self.wrapper = wrapper if before is None else before  # not ``or``: some raise in bool()
        try:
            return run()
        finally:
            self.wrapper = before

    def _run_model(self, model: Any, run: partial[Any]) -> Any:
        """Run a model; what was seen of its layers in an earlier step is forgotten."""
        if self.calls is not self.log.calls:
            self.calls, self.layers, self.looked_in = self.log.calls, {}, set()
        outermost = model if self.wrapper is None else self.wrapper
        graph, library = torch.is_grad_enabled(), _hooking_library(outermost, model)
        self.log.calls.append(again(int(graph)))
        begins = bool(library) and self.log.updates != self.updates.get(id(model))
        key = id(model), library, graph, begins
        self.updates[id(model)] = self.log.updates
        if not (graph and library):  # what its hooks gather next depends on what ran before
            self.kinds = {k: v for k, v in self.kinds.items() if k[0] != id(model) or not k[1]}
        kinds = self.kinds.setdefault(key, [])
        place = Model(model=model, outermost=outermost, kinds=kinds, library=library)
        self.inside = model
        try:
            if not library:
                return self._run(model, place, run)
            call, args = partial(run.func, model), run.args[1:]
            return self._forward(model, place, call, *args, **run.keywords)
        finally:
            self.inside = None

    def _layers(self) -> dict[int, Layer]:
        """Layers of models, by id; a model's are found when it first runs in a step, unrepeated."""
        if self.inside is not None and id(self.inside) not in self.looked_in:
            self.looked_in.add(id(self.inside))
            self.layers |= layers_of(self.inside)
        return self.layers

    def _run_layer(self, layer: Any, run: Callable[[], Any]) -> Any:
        """Run a layer, which may call itself."""
        place = self.layers.pop(id(layer))
        try:
            return self._run(layer, place, run)
        finally:
            self.layers[id(layer)] = place

    def _run(self, module: Any, place: Layer | Model, run: Callable[[], Any]) -> Any:
        """Run a module with ``_forward``, which may repeat, in place of its forward."""
        own, forward = module.__dict__.get("forward"), module.forward

        def restore() -> None:
            module.__dict__.pop("forward", None)
            if own is not None:
                module.__dict__["forward"] = own

        def run_or_repeat(*args: Any, **kwargs: Any) -> Any:
            restore()
            return self._forward(module, place, forward, *args, **kwargs)

        module.__dict__["forward"] = run_or_repeat
        try:
            return run()
        finally:
            restore()

    def _forward(
        self, module: Any, place: Layer | Model, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Repeat a forward if equal passes showed what it launches, else run it and note that.

        Passes are equal if their modules (``held``), input forms, autocast, modes and stream are. A
        module that cannot be repeated is only run.
        """
        log, run = self.log, partial(forward, *args, **kwargs)
        leaves, structure = opened((args, kwargs))
        forms = [form_of(leaf, log) for leaf in leaves]
        trained = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        graph = torch.is_grad_enabled()
        graph = graph and bool(trained or any(p.requires_grad for p in module.parameters()))
        trained = trained if graph else []
        whole = isinstance(place, Model) and not place.library
        on_gpu = whole or not log.host_memory
        may_repeat = (
            structure and None not in forms and on_gpu and (place.takes(trained) or not graph)
        )
        held = place.held(graph) if may_repeat else None
        if held is None:
            return run()
        held = next((kind.key[0] for kind in place.kinds if kind.key[0] == held), held)
        cast_before = self._cast_before(module, graph)
        casts = [
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")
        ]
        modes = [type(mode) for mode in _get_current_function_mode_stack()]
        gradients = graph, torch.is_inference_mode_enabled()
        around = casts, cast_before, modes, log.stream, bool(log.compiled.running), gradients
        numbers = [form.values for form in forms if isinstance(form, Form)]
        forms = [replace(f, values=None) if isinstance(f, Form) else f for f in forms]
        pattern, sizes = without_sizes(forms)
        kind = _kind(place, (held, structure, pattern, around), sizes, numbers)
        inputs = Inputs(module, (args, kwargs), leaves, trained, numbers, log, graph)
        del leaves  # a pass may free them
        backward_shown = "backward" in kind.shown or not (place.awaits_backward and graph)
        if "forward" in kind.shown and backward_shown:
            self.cast[id(module)] = not cast_before
            repetition = Repetition(log, kind, inputs)
            output = repetition.output()
            self.kept.append(repetition.free)
            return output
        output = self._recorded(kind, inputs, run, place, (args, kwargs))
        expected, launched = kind.expected, kind.last.get("forward")
        if expected and not expected.law.allows(expected, launched):
            raise UnlikeError
        return output

    def _cast_before(self, module: Any, graph: bool) -> bool:
        """Whether autocast's cache holds this module's weights: it ran before in this context.

        A repeated pass logged the casts but did not fill the cache. Without gradients the casts are
        made here, unlogged; with a ``graph`` of gradients it is too late: UnlikeError.
        """
        casts = torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        if casts and self.cast.get(id(module)):
            if graph:
                raise UnlikeError
            with unlogged(self.log):
                for parameter in module.parameters():
                    torch.matmul(parameter, parameter.mT if parameter.dim() > 1 else parameter)
        before = casts and id(module) in self.cast
        self.cast[id(module)] = False
        return before

    def _recorded(
        self,
        kind: Kind,
        inputs: Inputs,
        run: Callable[[], Any],
        place: Layer | Model,
        given: Any,
    ) -> Any:
        """Run a forward and note what it launches, if it can be repeated.

        It cannot be if it drew random numbers, returned tensors that were there before or that a
        message is still filling, changed its layer or inputs (except ``holders``), or if other code
        watches the model's autograd graph.
        """
        log, drawn, networks = self.log, random.getstate(), len(self.log.networks)
        read = log.routing.numbers_read
        names = Numbers.names(log, inputs)
        graph, known = kind.key[-1][-1][0], [*map(id, inputs.holders)]
        before = [told(held, known) for held in (given, *map(content, inputs.holders))]
        were, inputs.kept = [weakref.ref(t) for t in inputs.kept], inputs.kept if graph else []
        measured, first_node = Measured(log), next_node()
        output = run()
        calls = [names.call(call) for call in log.calls[measured.start :]]
        changes = [
            (at, content(holder))
            for at, holder in enumerate(inputs.holders)
            if not unchanged(before[at + 1], content(holder), known)
        ]
        leaves, structure = opened((output, changes), known)
        same = [*(() if graph else (t() for t in were)), *inputs.holders]
        places = {id(one): Given(at) for at, one in enumerate(same) if one is not None}
        forms = [places.get(id(leaf)) or form_of(leaf, log) for leaf in leaves]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and id(x) not in places]
        storages = list(map(log.storage, tensors)) if None not in forms else []
        reaches = reached(tensors) if isinstance(place, Model) else {}
        kind.reaches = {  # but for what the pass itself made of its inputs
            number: leaf
            for number, leaf in reaches.items()
            if isinstance(leaf, torch.nn.Parameter) or log.storage(leaf) not in inputs.storages
        }
        results = forms, structure, list(kind.reaches)
        forward = measured.launched(calls, results, list(map(names.of, storages)))
        are_new = len({*storages}) == len(storages) and all(n >= names.since[0] for n in storages)
        drew_nothing = random.getstate() == drawn and len(log.networks) == networks
        arrived = log.arrives.keys().isdisjoint(storages)
        has_numbers = any(isinstance(form, Form) and form.values is not None for form in forms)
        if read < log.routing.numbers_read or has_numbers:
            kind.reads(inputs.numbers)
        trained = [t for t in tensors if t.grad_fn is not None]
        if not (storages and are_new and drew_nothing and arrived and forward.can_repeat()):
            return output
        if not unchanged(before[0], given, known):
            return output
        is_same = isinstance(place, Model) or place.held() == kind.key[0]
        if not graph:
            if is_same and not any(t.requires_grad for t in tensors):
                kind.note("forward", forward)
                if forward == kind.expected:
                    log.calls[measured.start :] = [stand_in(kind.expected, inputs, storages, log)]
                if isinstance(place, Model) and not (kind.growth or kind.expected):
                    alike = [k for k in place.kinds if k.key == kind.key]
                    kind.growth = Growth.of(alike, kind, attribute_values(place.model))
        elif isinstance(place, Model) and trained and (place.library or not watched(log, trained)):
            self.open.append(ModelPass(log, kind, forward, names))
            self.open[-1].watch(place, tensors, first_node)
        elif isinstance(place, Layer) and len(trained) == 1 and is_same:
            LayerPass(log, kind, forward, names).watch(inputs, trained[0], first_node)
        return output


def _hooking_library(wrapper: Any, model: torch.nn.Module) -> str:
    """The package of a wrapper with a ``backward`` of its own and all hooks inside; else ""."""
    package, modules = type(wrapper).__module__.split(".")[0], list(model.modules())
    all_hooks = hooked(modules) and not hooked(modules, (package, *OF_TORCH))
    return package if "backward" in vars(wrapper) and all_hooks else ""


def _kind(place: Layer | Model, key: Any, sizes: list[int], numbers: Sequence[Any]) -> Kind:
    """The entry for passes with this key and sizes, and these numbers if such passes read any.

    Where earlier passes show a law of sizes, a new entry has as ``expected`` what the law says, if
    the pass runs to confirm it, else as ``shown``. Entries of a model with other attributes (first
    in the key) are dropped: ids are valid only while objects live.
    """
    kinds: list[Kind] = place.kinds
    grows = isinstance(place, Model)
    alike = [kind for kind in kinds if (grows or kind.sizes == sizes) and kind.key == key]
    found = [k for k in alike if k.sizes == sizes and k.numbers in (None, numbers)]
    kind = [*found, Kind(key=key, sizes=sizes)][0]
    laws = [k.growth.launched(sizes, numbers) for k in alike if k.growth and not kind.shown]
    kind.expected = next(filter(None, laws[::-1]), None)
    if launched := kind.expected:
        if not launched.law.confirms(launched.number):
            return Kind(key=key, sizes=sizes, shown={"forward": launched})
        kind.expected = replace(launched, calls=launched.law.launches(launched.number))
    kinds += [] if found else [kind]
    if grows:
        kinds[:] = [kind for kind in kinds if kind.key[0][0] == key[0][0]]
    return kind
