"""What is known about the values of fake tensors (masks, counts, indices), and what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from math import isinf
from operator import ge, gt, le, lt
from typing import Any
from unittest.mock import patch
from weakref import finalize

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.collectives import exchanged
from itercast.capture.opcall import Args, Argument, Kwargs

KNOWN_LIMIT = 2**24  # elements of the largest tensor whose values are computed: 0.1 s each

FILLED_LIMIT = 2**20  # elements of one of floats, or that the program filled with a number
# What ops fill a tensor with; one that is drawn is the mean.
NUMBERS = {"zeros": 0, "zero_": 0, "ones": 1, "empty": 0, "rand": 0.5, "uniform_": 0.5}
GIVEN = ("full", "fill_", "scalar_tensor")  # with their last argument
ORDERS = {"gt": gt, "ge": ge, "lt": lt, "le": le}
AND, OR = ("bitwise_and", "logical_and", "mul"), ("bitwise_or", "logical_or")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is known about the values of one fake tensor; all None: nothing.

    ``mean`` is the expected value of an element (masks, counts). ``top``: elements are uniform over
    0..top (indices, running counts; infinity for tokens). ``values`` is a real tensor of the same
    shape with the values themselves. ``drawn``: they were drawn at random. ``guessed``: it rests on
    what is assumed of data that nobody knows.
    """

    mean: float | None = None
    top: float | None = None
    values: Tensor | None = None
    drawn: bool = False
    guessed: bool = False


def is_small_integer(tensor: Tensor) -> bool:
    """Whether a tensor holds integers or a mask, and is small enough to compute its values."""
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    return integers and tensor.layout == torch.strided and tensor.numel() <= KNOWN_LIMIT


def is_computed(tensor: Tensor) -> bool:
    """Whether a tensor's known values are followed: it has few elements, or more integers."""
    few = tensor.layout == torch.strided and tensor.numel() <= FILLED_LIMIT
    return few or is_small_integer(tensor)


def evenly_spread(args: Args, output: Tensor) -> Tensor:
    """Values for randint(high, ...), randint(low, high, ...) or randperm(n): evenly over the range.

    Element i of n is floor(low + (high - low) * (i + 0.5) / n).
    """
    bounds = [a for a in args if isinstance(a, int)]
    low, high = bounds if len(bounds) > 1 else (0, *bounds)
    fractions = (torch.arange(output.numel(), dtype=torch.float64) + 0.5) / max(1, output.numel())
    return (low + (high - low) * fractions).floor().to(output.dtype).reshape(output.shape)


def note_message(facts: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Note the values of tensors that a message fills, as if all ranks sent the same numbers.

    Such are counts of tokens for experts, sizes, and how many ranks have a batch. ``facts``: what
    is known, by tensor; None where nothing is followed.
    """
    if facts is not None:
        _send(facts, *exchanged(func, args, kwargs, result))


def _send(facts: Any, read: Sequence[Tensor], written: Sequence[Tensor], terms: int) -> None:
    """Note what a message writes: the values read, times ``terms``, repeated to fill it.

    ``terms``: how many ranks' equal values are summed. Lists of equal length are sent pair by pair.
    """
    if len(read) == len(written) > 1:
        for sent, filled in zip(read, written, strict=True):
            _send(facts, [sent], [filled], terms)
        return
    read_facts = [facts.get(t) for t in read]
    for tensor in written:
        facts.pop(tensor)
        if isinstance(tensor, FakeTensor):
            tensor.constant = None
    if not read_facts or None in read_facts:
        return
    for tensor in written:
        facts[tensor] = replace(read_facts[0], values=None)
    if any(fact.values is None for fact in read_facts):
        return
    with _disable_current_modes():
        numbers = torch.cat([fact.values.flatten() for fact in read_facts])
        numbers = (numbers * terms).to(numbers.dtype)
        sizes = [tensor.numel() for tensor in written]
        times = -(-sum(sizes) // max(1, len(numbers)))
        parts = numbers.repeat(times)[: sum(sizes)].split(sizes)
        for tensor, values in zip(written, parts, strict=True):
            facts[tensor] = replace(read_facts[0], values=values.reshape(tensor.shape))


def flatten_lists(values: Sequence[Argument]) -> list[Argument]:
    """The values with lists among them replaced by their elements, one level deep."""
    return [v for item in values for v in (item if isinstance(item, list | tuple) else [item])]


def share_passing_finite_check(name: str, args: Args) -> float | None:
    """Share of elements for which a check for NaN or infinity is true if all values are finite.

    Such checks are ``isnan``, ``x == x``, ``x == inf``, and ``_is_all_true``, by which
    ``torch.distributions`` checks arguments. None for any other op.
    """
    if name in ("isnan", "isinf"):
        return 0.0
    if name == "_is_all_true":
        return 1.0
    if name not in ("eq", "ne"):
        return None
    same = args[1] is args[0]
    infinite = isinstance(args[1], float) and isinf(args[1])
    return float((name == "eq") == same) if same or infinite else None


def all_alike(share: float, mask: Tensor) -> Fact:
    """The fact about a mask that is all true (share 1.0), or all false (0.0)."""
    if mask.numel() > FILLED_LIMIT:
        return Fact(mean=share)
    with _disable_current_modes():
        return Fact(mean=share, values=torch.full(mask.shape, bool(share)))


def fact_of_number(name: str, args: Args, output: Tensor) -> Fact | None:
    """The fact about comparing a number that nobody knows; None for other ops.

    Such a number is guessed to be 1, and to differ from any other unknown number.
    """
    if name in ("eq", "ne") and not output.dim():
        return Fact(mean=float(name == "ne"), guessed=True)
    if name in ORDERS and output.numel() == 1 and isinstance(args[1], int | float):
        share = float(ORDERS[name](1, args[1]))
        return Fact(mean=share, guessed=True) if args[1] else all_alike(share, output)
    return None


def overwrites(func: OpOverload) -> bool:
    """Whether an op writes over its first argument."""
    alias = func._schema.arguments[0].alias_info
    return alias is not None and alias.is_write


def is_random(func: OpOverload) -> bool:
    """Whether an op's results are drawn at random."""
    return torch.Tag.nondeterministic_seeded in func.tags


def is_mask(value: object) -> bool:
    """Whether a value selects elements when it is used as an index."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def is_number(value: Argument, number: int) -> bool:
    """Whether a value is this number, and not a tensor."""
    return isinstance(value, int | float) and value == number


def index_axis(name: str, args: Args, kwargs: Kwargs) -> int | None:
    """The axis of which topk, sort, argmax, max or min return indices; None for all elements."""
    place = {"topk": 2, "sort": 1}.get(name, 1)
    default = {"topk": -1, "sort": -1}.get(name)
    axis = kwargs.get("dim", args[place] if len(args) > place else default)
    return axis if isinstance(axis, int) else None


def fact_of_comparison(
    name: str, first: Fact | None, other: Argument, second: Fact | None, args: Args
) -> Fact | None:
    """The fact about a comparison's result, or that of masks combined; None if nothing follows.

    ``first`` is the fact about the first operand, ``second`` that about ``other``.
    """
    if first is None:
        return None
    if first.top and not (name in ("eq", "ne") and args[0].is_floating_point()):
        return _compared_uniform(name, first.top, other)
    if first.mean is None:
        return None
    if name == "cumsum":
        return Fact(top=first.mean * args[0].shape[args[1]])
    if name == "eq" and args[0].dim() == 0 and isinstance(other, int | float):
        return Fact(mean=float(first.mean == other))  # a sum: whether all are
    if name in ("gt", "ne") and is_number(other, 0):
        return Fact(mean=min(1.0, first.mean))
    if name in ("logical_not", "bitwise_not"):
        return Fact(mean=1 - first.mean)
    if second is None or second.mean is None:
        return None
    if name in OR:
        return Fact(mean=1 - (1 - first.mean) * (1 - second.mean))
    return None


def _compared_uniform(name: str, top: float, other: Argument) -> Fact | None:
    """Share of elements uniform over 0..top that equal, exceed or stay below a number."""
    shares = {"eq": 1 / top, "ne": 1 - 1 / top}
    if isinstance(other, int | float):
        below = min(1.0, float(other) / top)
        shares |= {"le": below, "lt": below, "gt": 1 - below, "ge": 1 - below}
    return Fact(mean=shares[name]) if name in shares else None


@cache
def reads_numbers(func: OpOverload) -> bool:
    """Whether numbers in an op's arguments decide what the host gets, or a result's shape."""
    decide = torch.Tag.data_dependent_output in func.tags or func._opname == "histc"
    return decide or torch.Tag.dynamic_output_shape in func.tags


@cache
def may_be_certain(name: str) -> bool:
    """Whether ``filled`` or ``absorbed`` may know an op's values; for most ops neither does."""
    return _fills(name) in (*NUMBERS, *GIVEN) or name.removesuffix("_") in (*AND, *OR)


def _fills(name: str) -> str:
    """The name of an op without "new_" and "_like": zeros of zeros_like."""
    return name.removesuffix("_like").removeprefix("new_")


def filled(name: str, args: Args, output: Argument) -> Tensor | None:
    """Values of a small tensor that an op fills with one number; None where not followed.

    Followed are single numbers and small integer tensors.
    """
    kind = _fills(name)
    number = args[-1] if kind in GIVEN else NUMBERS.get(kind)
    if kind == "uniform_":  # from 0 to 1 where nothing is given
        number = sum((*args[1:], *(0.0, 1.0)[len(args) - 1 :])) / 2
    small = isinstance(output, torch.Tensor) and output.numel() <= FILLED_LIMIT
    if small and kind == "empty":  # whose parts a program fills; until then any number is right
        small = name != "empty_like" and not output.is_floating_point()
    followed = small and (output.numel() == 1 or is_small_integer(output))
    if not isinstance(number, int | float) or not followed:
        return None
    return torch.full(output.shape, number, dtype=output.dtype)


def absorbed(name: str, facts: Sequence[Fact | None], output: Argument) -> Tensor | None:
    """The values of AND with a mask that is all zero, or OR with one that is all one; else None."""
    kind = name.removesuffix("_")
    if kind not in (*AND, *OR) or not isinstance(output, torch.Tensor):
        return None
    for fact in facts:
        if fact is None or fact.values is None or not is_small_integer(fact.values):
            continue
        if kind in AND and not fact.values.any():
            return torch.zeros(output.shape, dtype=output.dtype)
        if kind in OR and output.dtype == torch.bool and fact.values.all():
            return torch.ones(output.shape, dtype=output.dtype)
    return None


MADE = count()  # Facts: a tensor keeps those of a recording that is over


class Facts:
    """What is known by tensor: attributes of these, as each op asks for its tensors' facts."""

    def __init__(self) -> None:
        self.name = f"known, {next(MADE)}"  # an id would come again

    def __setitem__(self, tensor: Tensor, fact: Fact) -> None:
        vars(tensor)[self.name] = fact

    def __contains__(self, tensor: Tensor) -> bool:
        return self.name in vars(tensor)

    def get(self, tensor: Tensor) -> Any:
        return vars(tensor).get(self.name)

    def pop(self, tensor: Tensor) -> Any:
        return vars(tensor).pop(self.name, None)


class Known:
    """What is known of the values of tensors that are alive; ``facts``: by tensor."""

    def __init__(self) -> None:
        self.facts = Facts()
        self._overwritten = set[int]()  # memory of values that are no longer a tensor's
        self.numbers_read = 0  # how often known or guessed numbers decided what a program does

    def fact(self, value: Argument) -> Fact | None:
        """What is known of a tensor; a small real one's values are; None for nothing."""
        if not isinstance(value, torch.Tensor):
            return None
        fact: Fact | None = self.facts.get(value)
        is_real = not (isinstance(value, FakeTensor) or is_functorch_wrapped_tensor(value))
        if fact is None and is_real and is_computed(value):
            fact = Fact(values=value)
        if fact is None or fact.values is None:
            return fact
        overwritten = fact.values.untyped_storage()._cdata in self._overwritten
        replaced = fact.values.shape != value.shape  # what ``tensor.data`` was before
        return None if overwritten or replaced else fact

    def _forget(self, values: Tensor) -> None:
        """Forget tensors that share these values' memory: unknown numbers were written to it."""
        memory = values.untyped_storage()
        self._overwritten.add(memory._cdata)
        finalize(memory, self._overwritten.discard, memory._cdata)

    def _drop(self, tensor: Tensor, overwritten: bool) -> None:
        """Forget a tensor's values; if ``overwritten``, those of tensors that share its memory."""
        fact = self.facts.pop(tensor)
        if overwritten and fact is not None and fact.values is not None:
            self._forget(fact.values)

    def may_fill(self, tensors: Sequence[Argument]) -> None:
        """Forget that tensors are zeros: an unknown kernel ran on them and may fill them."""
        for tensor in tensors:
            fact = self.fact(tensor)
            if fact is not None and fact.values is not None and not fact.values.any():
                self._drop(tensor, overwritten=True)

    def keep(self, tensor: Tensor, values: Tensor) -> None:
        """Note a fake tensor's values, unless they are many: programs look places up by them."""
        has_data = isinstance(tensor, FakeTensor) and not isinstance(values, FakeTensor)
        if has_data and values.numel() <= FILLED_LIMIT:
            self.facts[tensor] = Fact(values=values)

    def known_values(self, tensor: Tensor) -> Tensor | None:
        """A fake tensor's known values, or None; ops that write to the tensor change them."""
        self.numbers_read += 1
        fact = self.fact(tensor) or Fact()
        if fact.values is not None or fact.mean is None or not tensor.is_floating_point():
            return fact.values
        with _disable_current_modes():  # filled with one number
            return torch.full(tensor.shape, fact.mean, dtype=tensor.dtype)

    @contextmanager
    def lists_at_once(self) -> Iterator[None]:
        """Let ``tolist`` of a fake tensor read one element only; torch would read each by itself.

        It returns the known values, else this element repeated. ``numbers_read`` also counts real
        tensors that are listed or handed to NumPy; deep copies keep what is known.
        """
        one_by_one, copy = FakeTensor.tolist, FakeTensor.__deepcopy__

        def noted(read: Any) -> Any:
            def call(tensor: Any, *args: Any, **options: Any) -> Any:
                self.numbers_read += 1
                return read(tensor, *args, **options)

            return call

        def tolist(tensor: Any) -> Any:
            if not (tensor.dim() and tensor.numel()):
                return one_by_one(tensor)
            number, known = tensor[(0,) * tensor.dim()].item(), self.known_values(tensor)
            with _disable_current_modes():
                return (torch.full(tensor.shape, number) if known is None else known).tolist()

        def deepcopy(tensor: Any, memo: Any) -> Any:
            made, fact = copy(tensor, memo), self.fact(tensor)
            if fact is not None:
                with _disable_current_modes():
                    values = None if fact.values is None else fact.values.clone()
                    self.facts[made] = replace(fact, values=values)
            return made

        real: Any = {"tolist": noted(Tensor.tolist), "numpy": noted(Tensor.numpy)}
        fake = patch.multiple(FakeTensor, tolist=tolist, __deepcopy__=deepcopy)
        with fake, patch.multiple(Tensor, create=True, **real):
            yield

    def _known_by_value(self, args: Args) -> bool:
        """Whether there are tensors among the arguments, all with known values."""
        facts = [self.fact(a) for a in flatten_lists(args) if isinstance(a, torch.Tensor)]
        return bool(facts) and all(f is not None and f.values is not None for f in facts)

    def _with_values(self, value: Argument) -> Argument:
        """Arguments with their tensors replaced by known values."""
        if isinstance(value, list | tuple):
            return [self._with_values(v) for v in value]
        fact = self.fact(value)
        return value if fact is None else fact.values
