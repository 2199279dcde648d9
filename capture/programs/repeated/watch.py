"""Runs a model for some of the micro-batches that are alike: others repeat its launches.

A script that accumulates gradients calls its model many times before its optimizer steps. Its
Python runs each time, and so do ops outside the model. What the model launches, forward and
backward, is repeated after two micro-batches in a row that launched the same, while its inputs but
for their values, its attributes, and the gradients that it adds to stay as they were. A model that
sends messages meanwhile runs each time (the last micro-batch under DDP), and so does one with
hooks, whose Python may do anything, but for those of forward that use their arguments alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten

from itercast.capture.programs.backward import Backward, backward_passes
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.reducer import Reducer, edges, reached
from itercast.capture.programs.repeated.alike import hooked
from itercast.capture.programs.repeated.fold import again
from itercast.capture.programs.repeated.layers import Layers
from itercast.capture.programs.repeated.passes import (
    Again,
    Pass,
    UnlikeError,
    form_of,
    storages,
    watched,
)
from itercast.capture.programs.trained.bare import is_wrapper
from itercast.capture.recorder.fake import below_transforms
from itercast.capture.recorder.watch import attributes

ALIKE = 2  # micro-batches in a row that show what the next ones do


class MicroBatches:
    """Watches the models that a program trains, and repeats passes of micro-batches.

    ``known``: by the id of a model its last passes, all alike; ``open``: the one whose backward has
    not run, None for a repetition. ``wrapper``: the outermost wrapper (DDP...) that runs.
    """

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.inside, self.layers = log, False, Layers(log)
        self.wrapper: torch.nn.Module | None = None
        self.known: dict[int, list[Pass]] = {}
        self.open: dict[int, Pass | None] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch calls of modules and backward passes inside the context."""
        run = torch.nn.Module._call_impl

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            """As ``Module.__call__``: models, wrappers and layers run by methods of ours."""
            trains = self.log.phase == "forward" and torch.is_grad_enabled()
            known = not self.inside or id(module) in self.layers.places
            if not (trains and known and self.log.after_graph is None):
                return run(module, *args, **kwargs)
            outermost = self._through if is_wrapper(module) else self._run
            around = self.layers.run if self.inside else outermost
            return around(module, partial(run, module, *args, **kwargs))

        watching = patch.object(torch.nn.Module, "_call_impl", called)
        with watching, self.layers.watched(), backward_passes(self._backward):
            yield

    @contextmanager
    def _backward(self, backward: Backward) -> Iterator[None]:
        """Note what a plain ``loss.backward()`` launches for each open pass that it reaches.

        Any other backward, as of ``autograd.grad``, is not noted; where a repeated pass waits for
        its backward it is an UnlikeError, as it cannot be repeated.
        """
        is_plain = backward.accumulates and not (backward.inputs or backward.differentiable)
        if not is_plain and (None in self.open.values() or self.layers.repeated):
            raise UnlikeError
        with ExitStack() as stack:
            for ran in filter(None, self.open.values() if is_plain else ()):
                if handle := self._begin(ran, backward.roots):
                    stack.callback(self._end, ran)
                    stack.callback(handle.remove)
            yield
        self.open.clear()

    def _through(self, wrapper: torch.nn.Module, run: Callable[[], Any]) -> Any:
        """Run a wrapper, and remember the outermost one while it runs.

        Its attributes have to stay the same for the model's passes to be alike.
        """
        before = self.wrapper
        self.wrapper = wrapper if before is None else before  # not ``or``: some raise in bool()
        try:
            return run()
        finally:
            self.wrapper = before

    def _run(self, model: Any, run: Callable[[], Any]) -> Any:
        """Run a model, with a ``forward`` that may be repeated."""
        own, held = model.__dict__.get("forward"), self._held(model)
        self.layers.find(model)
        self.log.calls.append(again(1))
        self.inside = True
        if held is not None:
            model.__dict__["forward"] = partial(self._forward, model, held, model.forward)
        try:
            return run()
        finally:
            self.inside = False
            model.__dict__.pop("forward", None)
            if own is not None:
                model.__dict__["forward"] = own

    def _held(self, model: Any) -> Any:
        """What has to be equal before passes of a model that are alike; None if none ever are."""
        parameters, inner = list(model.parameters()), list(model.modules())[1:]
        trains = model.training and any(p.requires_grad for p in parameters)
        if not trains or hooked(inner) or any(map(_hooked, parameters)):
            return None
        devices = ("cpu", "cuda")
        casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
        modes = [type(mode) for mode in _get_current_function_mode_stack()]
        outermost = model if self.wrapper is None else self.wrapper
        return attributes(outermost), casts, modes, self.log.stream

    def _forward(self, model: Any, held: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A model's forward, or a repetition of it."""
        leaves, structure = tree_flatten((args, kwargs))
        forms = [form_of(leaf, self.log) for leaf in leaves]
        key, known = (held, _gradients(model), structure, forms), self.known.get(id(model), [])
        run = partial(forward, *args, **kwargs)
        if None in forms or id(model) in self.open:
            self.known[id(model)] = []
            return run()
        if not (known and known[-1].key == key):
            known = self.known[id(model)] = []
        given = storages(leaves, self.log)
        if len(known) < ALIKE:
            return self._recorded(model, key, given, run)
        self.open[id(model)] = None
        return Again(known[-1], given, self.log).output()

    def _recorded(self, model: Any, key: Any, given: list[int], forward: Any) -> Any:
        """Run forward, and note what it launched, if that can be repeated."""
        log, drawn = self.log, random.getstate()
        ran = Pass(
            model=model,
            key=key,
            first=next(log.numbers),
            compiled=log.compiled.running,
            given=given,
        )
        ran.most_bytes, log.highest_bytes = -log.live_bytes, log.live_bytes
        start, node, networks = len(log.calls), _next_node(), len(log.networks)
        ran.host.append(dict(log.host))
        output = forward()
        ran.host.append(dict(log.host))
        ran.forward, ran.nodes = log.calls[start:], range(node, _next_node())
        if (
            random.getstate() == drawn
            and len(log.networks) == networks
            and self._note_output(ran, output)
        ):
            self.open[id(model)] = ran
        return output

    def _note_output(self, ran: Pass, output: Any) -> bool:
        """Note the output of a forward; whether it can be made again.

        Each tensor of it has to have memory of its own, and no other code watches its graph.
        """
        leaves, ran.structure = tree_flatten(output)
        ran.leaves = [form_of(leaf, self.log, trains=True) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ran.made, ran.reaches = storages(tensors, self.log), reached(tensors)
        ran.ends = [
            (t.grad_fn._sequence_nr(), t.output_nr) if t.grad_fn else (-1, 0) for t in tensors
        ]
        apart = len({*ran.made, *ran.given}) == len(ran.made) + len({*ran.given})
        return None not in ran.leaves and apart and not watched(self.log, tensors)

    def _begin(self, ran: Pass, roots: tuple[Any, ...]) -> Any:
        """Hook the node by which backward enters a pass; None where it cannot be repeated.

        It can where backward enters it by one output, and adds outside of it to gradients of other
        parameters alone. Nodes outside have to be younger, so that they all run before it.
        """
        reached_nodes = [(node, (node._sequence_nr(), at)) for node, at in edges(roots, ran.nodes)]
        entered = [(node, end) for node, end in reached_nodes if end[0] in ran.nodes]
        if len(entered) != 1 or entered[0][1] not in ran.ends:
            return None
        added = {id(node.variable) for node, _ in reached_nodes if hasattr(node, "variable")}
        older = any(number < ran.nodes.start for _, (number, _) in reached_nodes)
        if older or added & ran.reaches.keys():
            return None
        node, end = entered[0]
        ran.used = ran.ends.index(end)

        def begins(gradients: Any) -> None:
            ran.gradient, ran.begun = self.log.storage(gradients[end[1]]), len(self.log.calls)
            ran.host.append(dict(self.log.host))

        return node.register_prehook(begins)

    def _end(self, ran: Pass) -> None:
        """Keep a pass whose backward ran, together with earlier ones that are like it."""
        if ran.begun < 0:
            return
        ran.backward = self.log.calls[ran.begun :]
        ran.host.append(dict(self.log.host))
        ran.most_bytes += self.log.highest_bytes
        known = self.known[id(ran.model)]
        if known and known[-1].pattern() != ran.pattern():
            known.clear()
        if ran.can_repeat() and ran.key[1] == _gradients(ran.model):
            known.append(ran)


def _next_node() -> int:
    """The number of autograd's next node."""
    return int(torch._C._autograd._get_sequence_nr())


def _hooked(parameter: Any) -> bool:
    """Whether a parameter's gradient has hooks that are not DDP's reducer's."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(
        isinstance(getattr(hook, "__self__", None), Reducer) for hook in after
    )


def _gradients(model: torch.nn.Module) -> list[tuple[int, bool, torch.dtype, int, int]]:
    """Of each parameter its id, whether it trains, its dtype, its memory, its gradient's id."""
    return [
        (id(p), p.requires_grad, p.dtype, below_transforms(p).untyped_storage()._cdata, id(p.grad))
        for p in model.parameters()
    ]
