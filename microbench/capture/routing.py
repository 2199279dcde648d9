"""Balanced routing: what data-dependent ops answer in a capture, where no tensor holds data.

Convention: an index chosen by argmax, topk or sort is uniform over its range, so ``index == e`` is
true for an equal share of the elements; every expert takes its share of the tokens, rounded up.
Batches are full: integers that are given equal none that is named (padding). A mask of ones is all
true, a layer dropped at random by less than half is not dropped, and numbers are finite.
Facts about masks, counts and indices are followed through the ops that routers use, and the values
of small integers and masks that are given for real; an op whose shape depends on data of which
nothing is known stays an error.
"""

from __future__ import annotations

from math import ceil, inf, prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from microbench.capture.facts import (
    KNOWN_LIMIT,
    Fact,
    compared,
    finite,
    flat,
    index_axis,
    is_mask,
    is_number,
    worth_following,
)
from microbench.capture.meta_answers import answered

ONES = ("ones", "ones_like", "new_ones")
INDEX_OUTPUT = {"argmax": 0, "argmin": 0, "topk": 1, "sort": 1, "max": 1, "min": 1}
KEEP = {
    *("alias", "detach", "clone", "_to_copy", "view", "_unsafe_view", "reshape", "permute", "t"),
    *("transpose", "unsqueeze", "squeeze", "expand", "select", "slice", "unbind", "split", "index"),
    *("index_select", "gather", "split_with_sizes", "lift_fresh"),
}


class Routing:
    """Runs ops under fake tensors and follows facts; answers those whose shape depends on data."""

    def __init__(self) -> None:
        self.facts: Any = WeakIdKeyDictionary()

    def given(self, inputs: Any) -> None:
        """Takes note of a model's inputs: of integers without values no number is known."""
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, FakeTensor) and tensor.dtype in (torch.int32, torch.int64):
                self.facts[tensor] = Fact(top=inf)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op's result, a value or a shape by convention where it depends on data."""
        name = func._schema.name.removeprefix("aten::")
        known = self._of(args[0]) if args else None
        if name in ("item", "_local_scalar_dense") and known is not None:
            answer = self._scalar(args[0], known)
            if answer is not None:
                return answer
        if torch.Tag.dynamic_output_shape in func.tags and self._known_by_value(args):
            return self._by_value(func, args, kwargs)
        if name == "nonzero" and known is not None:
            return self._nonzero(args[0])
        if name == "bincount" and known is not None and known.top and known.top < inf:
            return self._bincount(args, kwargs, known.top)
        if (answer := answered(name, args)) is not None:
            return answer
        if name == "index" and any(is_mask(i) for i in args[1]):
            args = (args[0], self._positions(args[1]))
        if name == "masked_select" and (count := self._count(args[1])) is not None:
            share = max(args[0].numel(), args[1].numel()) // args[1].numel()
            return args[0].new_empty((count * share,))
        output = func(*args, **kwargs)
        if name in ONES:
            self.facts[output] = Fact(mean=1.0)
        elif name == "rand":
            self.facts[output] = Fact(top=1.0)
        elif (share := finite(name, args)) is not None:
            self.facts[output] = Fact(mean=share)
        elif name == "arange" or self._known_by_value(args):
            self._follow_values(func, args, kwargs, output)
        elif known is not None and func._schema.is_mutable:
            self.facts[args[0]] = Fact()  # overwritten by what is not known
        elif known is not None or name in INDEX_OUTPUT or name in ("scatter", "scatter_", "eq"):
            self._follow(name, args, kwargs, output, known)
        return output

    def _scalar(self, tensor: Any, fact: Fact) -> Any:
        if fact.values is not None:
            with _disable_current_modes():
                return fact.values.item()
        if fact.mean is None:
            return None
        if tensor.dtype == torch.bool:
            return fact.mean >= 0.5
        return fact.mean if tensor.is_floating_point() else round(fact.mean)

    def _count(self, mask: Any) -> int | None:
        fact = self._of(mask)
        if fact is None or (fact.mean is None and fact.values is None):
            return None
        if fact.values is not None:
            with _disable_current_modes():
                return int((fact.values != 0).sum())
        share = min(1.0, fact.mean or 0.0)
        count: int = ceil(share * mask.numel() - 1e-6)
        return count

    def _nonzero(self, mask: Any) -> Any:
        """Positions of the expected number of elements; the first ones where their count is."""
        count = self._count(mask)
        if count is None:
            return torch.ops.aten.nonzero.default(mask)
        output = mask.new_empty((count, mask.dim()), dtype=torch.int64)
        if mask.dim() == 1 and mask.numel() <= KNOWN_LIMIT:
            with _disable_current_modes():
                self.facts[output] = Fact(values=torch.arange(count)[:, None])
        return output

    def _bincount(self, args: Any, kwargs: Any, top: float) -> Any:
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        output = args[0].new_empty((max(int(top), least),), dtype=torch.int64)
        self._spread(output, args[0].numel(), int(top))
        return output

    def _spread(self, output: Any, total: int, over: int) -> None:
        """Counts that differ by at most one and add up to ``total``."""
        with _disable_current_modes():
            values = torch.zeros(output.shape, dtype=torch.int64)
            values[:over] = total // over
            values[: total % over] += 1
        self.facts[output] = Fact(values=values)

    def _positions(self, indices: Any) -> list[Any]:
        """Boolean masks among indices as positions, one index tensor per axis of the mask."""
        found: list[Any] = []
        for index in indices:
            if not is_mask(index):
                found.append(index)
                continue
            count = self._count(index)
            if count is None:  # the op itself says what it cannot do
                return list(indices)
            found += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
        return found

    def _follow(self, name: str, args: Any, kwargs: Any, output: Any, known: Fact | None) -> None:
        first = args[0]
        if name in INDEX_OUTPUT and first.dim():
            axis = index_axis(name, args, kwargs)
            outputs = output if isinstance(output, tuple) else (output,)
            if axis is not None and len(outputs) > INDEX_OUTPUT[name]:
                self.facts[outputs[INDEX_OUTPUT[name]]] = Fact(top=first.shape[axis])
        elif name in ("scatter", "scatter_") and known is None and is_number(args[3], 1):
            axis, index = args[1], args[2]
            self.facts[output] = Fact(mean=index.shape[axis] / first.shape[axis])
        elif known is not None and name in KEEP:
            for one in output if isinstance(output, list | tuple) else (output,):
                self.facts[one] = known
        elif known is not None and name == "sum":
            self._follow_sum(first, output, known)
        elif known is not None and known.mean is not None and name == "any":
            each = known.mean * first.numel() / max(1, output.numel())
            self.facts[output] = Fact(mean=min(1.0, each))
        elif known is not None and known.mean is not None and name == "all":
            self.facts[output] = Fact(mean=float(known.mean >= 1))
        else:
            other = args[1] if len(args) > 1 else None
            fact = compared(name, known, other, self._of(other), args)
            if fact is not None:
                self.facts[output] = fact

    def _of(self, value: Any) -> Fact | None:
        """What is known of a tensor; of a real one its values, where they are worth following."""
        if not isinstance(value, torch.Tensor):
            return None
        found: Fact | None = self.facts.get(value)
        if found is None and not isinstance(value, FakeTensor) and worth_following(value):
            return Fact(values=value)
        return found

    def _known_by_value(self, args: Any) -> bool:
        """Whether there are tensors among the arguments and the values of all are known."""
        found = [self._of(a) for a in flat(args) if isinstance(a, torch.Tensor)]
        return bool(found) and all(f is not None and f.values is not None for f in found)

    def _follow_values(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Does with the values what was done with the fake tensors; integers and masks only."""
        found = [t for t in flat([output]) if isinstance(t, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or not all(map(worth_following, found)):
            for tensor in found:
                self.facts.pop(tensor, None)
            return
        with _disable_current_modes():
            result = func(*self._real(args), **kwargs)
        for fake, values in zip(flat([output]), flat([result]), strict=True):
            if isinstance(fake, torch.Tensor):
                self.facts[fake] = Fact(values=values)

    def _by_value(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of an op whose shapes the values of its arguments say."""
        with _disable_current_modes():
            result = func(*self._real(args), **kwargs)
        found = [torch.empty(t.shape, dtype=t.dtype) for t in flat([result])]
        for fake, values in zip(found, flat([result]), strict=True):
            self.facts[fake] = Fact(values=values)
        return tuple(found) if isinstance(result, tuple) else found[0]

    def _real(self, value: Any) -> Any:
        """Arguments with the values of their tensors."""
        if isinstance(value, list | tuple):
            return [self._real(v) for v in value]
        fact = self._of(value)
        return value if fact is None else fact.values

    def _follow_sum(self, first: Any, output: Any, known: Fact) -> None:
        if known.mean is None:
            return
        total = known.mean * first.numel()
        if output.dim() == 1 and 0 < output.numel() <= KNOWN_LIMIT:
            self._spread(output, round(total), output.numel())
        else:
            self.facts[output] = Fact(mean=total / max(1, prod(output.shape)))
