"""What a model or layer launches in forward and backward; repeats it on other memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from itercast.capture.opcall import OpCall, TensorSpec, changed
from itercast.capture.programs.backward import LASTING
from itercast.capture.programs.gpus.devices import parts
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import HOST_WAIT, RECORD, WAIT
from itercast.capture.programs.repeated.fold import PASS, renumbered
from itercast.capture.programs.repeated.forms import Form, Given, UnlikeError, closed, unlogged
from itercast.capture.programs.repeated.holders import holders, put
from itercast.capture.recorder.watch import MadeBy

NEW = 2**40  # numbers from here on are names, not those of storages
POINTED = (RECORD, WAIT, HOST_WAIT)
STORAGE, POINT, COMPILED = range(3)  # indices in lists of ``Numbers``


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedGradient:
    """Marks, in a list of launches, where backward has computed the gradient of parameter ``at``.

    ``number``: of the gradient's storage.
    """

    at: int
    form: Any
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a pass launches in forward or backward; ``results``: forms of the tensors it returns.

    ``numbers``: of the results' storages. ``most_bytes``, ``kept_bytes``: memory that it takes
    while it runs, and still at its end. ``gpu_ops``: how many ops read a tensor on the GPU.
    ``forward``: of a backward, what its forward launched. ``law``: gives the calls of pass
    ``number``; then ``calls`` is empty.
    """

    calls: list[OpCall | ReachedGradient]
    host: Counter[str]
    results: Any
    numbers: list[int]
    most_bytes: int = field(compare=False)
    kept_bytes: int = field(compare=False)
    gpu_ops: int = field(compare=False)
    forward: Launched | None = None
    law: Any = field(default=None, compare=False)
    number: int = field(default=0, compare=False)

    def can_repeat(self) -> bool:
        """Whether none of its calls is of a CUDA graph, or of a recurrent network."""
        ops = (call for call in self.calls if isinstance(call, OpCall))
        return not any(call.graphed or call.within for call in ops)


@dataclass(kw_only=True)
class Kind:
    """Equal passes: of equal layers or of one model, with equal inputs (``key``).

    ``last``: what the last pass launched, by phase; ``shown``: what two passes in a row launched,
    which later ones repeat. ``watched``: other code hooks into the autograd nodes that add to
    gradients. ``compiled``: name of the call of a compiled function that makes the output.
    ``reaches``: parameters that the output depends on, by id. ``numbers``: values of the inputs,
    kept only if passes read them. ``alive``: names of the storages alive when backward begins.
    ``sizes``: of the inputs. ``growth``: the law that this and earlier kinds show; ``expected``:
    what a pass of these sizes launches by it.
    """

    key: Any
    sizes: list[int] = field(default_factory=list)
    growth: Any = None
    expected: Launched | None = None
    numbers: Any = None
    watched: bool = False
    compiled: int = 0
    reaches: dict[int, torch.Tensor] = field(default_factory=dict)
    alive: set[int] = field(default_factory=set)
    last: dict[str, Launched] = field(default_factory=dict)
    shown: dict[str, Launched] = field(default_factory=dict)

    def reads(self, numbers: Sequence[Any]) -> None:
        """Note that passes read numbers: only those that are given these are of this kind."""
        if self.numbers is None:
            self.numbers, self.last, self.shown = numbers, {}, {}

    def note(self, phase: str, launched: Launched) -> None:
        """Note what a pass launched in "forward" or "backward".

        Of two equal ones the larger memory counts: the garbage collector may free memory of earlier
        passes meanwhile.
        """
        last = self.last.get(phase)
        if last == launched:
            most_bytes = max(last.most_bytes, launched.most_bytes)
            kept_bytes = max(last.kept_bytes, launched.kept_bytes)
            larger = replace(launched, most_bytes=most_bytes, kept_bytes=kept_bytes)
            self.shown.setdefault(phase, larger)
        self.last[phase] = launched


class Inputs:
    """The inputs of a pass: known values, and storages of tensors, parameters and buffers.

    ``holders``: objects in it that a pass without gradients may change, such as caches.
    ``trained``: an input of a layer that needs a gradient; then gradients of its ``parameters`` are
    added outside its launches. For models, and layers without backward, it is None: gradients are
    added in their launches, so that the storages include these, and the inputs are ``kept``.
    """

    def __init__(
        self,
        module: Any,
        given: Any,
        leaves: Sequence[Any],
        trained: Sequence[Any],
        numbers: Sequence[Any],
        log: ProgramLog,
        graph: bool,
    ) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.trained = next(iter(trained), None)
        self.kept: Sequence[Any] = tensors if self.trained is None else ()  # backward may need them
        self.holders = [] if graph else holders((*given[0], *given[1].values()))
        self.numbers = numbers
        parameters = [*module.parameters()]
        self.parameters = [p for p in parameters if p.requires_grad and self.trained is not None]
        adds_itself = self.trained is None and torch.is_grad_enabled()
        gradients = [p.grad for p in parameters if adds_itself and p.grad is not None]
        every = (*tensors, *parameters, *module.buffers(), *gradients)
        self.storages = [log.storage(part) for tensor in every for part in parts(tensor)]


class Numbers:
    """Renumbers the calls of a pass: storages, points, and calls of compiled functions.

    Lists have one element for each of these three. Numbers below ``since`` were there before the
    pass, and stay; others are mapped to ``fresh`` ones.
    """

    def __init__(
        self, since: Sequence[int], fresh: Sequence[Iterator[int]], storages: dict[int, int]
    ) -> None:
        self.since, self.fresh = since, fresh
        self.maps = storages, dict[int, int](), dict[int, int]()  # from number to other number

    @classmethod
    def names(cls, log: ProgramLog, inputs: Inputs) -> Numbers:
        """Renumbers a pass that ran, from its inputs on: equal passes get equal numbers."""
        since = [next(numbers) for numbers in _numbers(log)]
        names = {n: name for name, n in reversed(list(enumerate(inputs.storages, NEW)))}
        numbers = cls(since, [count(NEW + len(inputs.storages)), count(NEW), count(NEW + 1)], names)
        numbers.maps[COMPILED].update({log.compiled.running: NEW, 0: 0})
        return numbers

    @classmethod
    def of_names(cls, log: ProgramLog, inputs: Inputs) -> Numbers:
        """Renumbers a noted pass for another pass that repeats its calls: undoes ``names``."""
        numbers = cls([NEW] * 3, _numbers(log), dict(enumerate(inputs.storages, NEW)))
        numbers.maps[COMPILED][NEW] = log.compiled.running
        return numbers

    def of(self, number: int, kind: int = STORAGE) -> int:
        """The other number of a storage, a point or a call of a compiled function."""
        other_numbers = self.maps[kind]
        if number not in other_numbers:
            other_numbers[number] = number if number < self.since[kind] else next(self.fresh[kind])
        return other_numbers[number]

    def call(self, call: OpCall) -> OpCall:
        """The call with the other numbers."""
        if call.op in POINTED:
            return changed(call, args=(self.of(call.args[0], POINT),))
        return renumbered(call, self.of, compiled=self.of(call.compiled, COMPILED))


def stand_in(launched: Launched, inputs: Inputs, made: Sequence[int], log: ProgramLog) -> OpCall:
    """One call in the log that stands for a pass whose launches follow a law.

    ``made``: storages of the results.
    """
    read, written = (
        tuple(TensorSpec(shape=(), dtype="", storage=number) for number in numbers)
        for numbers in (inputs.storages, made)
    )
    law = {"law": launched.law, "number": launched.number, "launches": len(launched.law.calls)}
    compiled = log.compiled.running
    return OpCall(op=PASS, args=read, kwargs=law, outputs=written, module=PASS, compiled=compiled)


def stood_for(call: OpCall, log: ProgramLog) -> list[OpCall]:
    """What a call of ``stand_in`` is for, on new memory."""
    law = call.kwargs["law"]
    storages = dict(enumerate((t.storage for t in call.args), NEW))
    storages |= zip(law.like.numbers, (t.storage for t in call.outputs), strict=True)
    numbers = Numbers([NEW] * 3, _numbers(log), storages)
    numbers.maps[COMPILED][NEW] = call.compiled
    return [numbers.call(one) for one in law.launches(call.kwargs["number"])]


def _numbers(log: ProgramLog) -> list[Iterator[int]]:
    """The log's counters of storages, points and calls of compiled functions."""
    return [log.numbers, log.points, log.compiled_calls]


class Measured:
    """Measures what a log gets from now on: calls, host events and memory."""

    def __init__(self, log: ProgramLog) -> None:
        self.log, self.calls, self.start = log, log.calls, len(log.calls)
        self.host, self.others = Counter(log.host), Counter[str]()
        self.live_bytes = self.highest_bytes = log.live_bytes
        self.gpu_ops = log.gpu_memory.ops
        log.measuring.append(self)

    def launched(
        self, calls: list[Any], results: Any, numbers: list[int], forward: Launched | None = None
    ) -> Launched:
        """Stop measuring; returns what was logged. ``calls``: its calls, renamed by ``Numbers``."""
        log = self.log
        log.measuring.remove(self)
        return Launched(
            calls=calls,
            host=Counter(log.host) - self.host - self.others,
            results=results,
            numbers=numbers,
            most_bytes=self.highest_bytes - self.live_bytes,
            kept_bytes=log.live_bytes - self.live_bytes,
            gpu_ops=log.gpu_memory.ops - self.gpu_ops,
            forward=forward,
        )


class Repeated(torch.autograd.Function):
    """Stands in autograd's graph for a layer or model that is not run.

    ``reaches``: the parameters that its output depends on, by their ids.
    """

    @staticmethod
    def forward(ctx: Any, trained: Any, repetition: Repetition, *parameters: Any) -> Any:  # type: ignore[override]
        """The outputs; ``trained``: a layer's input, or for a model a tensor that gets nothing."""
        ctx.again, outputs = repetition, repetition.forward()
        of_layer = () if parameters else repetition.inputs.parameters
        ctx.reaches = {id(p): p for p in of_layer} | repetition.kind.reaches
        ctx.is_model = repetition.inputs.trained is None
        ctx.mark_non_differentiable(*(t for t, form in outputs if not form.trains))
        ctx.set_materialize_grads(False)
        return tuple(t for t, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of what a layer was given; none of a model's: they are added already."""
        of_input, of_parameters = ctx.again.backward(gradients)
        return of_input, None, *(of_parameters if ctx.again.kind.watched else ())


def _check_alone(log: ProgramLog, sent: Sequence[int], at: int, gradients: Any) -> None:
    """UnlikeError where the gradient of a layer's input is a sum: it is used elsewhere, too."""
    if sent and sent != [log.storage(gradients[at])]:
        raise UnlikeError


class Repetition:
    """Repeats for one pass what equal passes launched: forward, and later backward."""

    def __init__(self, log: ProgramLog, kind: Kind, inputs: Inputs) -> None:
        self.log, self.kind, self.inputs = log, kind, inputs
        self.numbers, self.sent = Numbers.of_names(log, inputs), list[int]()

    def output(self) -> Any:
        """Repeat forward as a function of autograd; returns what the module would."""
        inputs, (forms, structure, *_) = self.inputs, self.kind.shown["forward"].results
        log, trained, given = self.log, inputs.trained, [*inputs.kept, *inputs.holders]
        if trained is not None:
            node: Any = trained.grad_fn
            node.register_prehook(partial(_check_alone, log, self.sent, trained.output_nr))
        source = trained
        if self.kind.reaches:
            with unlogged(log):
                source = torch.empty(()).requires_grad_()  # no parameter: these have hooks
        parameters = inputs.parameters if self.kind.watched else ()
        made_by = self.numbers.of(self.kind.compiled, COMPILED)
        with nullcontext() if log.compiled.running else log.compiled.stretch(made_by):
            made = Repeated.apply(source, self, *parameters) if source is not None else ()
        tensors = iter(made or [t for t, _ in self.forward()])
        leaves = [given[f.at] if isinstance(f, Given) else f for f in forms]
        leaves = [next(tensors) if isinstance(leaf, Form) else leaf for leaf in leaves]
        output, changes = closed(leaves, structure)
        for at, held in changes:
            put(inputs.holders[at], held)
        return output

    def forward(self) -> list[tuple[torch.Tensor, Form]]:
        """Log the launches of forward again; returns new outputs with their forms.

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
        alive = {*map(self.numbers.maps[STORAGE].get, self.kind.alive)}
        every = (*self.inputs.kept, *(tensor for tensor, _ in outputs))
        self.inputs.kept = [t.untyped_storage() for t in every if log.storage(t) in alive]
        self._launch(launched)
        return outputs

    def _new_tensor(self, form: Any, name: int) -> torch.Tensor:
        """A tensor of this form, in the storage whose name is given."""
        with unlogged(self.log):
            tensor: torch.Tensor = form.tensor(self.log)
        (part,) = parts(tensor) or [tensor]  # on the meta device it has no parts
        self.log.storage(part, self.numbers.of(name))
        return tensor

    def backward(self, gradients: Sequence[Any]) -> tuple[torch.Tensor | None, list[Any]]:
        """Repeat the launches of backward; the gradients of the input, and of parameters."""
        launched, log = self.kind.shown.get("backward"), self.log
        reached = [(at, gradient) for at, gradient in enumerate(gradients) if gradient is not None]
        if launched is None or len(reached) != 1 or not self.free.alive:
            raise UnlikeError
        (at, gradient), (output, form, *result) = reached[0], launched.results
        if (at, Form.of(gradient, log)) != (output, form):
            raise UnlikeError
        self.numbers.maps[STORAGE][launched.numbers[0]] = log.storage(gradient)
        log.take(0, launched.most_bytes)
        self.free()
        of_parameters: list[Any] = [None] * len(self.inputs.parameters)
        self._launch(launched, of_parameters)
        of_input = self._new_tensor(result[0], launched.numbers[1]) if result else None
        self.sent += [log.storage(of_input)] if result else []
        if LASTING and self.inputs.trained is None:
            LASTING[-1].callback(self._end_here, len(log.calls), dict(log.host))
        del self.inputs
        return of_input, of_parameters

    def _end_here(self, end: int, host: dict[str, int]) -> None:
        """Drop what a wrapper's ``backward`` launched after this pass, as that is repeated, too."""
        del self.log.calls[end:]
        self.log.host = host

    def _launch(self, launched: Launched, gradients: list[Any] | None = None) -> None:
        """Log the calls and host events again; gradients of parameters are put into the list."""
        if launched.law:
            made = list(map(self.numbers.of, launched.numbers))
            self.log.calls.append(stand_in(launched, self.inputs, made, self.log))
        for call in launched.calls:
            if isinstance(call, OpCall):
                self.log.calls.append(self.numbers.call(call))
            elif gradients is not None:
                gradients[call.at] = self._reached(call)
        self.log.gpu_memory.ops += launched.gpu_ops
        for event, times in launched.host.items():
            self.log.host[event] = self.log.host.get(event, 0) + times

    def _reached(self, reached: ReachedGradient) -> torch.Tensor | None:
        """Give autograd's node a parameter's gradient to add; None if it was added here.

        It is added here, and the hooks are called, if nobody else hooks into the node.
        """
        gradient = self._new_tensor(reached.form, reached.number)
        parameter = self.inputs.parameters[reached.at]
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
