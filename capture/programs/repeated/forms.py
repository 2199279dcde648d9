"""Forms: what models and layers are given and return, without memory, to compare passes by."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pickle import Pickler, PicklingError, Unpickler
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from itercast.capture.programs.log import ProgramLog

AS_THEY_ARE = (type, FunctionType, torch.dtype, torch.device)  # compared, not looked into


class UnlikeError(BaseException):
    """Raised where a backward differs from what a repeated pass assumed.

    The program is then captured anew without repetition. No ``except Exception`` stops it.
    """


class Values:
    """Values of a tensor that has data, to be compared with another's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self.numbers = tensor.clone()  # the program may write to it

    def __eq__(self, other: object) -> bool:
        with _disable_current_modes():
            return isinstance(other, Values) and torch.equal(self.numbers, other.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A tensor that a model or layer is given or returns, without its memory.

    ``fact``: what the log knows of its values; ``known`` and ``values`` are the parts of it that
    equality compares.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trains: bool
    on_gpu: bool
    known: Any
    values: Values | None
    fact: Any = field(compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, log: ProgramLog) -> Form:
        """The form of a fake tensor, or of a batch's integers, which have data."""
        fact = log.routing.fact(tensor)
        numbers = getattr(tensor, "constant", None) if fact is None else fact.values
        return cls(
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=tensor.dtype,
            trains=tensor.requires_grad,
            on_gpu=log.gpu_memory.holds(tensor),
            known=fact and (fact.mean, fact.top, fact.drawn, fact.guessed),
            values=None if numbers is None else Values(numbers),
            fact=fact,
        )

    def tensor(self, log: ProgramLog) -> torch.Tensor:
        """A new tensor of this form; what ``log`` knows of the first tensor holds for it too."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        if self.on_gpu:
            log.gpu_memory.add(tensor)
        if self.fact is not None:
            log.routing.facts[tensor] = self.fact
        return tensor


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for input number ``at`` of a pass, where the pass returns or keeps that input."""

    at: int


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
        """A new tensor of this class around a new inner one of the same form."""
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


class _Opening(Pickler):
    """Pickles a value without its leaves, which it collects: tensors, integers, known objects.

    Tensors, similar objects and those whose ids are ``known`` are collected once each.
    """

    def __init__(self, made: BytesIO, known: Collection[int]) -> None:
        super().__init__(made)
        self.known, self.numbers, self.leaves = known, dict[Any, int](), list[Any]()

    def persistent_id(self, one: Any) -> int | None:
        """The number of a leaf; None for a container or object, which is pickled part by part."""
        if isinstance(one, torch.nn.Module):
            raise PicklingError
        if type(one) is int:
            self.leaves.append(one)
            return len(self.leaves) - 1
        if not (isinstance(one, (torch.Tensor, *AS_THEY_ARE)) or id(one) in self.known):
            return None
        name = one if isinstance(one, torch.device) else id(one)
        number = self.numbers.setdefault(name, len(self.leaves))
        if number == len(self.leaves):
            self.leaves.append(one)
        return number


class _Closing(Unpickler):
    """Unpickles a value that ``_Opening`` pickled, with other leaves."""

    def __init__(self, structure: bytes, leaves: Sequence[Any]) -> None:
        super().__init__(BytesIO(structure))
        self.leaves = leaves

    def persistent_load(self, number: int) -> Any:
        """The leaf of this number."""
        return self.leaves[number]


def opened(value: Any, known: Collection[int] = ()) -> tuple[list[Any], bytes]:
    """The leaves of a value (tensors, integers, objects with ``known`` ids), and its structure.

    The structure is bytes, equal for equal structures. Both are empty for values that cannot be
    pickled, such as modules, locks and generators.
    """
    opening = _Opening(made := BytesIO(), known)
    try:
        opening.dump(value)
    except Exception:  # classes say how they are copied: anything may be raised
        return [], b""
    return opening.leaves, made.getvalue()


def closed(leaves: Sequence[Any], structure: bytes) -> Any:
    """A value that was ``opened``, with these leaves in place of its own."""
    return _Closing(structure, leaves).load()


def form_of(leaf: Any, log: ProgramLog) -> Any:
    """A tensor's form (None if it has none); any other leaf as it is, to be compared."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fact = type(leaf) is torch.Tensor and log.routing.fact(leaf)
    told = (type(leaf) is FakeTensor or fact) and leaf.layout == torch.strided
    return Form.of(leaf, log) if told else None


@contextmanager
def unlogged(log: ProgramLog) -> Iterator[None]:
    """Let ops inside the context run unlogged: they are no part of the program."""
    log.paused += 1
    try:
        yield
    finally:
        log.paused -= 1
