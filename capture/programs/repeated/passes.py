"""What a model launches in a micro-batch, and its repetition on other inputs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_unflatten

from itercast.capture.opcall import OpCall
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import COLLECTIVE, MARKS
from itercast.capture.programs.reducer import edges
from itercast.capture.programs.repeated.fold import renumbered

PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))  # compared by value
NEW = 2**40  # numbers from here on are names, not those of storages


class UnlikeError(BaseException):
    """Raised where backward comes to a repeated model otherwise than before: nothing is repeated.

    The program runs again from its start, and each pass of a model then. Scripts do not catch it.
    """


class Values:
    """The numbers in a tensor with data; those of another one may equal them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self.numbers = tensor.clone()  # the program may write to it

    def __eq__(self, other: object) -> bool:
        with _disable_current_modes():
            return isinstance(other, Values) and torch.equal(self.numbers, other.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A tensor that a model is given or returns, without its memory.

    ``fact``: what the log knows of its values, of which ``known`` is compared.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    on_gpu: bool
    known: Any
    fact: Any = field(compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, log: ProgramLog) -> Form:
        """The form of a fake tensor, or of a batch's integers, which have data."""
        fact = log.routing.fact(tensor)
        known: Any = fact and (fact.mean, fact.top, fact.drawn, fact.guessed)
        if fact is not None and fact.values is not None:
            known += (Values(fact.values),)
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            trains=tensor.requires_grad,
            on_gpu=log.gpu_memory.holds(tensor),
            known=known,
            fact=fact,
        )

    def tensor(self, log: ProgramLog) -> torch.Tensor:
        """Another one of this form."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        if self.on_gpu:
            log.gpu_memory.add(tensor)
        if self.fact is not None:
            log.routing.facts[tensor] = self.fact
        return tensor


@dataclass(kw_only=True)
class Pass:
    """What a model launched in a micro-batch; ``most_bytes``: the memory that it took meanwhile.

    ``key``: what is the same in the passes that repeat it, the model's gradients among it.

    Storages from ``first`` on were made in it; ``given``, ``made`` and ``gradient`` are those of
    the inputs, the outputs, and the gradient of the output that backward begins at, number
    ``used``. ``nodes``: the numbers of autograd's nodes of it, ``ends``: those that made outputs,
    with the numbers of their results. ``reaches``: parameters by their ids. ``host``: counts of
    events before and after forward and backward.
    """

    model: torch.nn.Module
    key: Any
    first: int
    compiled: int
    given: list[int]
    made: list[int] = field(default_factory=list)
    gradient: int = -1
    used: int = -1
    structure: Any = None
    leaves: list[Any] = field(default_factory=list)
    nodes: range = range(0)
    ends: list[tuple[int, int]] = field(default_factory=list)
    reaches: dict[int, torch.Tensor] = field(default_factory=dict)
    forward: list[OpCall] = field(default_factory=list)
    backward: list[OpCall] = field(default_factory=list)
    host: list[dict[str, int]] = field(default_factory=list)
    begun: int = -1  # the call with which its backward begins
    most_bytes: int = 0

    def pattern(self) -> tuple[Any, ...]:
        """What passes that are alike have in common, whatever the numbers of their storages."""
        fresh = count(NEW)
        rename = Renamed(self, [next(fresh) for _ in self.given], 0, fresh.__next__)
        launched = [*map(rename, self.forward), *map(rename.storage, [*self.made, self.gradient])]
        launched += map(rename, self.backward)
        events = self.events(0), self.events(2)
        return launched, events, self.leaves, self.structure, list(self.reaches), self.used

    def events(self, at: int) -> Counter[str]:
        """Host events of forward (0) or backward (2)."""
        return Counter(self.host[at + 1]) - Counter(self.host[at])

    def can_repeat(self) -> bool:
        """Whether it launches ops alone, of one compiled function or none."""
        return all(
            call.op not in (COLLECTIVE, *MARKS)
            and not (call.graphed or call.within)
            and call.compiled in (0, self.compiled)
            for call in (*self.forward, *self.backward)
        )


class Renamed:
    """Maps calls of a pass to other storages: inputs are those ``given``, new ones are ``fresh``.

    ``compiled``: the number of the compiled function's call that they are part of.
    """

    def __init__(
        self, of: Pass, given: Iterable[int], compiled: int, fresh: Callable[[], int]
    ) -> None:
        self.first, self.fresh = of.first, fresh
        self.storages = dict(zip(of.given, given, strict=True))
        self.compiled = {of.compiled: compiled, 0: 0}

    def storage(self, number: int) -> int:
        """The new number of a storage; storages that were there before the pass keep theirs."""
        if number not in self.storages:
            self.storages[number] = number if number < self.first else self.fresh()
        return self.storages[number]

    def __call__(self, call: OpCall) -> OpCall:
        """The call on these storages."""
        return renumbered(call, self.storage, compiled=self.compiled[call.compiled])


class Repeated(torch.autograd.Function):
    """Stands for a model that is not run in autograd's graph, in which ``edges`` looks.

    ``reaches``: the model's parameters by their ids; ``beyond``: the search ends here.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Any, again: Again) -> Any:  # type: ignore[override]
        """The model's outputs; ``anchor`` is a tensor that trains."""
        ctx.again, ctx.reaches, ctx.beyond = again, again.of.reaches, ()
        outputs = again.forward()
        ctx.mark_non_differentiable(*(t for t, form in outputs if not form.trains))
        ctx.set_materialize_grads(False)
        return tuple(t for t, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Repeat what backward launched; gradients of parameters stay, they have no data."""
        ctx.again.backward(gradients)
        return None, None


class Again:
    """Repeats what a pass launched, forward and later backward, on inputs in storages ``given``."""

    def __init__(self, of: Pass, given: Iterable[int], log: ProgramLog) -> None:
        self.of, self.log, self.peak_bytes = of, log, log.live_bytes + of.most_bytes
        self.rename = Renamed(of, given, log.compiled.running, log.numbers.__next__)

    def output(self) -> Any:
        """Repeat forward as a function of autograd; returns what the model would."""
        with unlogged(self.log):
            anchor = torch.empty(()).requires_grad_()
        tensors = iter(Repeated.apply(anchor, self))
        forms = self.of.leaves
        leaves = [next(tensors) if isinstance(form, Form) else form[1] for form in forms]
        return tree_unflatten(leaves, self.of.structure)

    def forward(self) -> list[tuple[torch.Tensor, Form]]:
        """Repeat the launches of forward; outputs and their forms."""
        forms = [leaf for leaf in self.of.leaves if isinstance(leaf, Form)]
        with unlogged(self.log):
            outputs = [form.tensor(self.log) for form in forms]
        self.rename.storages |= zip(self.of.made, map(self.log.storage, outputs), strict=True)
        self._launch(self.of.forward, self.of.events(0))
        return list(zip(outputs, forms, strict=True))

    def backward(self, gradients: Iterable[Any]) -> None:
        """Repeat the launches of backward, given the gradients of outputs."""
        gradients_by_output = {i: g for i, g in enumerate(gradients) if g is not None}
        if list(gradients_by_output) != [self.of.used]:
            raise UnlikeError
        self.rename.storages[self.of.gradient] = self.log.storage(gradients_by_output[self.of.used])
        self._launch(self.of.backward, self.of.events(2))

    def _launch(self, calls: Iterable[OpCall], events: Counter[str]) -> None:
        """Log calls on this pass's storages, and host events, again."""
        self.log.calls += map(self.rename, calls)
        self.log.peak_bytes = max(self.log.peak_bytes, self.peak_bytes)
        for event, times in events.items():
            self.log.host[event] = self.log.host.get(event, 0) + times


def form_of(leaf: Any, log: ProgramLog, trains: bool = False) -> Any:
    """A tensor's form, or a plain value and its type; None for other objects.

    None also for a tensor with a gradient, unless it may (``trains``): as an input its graph goes
    on outside the model.
    """
    fact = type(leaf) is torch.Tensor and log.routing.fact(leaf)
    if (type(leaf) is FakeTensor or fact) and leaf.layout == torch.strided:
        return Form.of(leaf, log) if trains or not leaf.requires_grad else None
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def storages(leaves: Iterable[Any], log: ProgramLog) -> list[int]:
    """The numbers of the storages of the tensors among leaves."""
    return [log.storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


@contextmanager
def unlogged(log: ProgramLog) -> Iterator[None]:
    """Let ops inside the context run unlogged: they are no part of the program."""
    log.paused += 1
    try:
        yield
    finally:
        log.paused -= 1


def watched(log: ProgramLog, outputs: Sequence[torch.Tensor], beyond: range = range(0)) -> bool:
    """Whether Python holds more references than autograd's graph to nodes that add to gradients.

    Code that hooks into them does, as FSDP.
    """
    with unlogged(log):
        unwatched = _most_references([torch.empty(()).requires_grad_() + 1])
    return _most_references(outputs, beyond) > unwatched


def _most_references(outputs: Sequence[torch.Tensor], beyond: range = range(0)) -> int:
    """The most references to a node that adds to a parameter's gradient; see ``edges``."""
    nodes = (node for node, _ in edges(outputs, beyond) if hasattr(node, "variable"))
    return max(map(sys.getrefcount, nodes), default=0)
