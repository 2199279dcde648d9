"""What a layer launches in forward and backward, and its repetition for another layer."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_unflatten

from itercast.capture.opcall import OpCall, changed
from itercast.capture.programs.gpus.devices import parts
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import HOST_WAIT, RECORD, WAIT
from itercast.capture.programs.reducer import edges
from itercast.capture.programs.repeated.fold import renumbered
from itercast.capture.programs.repeated.passes import (
    NEW,
    Form,
    UnlikeError,
    unlogged,
    watched,
)
from itercast.capture.recorder.watch import MadeBy

POINTED = (RECORD, WAIT, HOST_WAIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Where backward has the gradient of parameter number ``at``, and its storage's ``number``."""

    at: int
    form: Any
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a layer launches in forward or backward; ``results``: what it makes, without memory.

    ``numbers``: of the results' storages. ``most_bytes``, ``kept_bytes``: memory that it takes
    meanwhile, and still at its end.
    """

    calls: list[OpCall | Reached]
    host: Counter[str]
    results: Any
    numbers: list[int]
    most_bytes: int
    kept_bytes: int

    def can_repeat(self) -> bool:
        """Whether none of it is of a graph, or of a recurrent network."""
        ops = (call for call in self.calls if isinstance(call, OpCall))
        return not any(call.graphed or call.within for call in ops)


@dataclass(kw_only=True)
class Kind:
    """Layers that are given the same (``key``): what the last one launched, and two in a row."""

    key: Any
    watched = False  # others hook into autograd's nodes that add to gradients
    compiled = 0  # name of the compiled function's call that makes the output
    last: dict[str, Launched] = field(default_factory=dict)
    shown: dict[str, Launched] = field(default_factory=dict)

    def note(self, phase: str, one: Launched) -> None:
        """Take what a layer launched."""
        if self.last.get(phase) == one:
            self.shown.setdefault(phase, one)
        self.last[phase] = one


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The form of a tensor that wraps one, as a DTensor."""

    kind: Any
    others: dict[str, Any]
    name: str
    inner: Form
    facts: Any
    size: tuple[Any, Any]

    def tensor(self, log: ProgramLog) -> torch.Tensor:
        """Another one of this form."""
        inner = {**self.others, self.name: self.inner.tensor(log)}
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.facts, *self.size)
        return made


def gradient_form(tensor: Any, log: ProgramLog) -> Form | Wrapped:
    """The form of a gradient, which is a DTensor where its parameter is."""
    if not is_traceable_wrapper_subclass(tensor):
        return Form.of(tensor, log)
    names, facts = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    name = next(name for name in names if isinstance(held[name], torch.Tensor))
    inner, size = Form.of(held.pop(name), log), (tensor.shape, tensor.stride())
    return Wrapped(kind=type(tensor), others=held, name=name, inner=inner, facts=facts, size=size)


class Given:
    """What a layer is given: tensors, the one of them that trains, and its parameters."""

    def __init__(self, layer: Any, leaves: Iterable[Any], log: ProgramLog) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        (self.trained,) = (t for t in tensors if t.requires_grad)
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        every = (*tensors, *layer.parameters(), *layer.buffers())
        self.storages = [log.storage(part) for one in every for part in parts(one)]


class Numbers:
    """Gives calls of a layer other numbers: of storages, points and calls of compiled functions.

    Those below ``since`` were there before, and stay.
    """

    def __init__(
        self, since: Sequence[int], fresh: Sequence[Iterator[int]], storages: dict[int, int]
    ) -> None:
        self.since, self.fresh = since, fresh
        self.maps = storages, dict[int, int](), dict[int, int]()

    @classmethod
    def names(cls, log: ProgramLog, given: Given) -> Numbers:
        """Names in the order in which a layer comes to what is numbered, from its inputs on."""
        since = [next(numbers) for numbers in _numbers(log)]
        names = {n: name for name, n in reversed(list(enumerate(given.storages, NEW)))}
        made = cls(since, [count(NEW + len(given.storages)), count(NEW), count(NEW + 1)], names)
        made.maps[2].update({log.compiled.running: NEW, 0: 0})
        return made

    @classmethod
    def of_names(cls, log: ProgramLog, given: Given) -> Numbers:
        """Numbers for names, for another layer."""
        made = cls([NEW] * 3, _numbers(log), dict(enumerate(given.storages, NEW)))
        made.maps[2][NEW] = log.compiled.running
        return made

    def of(self, number: int, kind: int = 0) -> int:
        """The other number of a storage (0), a point (1) or a call of a compiled function (2)."""
        known = self.maps[kind]
        if number not in known:
            known[number] = number if number < self.since[kind] else next(self.fresh[kind])
        return known[number]

    def call(self, call: OpCall) -> OpCall:
        """The call with the other numbers."""
        if call.op in POINTED:
            return changed(call, args=(self.of(call.args[0], 1),))
        return renumbered(call, self.of, compiled=self.of(call.compiled, 2))


def _numbers(log: ProgramLog) -> list[Iterator[int]]:
    return [log.numbers, log.points, log.compiled_calls]


class Measured:
    """What a log gets from now on."""

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.calls, self.start = log, log.calls, len(log.calls)
        self.host, self.others = Counter(log.host), Counter[str]()
        self.live_bytes = self.highest_bytes = log.live_bytes
        log.measuring.append(self)

    def launched(self, calls: list[Any], results: Any, numbers: list[int]) -> Launched:
        """What it got, ``calls`` by their names."""
        log = self.log
        log.measuring.remove(self)
        return Launched(
            calls=calls,
            host=Counter(log.host) - self.host - self.others,
            results=results,
            numbers=numbers,
            most_bytes=self.highest_bytes - self.live_bytes,
            kept_bytes=log.live_bytes - self.live_bytes,
        )


class Recording:
    """Notes what backward of a layer launches, from its output on to what it was given.

    What happens to gradients of parameters is left out, as hooks: that happens for each layer.
    """

    def __init__(self, log: ProgramLog, kind: Kind, forward: Launched, names: Numbers) -> None:
        self.log, self.kind, self.forward, self.names = log, kind, forward, names
        self.handles, self.apart = list[Any](), list[tuple[int, int, Reached]]()
        self.measured: Measured | None = None

    def watch(self, given: Given, output: torch.Tensor, first_node: int) -> None:
        """Be told where backward begins, comes to parameters, and ends."""
        numbers = {id(p): i for i, p in enumerate(given.parameters)}
        self.kind.compiled = self.names.of(self.log.compiled.of(output.grad_fn), 2)
        self.kind.watched |= watched(self.log, (output,), range(first_node))
        hooks: list[Any] = [(output.grad_fn, partial(self._begins, output.output_nr))]
        hooks += [(given.trained.grad_fn, partial(self._ends, given.trained.output_nr))]
        for node, _ in edges((output,), range(first_node)):
            at = numbers.get(id(getattr(node, "variable", None)))
            if at is not None:
                hooks.append((node, partial(self._reaches, at)))
                self.handles.append(node.register_hook(self._left))
        self.handles += [node.register_prehook(hook) for node, hook in hooks]

    def _begins(self, at: int, gradients: Any) -> None:
        self.measured = Measured(self.log)
        self.gradient = Form.of(gradients[at], self.log)
        self.number = self.names.of(self.log.storage(gradients[at]))

    def _reaches(self, at: int, gradients: Any) -> None:
        (gradient,) = gradients
        if self.measured is None or gradient is None:
            return
        (part,) = parts(gradient)
        reached = Reached(
            at=at, form=gradient_form(gradient, self.log), number=self.log.storage(part)
        )
        self.apart.append((len(self.log.calls), -1, reached))
        self.host = Counter(self.log.host)

    def _left(self, *told: Any) -> None:
        if self.measured is not None and self.apart and self.apart[-1][1] < 0:
            begin, _, reached = self.apart.pop()
            self.apart.append((begin, len(self.log.calls), reached))
            self.measured.others += Counter(self.log.host) - self.host

    def _ends(self, at: int, gradients: Any) -> None:
        for handle in self.handles:
            handle.remove()
        measured, log = self.measured, self.log
        if measured is None or log.calls is not measured.calls:
            return
        calls, start = list[OpCall | Reached](), measured.start
        for begin, end, one in (*self.apart, (len(log.calls), -1, None)):
            calls += map(self.names.call, log.calls[start:begin])
            calls += [replace(one, number=self.names.of(one.number))] if one else []
            start = end
        made, number = Form.of(gradients[at], log), log.storage(gradients[at])
        numbers = [self.number, self.names.of(number)]
        launched = measured.launched(calls, (self.gradient, made), numbers)
        if launched.can_repeat() and self.forward == self.kind.shown.get("forward"):
            self.kind.note("backward", launched)


class Repeated(torch.autograd.Function):
    """Stands for a layer in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, trained: Any, again: Again, *parameters: Any) -> Any:  # type: ignore[override]
        """The layer's outputs."""
        ctx.again, made = again, again.forward()
        ctx.reaches = {} if parameters else {id(p): p for p in again.given.parameters}
        ctx.mark_non_differentiable(*(t for t, form in made if not form.trains))
        ctx.set_materialize_grads(False)
        return tuple(t for t, _ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of what the layer was given."""
        trained, found = ctx.again.backward(gradients)
        return trained, None, *(found if ctx.again.kind.watched else ())


class Again:
    """Repeats for a layer what others of its kind launch."""

    def __init__(self, log: ProgramLog, kind: Kind, given: Given) -> None:
        self.log, self.kind, self.given = log, kind, given
        self.numbers, self.sent = Numbers.of_names(log, given), list[int]()

    def output(self) -> Any:
        """What the layer returns, after its launches."""
        given, (forms, structure) = self.given, self.kind.shown["forward"].results
        log, sent, at = self.log, self.sent, given.trained.output_nr

        def alone(gradients: Any) -> None:
            """What the layer was given is nowhere else used, to whose gradient others add."""
            if sent and sent != [log.storage(gradients[at])]:
                raise UnlikeError

        node: Any = given.trained.grad_fn
        node.register_prehook(alone)
        parameters = given.parameters if self.kind.watched else ()
        made_by = self.numbers.of(self.kind.compiled, 2)
        with nullcontext() if log.compiled.running else log.compiled.stretch(made_by):
            tensors = iter(Repeated.apply(given.trained, self, *parameters))
        leaves = [next(tensors) if isinstance(one, Form) else one[1] for one in forms]
        return tree_unflatten(leaves, structure)

    def forward(self) -> list[tuple[torch.Tensor, Form]]:
        """Repeat the launches of forward; outputs and their forms."""
        one, log = self.kind.shown["forward"], self.log
        log.take(0, one.most_bytes)
        before, forms = log.live_bytes, [form for form in one.results[0] if isinstance(form, Form)]
        made = [(self._made(*pair), pair[0]) for pair in zip(forms, one.numbers, strict=True)]
        kept_bytes = one.kept_bytes - (log.live_bytes - before)
        log.take(kept_bytes)
        self.free = weakref.finalize(self, log.take, -kept_bytes)
        self._launch(one)
        return made

    def _made(self, form: Any, name: int) -> torch.Tensor:
        with unlogged(self.log):
            made: torch.Tensor = form.tensor(self.log)
        (part,) = parts(made)
        self.log.storage(part, self.numbers.of(name))
        return made

    def backward(self, gradients: Sequence[Any]) -> tuple[torch.Tensor, list[Any]]:
        """Repeat the launches of backward; gradients of what trains, and of parameters."""
        one, log = self.kind.shown.get("backward"), self.log
        known = [gradient for gradient in gradients if gradient is not None]
        alike = one is not None and len(known) == 1 and Form.of(known[0], log) == one.results[0]
        if one is None or not (alike and self.free.alive):
            raise UnlikeError
        self.numbers.maps[0][one.numbers[0]] = log.storage(known[0])
        log.take(0, one.most_bytes)
        self.free()
        found: list[Any] = [None] * len(self.given.parameters)
        self._launch(one, found)
        made = self._made(one.results[1], one.numbers[1])
        self.sent.append(log.storage(made))
        del self.given
        return made, found

    def _launch(self, one: Launched, found: list[Any] | None = None) -> None:
        for call in one.calls:
            if isinstance(call, OpCall):
                self.log.calls.append(self.numbers.call(call))
            elif found is not None:
                found[call.at] = self._reached(call)
        for event, times in one.host.items():
            self.log.host[event] = self.log.host.get(event, 0) + times

    def _reached(self, one: Reached) -> torch.Tensor | None:
        """A parameter's gradient for autograd's node, or what that node does with it."""
        gradient, parameter = self._made(one.form, one.number), self.given.parameters[one.at]
        if self.kind.watched:
            return gradient
        with torch.no_grad(), patch.object(self.log, "compiled", MadeBy()):  # not of its node
            if parameter.grad is None:
                parameter.grad = gradient.detach()
            else:
                parameter.grad += gradient
            del gradient
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)
        return None
