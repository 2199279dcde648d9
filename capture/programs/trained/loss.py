"""Records the calls by which a script computes its loss, to compute it for other batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from itercast.capture.collectives import tensors_in

# Functions whose integers are lengths, which follow the batch; those of others may be axes.
SHAPED = (
    *("view", "reshape", "expand", "repeat", "zeros", "ones", "full", "empty", "new_zeros"),
    *("new_ones", "new_full", "new_empty", "rand", "randn", "arange", "unflatten", "tile"),
    *("broadcast_to", "narrow", "split", "__getitem__", "__setitem__"),
)
WRITES = ("__setitem__", "__set__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Samples of a micro-batch, and tokens per sample (0 where the input is not of tokens).

    ``time_first``: samples are the second axis of tensors, as in recurrent networks.
    """

    batch: int
    seq: int = 0
    time_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """Translates lengths of the script's ``own`` size to a ``wanted`` size.

    Lengths equal to the batch, to the tokens of a sample, or to their product are translated.
    """

    own: Size
    wanted: Size

    @property
    def _tokens(self) -> dict[int, int]:
        """From tokens of a sample to those at the wanted size, and one more or fewer."""
        own, wanted = self.own.seq, self.wanted.seq
        return {own + d: wanted + d for d in (1, -1, 0)} if own > 2 else {}

    @property
    def _rows(self) -> dict[int, int]:
        """From rows to those at the wanted size: samples, or tokens of all samples."""
        own, wanted = self.own.batch, self.wanted.batch
        return {own * a: wanted * b for a, b in self._tokens.items()} | {own: wanted}

    def length(self, value: int) -> int:
        """A length that a script stated as a number."""
        return (self._tokens | self._rows).get(value, value) if value > 1 else value

    def table(self, shape: Sequence[int]) -> list[int]:
        """The shape of what a model keeps for each token of a sequence: angles, a mask."""
        return [self.wanted.seq if n == self.own.seq > 2 else n for n in shape]

    def shape(self, shape: Sequence[int]) -> list[int]:
        """Translate a tensor's shape: axis 0 is the batch or tokens, other axes may be tokens.

        With ``time_first`` axis 1 is the batch, and axis 0 tokens of a sample or of all samples.
        """
        first_axis, other_axes = self._tokens | self._rows, self._tokens
        if self.own.time_first:
            first_axis, other_axes = self._rows | self._tokens, {self.own.batch: self.wanted.batch}
        firsts, others = shape[:1], shape[1:]
        return [*(first_axis.get(n, n) for n in firsts), *(other_axes.get(n, n) for n in others)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A tensor without its memory; ``parameter``: its name if it is one of the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    channels_last: bool = False
    scaled: bool = True
    parameter: str = ""

    def tensor(self, size: Rescaled, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of this form at a size; ``dtype`` is that of floating-point ones."""
        shape = size.shape(self.shape) if self.scaled else self.shape
        is_cast = self.dtype.is_floating_point and dtype is not None
        tensor = torch.empty(shape, dtype=dtype if is_cast else self.dtype)
        if self.channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor.requires_grad_(self.requires_grad)


def form_of(tensor: torch.Tensor, parameter: str = "") -> Form:
    """The form of a tensor; a parameter of another model has the same form in all batches."""
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
    """Refers to a tensor on a tape by its number."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A call of a function of torch, or of a model.

    Tensors among its arguments are a ``Result`` where another call made them, else a ``Form``;
    ``results``: numbers of the tensors that it returned. ``kept``: by number, module and attribute
    of losses that a model keeps.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[int, ...]
    kept: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    def now_kept(self) -> dict[int, Any]:
        """The losses that the model keeps now, by number."""
        model: Any = self.function
        held = {n: (vars(model.get_submodule(m)), name) for n, (m, name) in self.kept.items()}
        return {n: inside[name] for n, (inside, name) in held.items() if name in inside}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTape:
    """The models and functions that make a loss, in order; the first one is a model."""

    calls: tuple[Called, ...]
    loss: int

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models, in the order in which they are called first."""
        called = (call.function for call in self.calls)
        return list(dict.fromkeys(f for f in called if isinstance(f, torch.nn.Module)))

    @property
    def calls_of_models(self) -> int:
        """How often models are called."""
        return sum(isinstance(call.function, torch.nn.Module) for call in self.calls)

    def replay(
        self,
        output: Any,
        parameters: Mapping[str, Any],
        size: Rescaled,
        new_tensor: Callable[[Form], torch.Tensor],
    ) -> Any:
        """Compute the loss at another size from the first model's ``output``: call all again.

        ``parameters``: of the models by name; ``new_tensor`` makes a tensor of a form.
        """
        first = self.calls[0]
        tensors_by_number = dict(zip(first.results, tensors_of(output), strict=True))
        tensors_by_number |= first.now_kept()
        made: dict[int, torch.Tensor] = {}  # one tensor for each form, by its id

        def value(recorded: Any, has_lengths: bool) -> Any:
            """The value of a recorded argument; ``has_lengths``: its integers may be lengths."""
            if isinstance(recorded, Result):
                return tensors_by_number[recorded.number]
            if isinstance(recorded, Form):
                if recorded.parameter in parameters:
                    return parameters[recorded.parameter]
                if id(recorded) not in made:
                    made[id(recorded)] = new_tensor(recorded)
                return made[id(recorded)]
            if isinstance(recorded, slice):
                bounds = (recorded.start, recorded.stop, recorded.step)
                return slice(*(value(bound, has_lengths) for bound in bounds))
            return size.length(recorded) if has_lengths and type(recorded) is int else recorded

        for call in self.calls[1:]:
            name = getattr(call.function, "__name__", "")
            value_of = partial(value, has_lengths=name in SHAPED)
            args, options = tree_map(value_of, (call.arguments, dict(call.options)))
            result = call.function(*args, **options)
            tensors = tensors_of(args[0] if name in WRITES else result)
            tensors_by_number.update(zip(call.results, tensors, strict=True))
            tensors_by_number |= call.now_kept()
        return tensors_by_number[self.loss]


class LossRecorder(TorchFunctionMode):
    """Records, while it is ``on``, the calls by which a loss is made; no tensor is kept alive."""

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
        """The recorded calls that a loss depends on; None where no recorded call made it."""
        number = self._numbers.get(loss)
        needed, calls = {number}, list[Called]()
        for call in reversed(self.calls):
            if needed.intersection((*call.results, *call.kept)):
                leaves = tree_leaves((call.arguments, dict(call.options)))
                needed |= {leaf.number for leaf in leaves if isinstance(leaf, Result)}
                kept = {n: place for n, place in call.kept.items() if n in needed}
                calls.append(replace(call, kept=kept))
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
        """Call ``run`` in place of a function of torch or its autograd, and record the call."""
        if not self.on or function is torch.Tensor.backward:
            return run(*args, **kwargs)
        return self._noted(function, run, args, kwargs)

    def called(self, model: torch.nn.Module, run: Callable[..., Any], args: Any, kw: Any) -> Any:
        """Call ``run`` in place of a model, and record the call."""
        self.names |= {id(p): f"{id(model)}.{name}" for name, p in model.named_parameters()}
        output = self._noted(model, run, args, kw)
        kept = kept_by(model)
        places = dict(zip(self._number(list(kept.values())), kept, strict=True))
        self.calls[-1] = replace(self.calls[-1], kept=places)
        self._latest = (self.calls[-1].results, [t.shape for t in tensors_of(output)])
        return output

    def passed(self, output: Any) -> None:
        """Take a wrapper's output for the last model's, if their tensors have the same shapes."""
        tensors = tensors_of(output)
        numbers, shapes = self._latest
        if [t.shape for t in tensors] == shapes:
            self._numbers.update(zip(tensors, numbers, strict=True))

    def _noted(
        self, function: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run ``run`` for ``function``; record the call if it reads a model's output or weights."""
        inputs = tensors_in((args, kwargs))
        weights = self.names if torch.is_grad_enabled() else ()
        is_model = isinstance(function, torch.nn.Module)
        if not (is_model or any(t in self._numbers or id(t) in weights for t in inputs)):
            return run(*args, **kwargs)
        arguments, options = tree_map(self._reference, (tuple(args), kwargs))
        output = run(*args, **kwargs)
        name = getattr(function, "__name__", "")
        tensors = tensors_of(args[0] if name in WRITES else output)
        if tensors or is_model:
            numbers = self._number(tensors)
            self.calls.append(
                Called(function=function, arguments=arguments, options=options, results=numbers)
            )
        return output

    def _number(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Give tensors the next numbers, and return these."""
        for tensor in tensors:
            self._numbers[tensor] = self._count
            self._count += 1
        return tuple(range(self._count - len(tensors), self._count))

    def _reference(self, value: Any) -> Any:
        """How a value is recorded: tensors as ``Result`` or ``Form``, others unchanged."""
        if not isinstance(value, torch.Tensor):
            return tuple(value) if isinstance(value, torch.Size) else value
        if value in self._numbers:
            return Result(self._numbers[value])
        if value not in self._forms:
            self._forms[value] = form_of(value, self.names.get(id(value), ""))
        return self._forms[value]


def kept_by(model: torch.nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """Losses that modules keep as attributes: numbers with gradients, by module and attribute."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.grad_fn is not None
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a model's output, in order: in lists, dicts, and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    elements: Iterable[Any] = ()
    if isinstance(value, Mapping):
        elements = value.values()
    elif isinstance(value, list | tuple):
        elements = value
    elif is_dataclass(value) and not isinstance(value, type):
        elements = [getattr(value, one.name) for one in fields(value)]
    return [tensor for element in elements for tensor in tensors_of(element)]
