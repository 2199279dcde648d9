"""Records how a script makes its loss by models and functions, to make it in other batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

# Functions whose integers are lengths, which follow the batch; those of others may be axes.
SHAPED = (
    *("view", "reshape", "expand", "repeat", "zeros", "ones", "full", "empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty", "rand", "randn", "arange", "unflatten", "tile"),
    *("broadcast_to", "narrow", "split", "__getitem__", "__setitem__"),
)
WRITES = ("__setitem__", "__set__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Samples of a micro-batch, and tokens of each; 0 tokens where the input is not of tokens.

    ``time_first``: samples are the second axis of tensors, as recurrent networks take them.
    """

    batch: int
    seq: int = 0
    time_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Lengths at another size than the script's own: its batch, tokens, and products of both."""

    own: Size
    wanted: Size

    @property
    def _tokens(self) -> dict[int, int]:
        """Tokens of a sample, labels may be one more or fewer."""
        own, wanted = self.own.seq, self.wanted.seq
        return {own + d: wanted + d for d in (1, -1, 0)} if own > 2 else {}

    @property
    def _rows(self) -> dict[int, int]:
        """Samples, or tokens of all samples."""
        own, wanted = self.own.batch, self.wanted.batch
        return {own * a: wanted * b for a, b in self._tokens.items()} | {own: wanted}

    def length(self, value: int) -> int:
        """A length that a script stated as a number."""
        return (self._tokens | self._rows).get(value, value) if value > 1 else value

    def table(self, shape: Sequence[int]) -> list[int]:
        """The shape of what a model keeps for each token of a sequence: angles, a mask."""
        return [self.wanted.seq if n == self.own.seq > 2 else n for n in shape]

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of a tensor whose first axis is the batch, or tokens; others may be tokens.

        Where time is first the second axis is the batch; the first may be tokens of all samples.
        """
        first, others = self._tokens | self._rows, self._tokens
        if self.own.time_first:
            first, others = self._rows | self._tokens, {self.own.batch: self.wanted.batch}
        return [*(first.get(n, n) for n in shape[:1]), *(others.get(n, n) for n in shape[1:])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A tensor without its memory: ``parameter`` is its name where it is one of the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    channels_last: bool = False
    scaled: bool = True
    parameter: str = ""

    def tensor(self, size: Scaled, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of this form at a size; ``dtype`` is that of floating-point ones."""
        floats = self.dtype.is_floating_point and dtype is not None
        made = torch.empty(
            size.shape(self.shape) if self.scaled else self.shape,
            dtype=dtype if floats else self.dtype,
        )
        if self.channels_last:
            made = made.contiguous(memory_format=torch.channels_last)
        return made.requires_grad_(self.requires_grad)


def form_of(tensor: torch.Tensor, parameter: str = "") -> Form:
    """The form of a tensor; parameters of other models are the same in all batches."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return Form(
        shape=shape,
        dtype=tensor.dtype,
        requires_grad=tensor.is_leaf and tensor.requires_grad,
        channels_last=len(shape) == 4 and stride[1] == 1 and shape[1] > 1,
        scaled=not isinstance(tensor, torch.nn.Parameter),
        parameter=parameter,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """The tensor of this number on a tape."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A function of torch that was called; tensors of its arguments are numbers and forms."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTape:
    """The models and functions that make a loss, in order; the first one is a model."""

    calls: tuple[Called, ...]
    loss: int

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models, in the order in which they are called first."""
        called = (call.function for call in self.calls)
        return list(dict.fromkeys(one for one in called if isinstance(one, torch.nn.Module)))

    @property
    def calls_of_models(self) -> int:
        """How often models are called."""
        return sum(isinstance(call.function, torch.nn.Module) for call in self.calls)

    def play(
        self,
        output: Any,
        parameters: Mapping[str, Any],
        size: Scaled,
        make: Callable[[Form], torch.Tensor],
    ) -> Any:
        """The loss of the first model's output at another size."""
        known = dict(zip(self.calls[0].results, tensors_of(output), strict=True))
        made: dict[int, torch.Tensor] = {}

        def value(one: Any, lengths: bool) -> Any:
            if isinstance(one, Result):
                return known[one.number]
            if isinstance(one, Form):
                if one.parameter in parameters:
                    return parameters[one.parameter]
                if id(one) not in made:
                    made[id(one)] = make(one)
                return made[id(one)]
            if isinstance(one, slice):
                parts = (one.start, one.stop, one.step)
                return slice(*(value(part, lengths) for part in parts))
            return size.length(one) if lengths and type(one) is int else one

        for call in self.calls[1:]:
            name = getattr(call.function, "__name__", "")
            args = tree_map(lambda one: value(one, name in SHAPED), call.arguments)  # noqa: B023
            options = tree_map(lambda one: value(one, name in SHAPED), dict(call.options))  # noqa: B023
            result = call.function(*args, **options)
            tensors = tensors_of(args[0] if name in WRITES else result)
            known.update(zip(call.results, tensors, strict=True))
        return known[self.loss]


class LossRecorder(TorchFunctionMode):
    """Records what makes a loss while it is ``on``; no tensor is kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.begin()

    def begin(self) -> None:
        """Forget all calls."""
        self.names: dict[int, str] = {}  # of the models' parameters, by their ids
        self.calls: list[Called] = []
        self._numbers: Any = WeakIdKeyDictionary()
        self._forms: Any = WeakIdKeyDictionary()
        self._count = 0

    def tape(self, loss: torch.Tensor) -> LossTape | None:
        """What led to a loss; None where something did that is no function of torch."""
        number = self._numbers.get(loss)
        needed, calls = {number}, list[Called]()
        for call in reversed(self.calls):
            if needed.intersection(call.results):
                read = tree_leaves((call.arguments, dict(call.options)))
                needed |= {one.number for one in read if isinstance(one, Result)}
                calls.append(call)
        calls.reverse()
        models = [call for call in calls if isinstance(call.function, torch.nn.Module)]
        if number is None or not models:
            return None
        others = (call for call in calls if call is not models[0])
        return LossTape(calls=(models[0], *others), loss=number)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.applied(func, func, args, kwargs)

    def applied(self, function: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run what stands for a function, of torch or of ``torch.autograd``, and record it."""
        if not self.on or function is torch.Tensor.backward:
            return run(*args, **kwargs)
        return self._noted(function, run, args, kwargs)

    def called(self, model: torch.nn.Module, run: Callable[..., Any], args: Any, kw: Any) -> Any:
        """Run what stands for a model's call, and record it; functions on its output follow."""
        self.names |= {id(p): f"{id(model)}.{name}" for name, p in model.named_parameters()}
        made = self._noted(model, run, args, kw)
        self._latest = (self.calls[-1].results, [t.shape for t in tensors_of(made)])
        return made

    def passed(self, output: Any) -> None:
        """Number tensors as those of the last call, if these are their shapes."""
        tensors = tensors_of(output)
        numbers, shapes = self._latest
        if [t.shape for t in tensors] == shapes:
            self._numbers.update(zip(tensors, numbers, strict=True))

    def _noted(
        self, function: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run ``run`` for ``function``; record it if it reads a model's output or weights."""
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        own = self.names if torch.is_grad_enabled() else ()
        model = isinstance(function, torch.nn.Module)
        follows = model or any(t in self._numbers or id(t) in own for t in read)
        asked = tree_map(self._reference, (tuple(args), kwargs)) if follows else ((), {})
        made = run(*args, **kwargs)
        name = getattr(function, "__name__", "")
        tensors = tensors_of(args[0] if name in WRITES else made)
        if follows and (tensors or model):
            numbers = self._number(tensors)
            self.calls.append(
                Called(function=function, arguments=asked[0], options=asked[1], results=numbers)
            )
        return made

    def _number(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        for tensor in tensors:
            self._numbers[tensor] = self._count
            self._count += 1
        return tuple(range(self._count - len(tensors), self._count))

    def _reference(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return tuple(value) if isinstance(value, torch.Size) else value
        if value in self._numbers:
            return Result(self._numbers[value])
        if value not in self._forms:
            self._forms[value] = form_of(value, self.names.get(id(value), ""))
        return self._forms[value]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, in order: of lists, dicts, and objects with fields."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for one in value.values() for t in tensors_of(one)]
    if isinstance(value, list | tuple):
        return [t for one in value for t in tensors_of(one)]
    if is_dataclass(value) and not isinstance(value, type):
        return [t for f in fields(value) for t in tensors_of(getattr(value, f.name))]
    return []
