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
STORAGE, POINT, COMPILED = range(3)  # indices in lists of ``Numbers``


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The place among a layer's launches where backward has the gradient of parameter ``at``.

    ``number``: of the gradient's storage.
    """

    at: int
    form: Any
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a layer launches in forward or backward; ``results``: forms of the tensors it returns.

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
        """Whether none of its calls is of a CUDA graph, or of a recurrent network."""
        ops = (call for call in self.calls if isinstance(call, OpCall))
        return not any(call.graphed or call.within for call in ops)


@dataclass(kw_only=True)
class Kind:
    """Equal layers that are given the same (``key``), and what they launch in each phase.

    ``last``: what the last one launched; ``shown``: what two in a row did, so that others will.
    """

    key: Any
    watched = False  # others hook into autograd's nodes that add to gradients
    compiled = 0  # name of the compiled function's call that makes the output
    last: dict[str, Launched] = field(default_factory=dict)
    shown: dict[str, Launched] = field(default_factory=dict)

    def note(self, phase: str, launched: Launched) -> None:
        """Note what a layer launched in "forward" or "backward"."""
        if self.last.get(phase) == launched:
            self.shown.setdefault(phase, launched)
        self.last[phase] = launched


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The form of a tensor that wraps another one, as a DTensor does."""

    kind: Any
    others: dict[str, Any]
    name: str
    inner: Form
    facts: Any
    size: tuple[Any, Any]

    def tensor(self, log: ProgramLog) -> torch.Tensor:
        """Another one of this form."""
        inner = {**self.others, self.name: self.inner.tensor(log)}
        tensor: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.facts, *self.size)
        return tensor


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
    """What a layer is given: the input that has a gradient, its parameters, and their storages."""

    def __init__(self, layer: Any, leaves: Iterable[Any], log: ProgramLog) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        (self.trained,) = (t for t in tensors if t.requires_grad)
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        every = (*tensors, *layer.parameters(), *layer.buffers())
        self.storages = [log.storage(part) for tensor in every for part in parts(tensor)]


class Numbers:
    """Gives calls of a layer other numbers: of storages, points and calls of compiled functions.

    Lists have one element for each of these three. Numbers below ``since`` were there before the
    layer, and stay; others are mapped to ``fresh`` ones.
    """

    def __init__(
        self, since: Sequence[int], fresh: Sequence[Iterator[int]], storages: dict[int, int]
    ) -> None:
        self.since, self.fresh = since, fresh
        self.maps = storages, dict[int, int](), dict[int, int]()  # from number to other number

    @classmethod
    def names(cls, log: ProgramLog, given: Given) -> Numbers:
        """Names for a layer's numbers, equal in equal layers: counted from its inputs on."""
        since = [next(numbers) for numbers in _numbers(log)]
        names = {n: name for name, n in reversed(list(enumerate(given.storages, NEW)))}
        numbers = cls(since, [count(NEW + len(given.storages)), count(NEW), count(NEW + 1)], names)
        numbers.maps[COMPILED].update({log.compiled.running: NEW, 0: 0})
        return numbers

    @classmethod
    def of_names(cls, log: ProgramLog, given: Given) -> Numbers:
        """Numbers for such names, for another layer that repeats the calls."""
        numbers = cls([NEW] * 3, _numbers(log), dict(enumerate(given.storages, NEW)))
        numbers.maps[COMPILED][NEW] = log.compiled.running
        return numbers

    def of(self, number: int, kind: int = STORAGE) -> int:
        """The other number of a storage, a point or a call of a compiled function."""
        known = self.maps[kind]
        if number not in known:
            known[number] = number if number < self.since[kind] else next(self.fresh[kind])
        return known[number]

    def call(self, call: OpCall) -> OpCall:
        """The call with the other numbers."""
        if call.op in POINTED:
            return changed(call, args=(self.of(call.args[0], POINT),))
        return renumbered(call, self.of, compiled=self.of(call.compiled, COMPILED))


def _numbers(log: ProgramLog) -> list[Iterator[int]]:
    """The log's counters of storages, points and calls of compiled functions."""
    return [log.numbers, log.points, log.compiled_calls]


class Measured:
    """Measures what a log gets from now on: calls, host events and memory."""

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.calls, self.start = log, log.calls, len(log.calls)
        self.host, self.others = Counter(log.host), Counter[str]()
        self.live_bytes = self.highest_bytes = log.live_bytes
        log.measuring.append(self)

    def launched(self, calls: list[Any], results: Any, numbers: list[int]) -> Launched:
        """End measuring: what the log got since; ``calls`` have names for numbers (``Numbers``)."""
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
    """Notes what backward of a layer launches, from the gradient of its output to its input's.

    What is done with gradients of parameters, as hooks do, is left out: it is done for each layer.
    """

    def __init__(self, log: ProgramLog, kind: Kind, forward: Launched, names: Numbers) -> None:
        self.log, self.kind, self.forward, self.names = log, kind, forward, names
        self.handles, self.apart = list[Any](), list[tuple[int, int, Reached]]()
        self.measured: Measured | None = None

    def watch(self, given: Given, output: torch.Tensor, first_node: int) -> None:
        """Hook the nodes of autograd at which backward begins, comes to parameters, and ends."""
        numbers = {id(p): i for i, p in enumerate(given.parameters)}
        self.kind.compiled = self.names.of(self.log.compiled.of(output.grad_fn), COMPILED)
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
        """Begin to measure, given the gradient of the output: number ``at`` of a node's."""
        self.measured = Measured(self.log)
        self.gradient = Form.of(gradients[at], self.log)
        self.number = self.names.of(self.log.storage(gradients[at]))

    def _reaches(self, at: int, gradients: Any) -> None:
        """Note where backward has a parameter's gradient: calls until ``_left`` are left out."""
        (gradient,) = gradients
        if self.measured is None or gradient is None:
            return
        (part,) = parts(gradient)
        reached = Reached(
            at=at, form=gradient_form(gradient, self.log), number=self.log.storage(part)
        )
        self.apart.append((len(self.log.calls), -1, reached))
        self.host = Counter(self.log.host)

    def _left(self, *gradients: Any) -> None:
        """Note that the node that adds to a parameter's gradient is done."""
        if self.measured is not None and self.apart and self.apart[-1][1] < 0:
            begin, _, reached = self.apart.pop()
            self.apart.append((begin, len(self.log.calls), reached))
            self.measured.others += Counter(self.log.host) - self.host

    def _ends(self, at: int, gradients: Any) -> None:
        """Keep what was launched, at the node that gets the gradient of the layer's input.

        A ``Reached`` stands for the calls between ``_reaches`` and ``_left`` of each parameter.
        """
        for handle in self.handles:
            handle.remove()
        measured, log = self.measured, self.log
        if measured is None or log.calls is not measured.calls:
            return
        calls, start = list[OpCall | Reached](), measured.start
        for begin, end, reached in (*self.apart, (len(log.calls), -1, None)):
            calls += map(self.names.call, log.calls[start:begin])
            calls += [replace(reached, number=self.names.of(reached.number))] if reached else []
            start = end
        result, number = Form.of(gradients[at], log), log.storage(gradients[at])
        numbers = [self.number, self.names.of(number)]
        launched = measured.launched(calls, (self.gradient, result), numbers)
        if launched.can_repeat() and self.forward == self.kind.shown.get("forward"):
            self.kind.note("backward", launched)


class Repeated(torch.autograd.Function):
    """Stands for a layer that is not run in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, trained: Any, again: Again, *parameters: Any) -> Any:  # type: ignore[override]
        """The layer's outputs."""
        ctx.again, outputs = again, again.forward()
        ctx.reaches = {} if parameters else {id(p): p for p in again.given.parameters}
        ctx.mark_non_differentiable(*(t for t, form in outputs if not form.trains))
        ctx.set_materialize_grads(False)
        return tuple(t for t, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of what the layer was given."""
        of_input, of_parameters = ctx.again.backward(gradients)
        return of_input, None, *(of_parameters if ctx.again.kind.watched else ())


class Again:
    """Repeats for one layer what others of its kind launch: forward, and backward later."""

    def __init__(self, log: ProgramLog, kind: Kind, given: Given) -> None:
        self.log, self.kind, self.given = log, kind, given
        self.numbers, self.sent = Numbers.of_names(log, given), list[int]()

    def output(self) -> Any:
        """Repeat forward as a function of autograd; returns what the layer would."""
        given, (forms, structure) = self.given, self.kind.shown["forward"].results
        log, sent, at = self.log, self.sent, given.trained.output_nr

        def check_alone(gradients: Any) -> None:
            """UnlikeError where the input's gradient is a sum: it is used elsewhere, too."""
            if sent and sent != [log.storage(gradients[at])]:
                raise UnlikeError

        node: Any = given.trained.grad_fn
        node.register_prehook(check_alone)
        parameters = given.parameters if self.kind.watched else ()
        made_by = self.numbers.of(self.kind.compiled, COMPILED)
        with nullcontext() if log.compiled.running else log.compiled.stretch(made_by):
            tensors = iter(Repeated.apply(given.trained, self, *parameters))
        leaves = [next(tensors) if isinstance(form, Form) else form[1] for form in forms]
        return tree_unflatten(leaves, structure)

    def forward(self) -> list[tuple[torch.Tensor, Form]]:
        """Repeat the launches of forward; outputs and their forms.

        What forward keeps for backward is counted until ``free`` is called, or this object is gone.
        """
        launched, log = self.kind.shown["forward"], self.log
        log.take(0, launched.most_bytes)
        before, forms = log.live_bytes, [f for f in launched.results[0] if isinstance(f, Form)]
        outputs = [
            (self._new_tensor(form, name), form)
            for form, name in zip(forms, launched.numbers, strict=True)
        ]
        kept_bytes = launched.kept_bytes - (log.live_bytes - before)
        log.take(kept_bytes)
        self.free = weakref.finalize(self, log.take, -kept_bytes)
        self._launch(launched)
        return outputs

    def _new_tensor(self, form: Any, name: int) -> torch.Tensor:
        """A tensor of this form, in the storage whose name is given."""
        with unlogged(self.log):
            tensor: torch.Tensor = form.tensor(self.log)
        (part,) = parts(tensor)
        self.log.storage(part, self.numbers.of(name))
        return tensor

    def backward(self, gradients: Sequence[Any]) -> tuple[torch.Tensor, list[Any]]:
        """Repeat the launches of backward; the gradients of the input, and of parameters."""
        launched, log = self.kind.shown.get("backward"), self.log
        reached = [gradient for gradient in gradients if gradient is not None]
        if launched is None or len(reached) != 1 or not self.free.alive:
            raise UnlikeError
        if Form.of(reached[0], log) != launched.results[0]:
            raise UnlikeError
        self.numbers.maps[STORAGE][launched.numbers[0]] = log.storage(reached[0])
        log.take(0, launched.most_bytes)
        self.free()
        of_parameters: list[Any] = [None] * len(self.given.parameters)
        self._launch(launched, of_parameters)
        of_input = self._new_tensor(launched.results[1], launched.numbers[1])
        self.sent.append(log.storage(of_input))
        del self.given
        return of_input, of_parameters

    def _launch(self, launched: Launched, gradients: list[Any] | None = None) -> None:
        """Log the calls and host events again; gradients of parameters are put into the list."""
        for call in launched.calls:
            if isinstance(call, OpCall):
                self.log.calls.append(self.numbers.call(call))
            elif gradients is not None:
                gradients[call.at] = self._reached(call)
        for event, times in launched.host.items():
            self.log.host[event] = self.log.host.get(event, 0) + times

    def _reached(self, reached: Reached) -> torch.Tensor | None:
        """A parameter's gradient for autograd's node to add; None where it is added here.

        It is added here, and hooks are called, if nobody watches the node.
        """
        gradient = self._new_tensor(reached.form, reached.number)
        parameter = self.given.parameters[reached.at]
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
