"""Ops whose results depend on data, run on fake tensors by a convention: balanced routing.

Convention: an index chosen by argmax, topk or sort is uniform over its range, so that ``index ==
e`` is true for an equal share of the elements and every expert takes its share of the tokens,
rounded up. Random integers, and indices drawn by weights, are spread evenly over their range.
Batches are full: no element of an integer input equals a named number (padding). A mask of ones is
all true, a layer that is dropped at random with a rate below one half is kept, and all numbers are
finite. What is known of masks, counts and indices is followed through the ops that routers use; the
values of small integer tensors and masks are computed. An op whose shape depends on unknown data
raises torch's error, unless guesses are asked for. Then a share ``TRUE_SHARE`` of a mask is true,
the same share of values is distinct, and libraries' ops keep this share of rows; repeat counts, and
numbers that the host reads, are 1. The user's checks of such data pass (``user_errors.passing``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, inf, prod
from traceback import StackSummary, extract_stack

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from itercast.capture.base.assumptions import assumed
from itercast.capture.base.user_errors import loop_test, passing, user_line
from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.facts import (
    KNOWN_LIMIT,
    Fact,
    Known,
    absorbed,
    all_alike,
    evenly_spread,
    fact_of_comparison,
    fact_of_number,
    filled,
    flatten_lists,
    index_axis,
    is_computed,
    is_mask,
    is_random,
    is_small_integer,
    may_be_certain,
    overwrites,
    reads_numbers,
    share_passing_finite_check,
)
from itercast.capture.recorder.fake_patches import run_quickly
from itercast.capture.recorder.replaced.corrected import CORRECTED
from itercast.capture.recorder.replaced.expected import expected
from itercast.capture.recorder.replaced.lengths import as_integers_say, of_guessed_length, of_length
from itercast.capture.recorder.sparse import makes_or_takes_sparse, run_with_sparse
from itercast.capture.step import Inputs

TRUE_SHARE: float = assumed(__file__, "true_share")
TURNS_AFTER = int(assumed(__file__, "turns_after"))
NOWHERE = ("", 0), 0
TURNED = f"a number that nobody knows turned after a line had read it {TURNS_AFTER} times"
GUESS = f"data have no values here: {100 * TRUE_SHARE:.0f} % is true in a mask, distinct, or kept"
COUNTED = ("arange", "linspace")
DRAWN = ("randint", "randperm", "multinomial")
ONES = ("ones", "ones_like", "new_ones")
EMPTY = ("empty_like", "new_empty", "new_empty_strided")  # whose values are not their argument's
SCATTERS = ("scatter", "scatter_", "scatter_add", "scatter_add_")
INDEX_OUTPUT = {"argmax": 0, "argmin": 0, "topk": 1, "sort": 1, "max": 1, "min": 1}
# Ops that move elements or copy them: what is known of the input holds for the output.
KEEP = {
    *("alias", "detach", "clone", "_to_copy", "view", "_unsafe_view", "reshape", "permute", "t"),
    *("transpose", "unsqueeze", "squeeze", "expand", "select", "slice", "unbind", "split", "index"),
    *("index_select", "gather", "split_with_sizes", "lift_fresh", "cat", "stack"),
}


class Routing(Known):
    """Runs ops on fake tensors and keeps what is known about the values of integers and masks.

    ``guesses``: a dict if unknown data may be guessed, which gets each guess with the stack where
    it was first made; else None.
    """

    def __init__(self, guesses: dict[str, StackSummary] | None = None) -> None:
        super().__init__()
        self.guesses = guesses
        self.reads = Counter[tuple[str, int]]()  # of guesses, by the user's line
        self.turned = NOWHERE  # the line and instruction that just read one which turned

    def note_inputs(self, inputs: Inputs) -> None:
        """Note that integer inputs without values are tokens: their numbers are unknown."""
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, FakeTensor) and tensor.dtype in (torch.int32, torch.int64):
                self.facts[tensor] = Fact(top=inf)

    def call(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
        """Run an op; a value or a shape that depends on data follows the module's convention."""
        name = func._schema.name.removeprefix("aten::")
        if makes_or_takes_sparse(name, args):
            return run_with_sparse(func, args, kwargs)
        known = self.fact(args[0]) if args else None
        if reads_numbers(func) and (name != "index" or any(map(is_mask, args[1]))):
            self.numbers_read += 1
        if name in ("item", "_local_scalar_dense") and known is not None:
            if known.guessed and args[0].dtype == torch.bool:
                needed = passing(*user_line()[:2])
                if needed is not None:
                    return needed
            number = self._scalar(args[0], known)
            if number is not None:
                return self._turned(number) if known.guessed else number
        shaped = torch.Tag.dynamic_output_shape in func.tags
        if shaped and self._known_by_value(args):
            return self._compute_values(func, args, kwargs)
        if name == "nonzero":
            return self._nonzero(args[0])
        if name == "bincount" and known is not None and known.top and known.top < inf:
            return self._bincount(args, kwargs, known.top)
        if name == "histc" and not args[0].is_floating_point():
            return self._histogram(*args)
        if name in CORRECTED:
            return CORRECTED[name](*args)
        if name == "split_with_sizes" and GUESS in (self.guesses or ()):
            args = (of_length(*args), *args[1:])
        if name != "index" and shaped and self._guesses():
            return self._compute_values(func, self._made_up(name, args, kwargs), kwargs)
        try:
            output = run_quickly(func, args, kwargs)
        except DataDependentOutputException:
            if self.guesses is None:
                raise
            return self._turned(self._guessed_number(name, args))
        except DynamicOutputShapeException:
            output = as_integers_say(self, func, args, kwargs)
            if output is None and self._guesses():
                output = of_guessed_length(TRUE_SHARE, func, args, kwargs)
            if output is None:
                raise
            return output
        self._note_output(func, args, kwargs, output, known)
        return output

    def _guesses(self) -> bool:
        """Whether unknown data are guessed here; if so, note that they were."""
        if self.guesses is not None and GUESS not in self.guesses:
            self.guesses[GUESS] = extract_stack()
        return self.guesses is not None

    def _guessed_number(self, name: str, args: Args) -> Argument:
        """Guess a number that the host reads, or whether two tensors are equal."""
        if name == "equal" and all(t.numel() == 1 for t in args[:2]):
            first, second = (self.fact(t) or Fact() for t in args[:2])
            return first.mean == second.mean and self._guesses()
        if name == "equal" or args[0].dtype == torch.bool:
            return self._guesses()
        return 1.0 if args[0].is_floating_point() else 1

    def _turned(self, number: Argument) -> Argument:
        """A guessed number, negated at every ``TURNS_AFTER``-th read by the same line.

        It ends loops whose condition nobody knows; all reads in one loop test are negated.
        """
        if self.guesses is None:
            return number
        file, line, instruction = user_line()
        place = file, loop_test(file, line)
        self.reads[place] += 1
        turned, before = self.turned
        if self.reads[place] % TURNS_AFTER and (turned != place or instruction <= before):
            self.turned = NOWHERE
            return number
        self.turned = place, instruction
        self.guesses.setdefault(TURNED, extract_stack())
        return not number

    def _made_up(self, name: str, args: Args, kwargs: Kwargs) -> Args:
        """Make up values that nobody knows: repeats are 1, of others ``TRUE_SHARE`` is distinct.

        For ``bincount``, as many values as it has bins.
        """
        at_least = args[2:] if name == "bincount" else ()
        bins = kwargs.get("minlength", next(iter(at_least), 0))

        def with_values(value: Argument) -> Argument:
            fact = self.fact(value)
            if not isinstance(value, FakeTensor) or (fact is not None and fact.values is not None):
                return value
            top = fact.top if fact is not None and fact.top is not None else inf
            distinct = bins or int(min(top, ceil(TRUE_SHARE * value.numel())))
            return evenly_spread((1, 2) if name == "repeat_interleave" else (0, distinct), value)

        with _disable_current_modes():
            return tuple(map(with_values, args))

    def drawn(self, tensor: Tensor) -> bool:
        """Whether a tensor holds random integers, or was computed from such: the host drew them."""
        fact = self.fact(tensor)
        return fact is not None and fact.drawn

    def _note_output(
        self, func: OpOverload, args: Args, kwargs: Kwargs, output: Argument, known: Fact | None
    ) -> None:
        """Note what is known of an op's output; ``known`` is the fact about its first argument."""
        name = func._schema.name.removeprefix("aten::")
        if known is not None and known.values is not None and overwrites(func):
            if is_random(func) or not self._known_by_value(args):
                self._forget(known.values)
                self.facts[args[0]] = self._expected(name, args)
            else:
                self._note_values(func, args, kwargs, output)
            return
        if self.guesses is not None and self._note_certain(name, args, output):
            return
        if isinstance(out := kwargs.get("out"), torch.Tensor):
            if self._known_by_value((*args, out)):
                self._note_values(func, args, {**kwargs, "out": self._with_values(out)}, output)
            else:
                self._drop(out, overwritten=True)
            return
        if name in ONES:
            self.facts[output] = Fact(mean=1.0)
        elif name == "rand":
            self.facts[output] = Fact(top=1.0)
        elif name in DRAWN and is_small_integer(output):
            chosen = name == "multinomial"  # by weights that the host need not have
            range_ = args[0].shape[-1:] if chosen else args
            with _disable_current_modes():
                self.facts[output] = Fact(values=evenly_spread(range_, output), drawn=not chosen)
        elif (share := share_passing_finite_check(name, args)) is not None:
            self.facts[output] = all_alike(share, output)
        elif name in COUNTED or (name not in EMPTY and self._known_by_value(args)):
            self._note_values(func, args, kwargs, output)
        elif known is not None and func._schema.is_mutable:
            self.facts[args[0]] = self._expected(name, args)
        elif args and isinstance(args[0], list) and overwrites(func):
            for tensor in args[0]:
                self._drop(tensor, overwritten=True)
        elif known is not None or name in INDEX_OUTPUT or name in ("eq", *SCATTERS):
            self._note_derived(name, args, kwargs, output, known)
            if known is not None and known.guessed:
                self._note_guessed(output)
        unknown = isinstance(output, torch.Tensor) and output not in self.facts
        if self.guesses is not None and unknown and output.dtype == torch.bool:
            guess = Fact(mean=TRUE_SHARE, guessed=True)
            self.facts[output] = fact_of_number(name, args, output) or guess

    def _note_certain(self, name: str, args: Args, output: Argument) -> bool:
        """Note a result that does not depend on the unknown values; returns whether it is such."""
        if not may_be_certain(name):
            return False
        with _disable_current_modes():
            values = filled(name, args, output)
            if values is None:
                values = absorbed(name, [self.fact(a) for a in args], output)
        if values is not None:
            self.facts[output] = Fact(values=values, mean=1.0 if name in ONES else None)
        return values is not None

    def _note_guessed(self, output: Argument) -> None:
        """Note that what is known of results follows from a guess."""
        for tensor in flatten_lists([output]):
            if isinstance(tensor, torch.Tensor) and (fact := self.facts.get(tensor)) is not None:
                self.facts[tensor] = replace(fact, guessed=True)

    def _scalar(self, tensor: Tensor, fact: Fact) -> Argument:
        """The number in a tensor without axes; None if nothing says what it is."""
        if fact.guessed and tensor.dtype == torch.bool:
            self._guesses()
        if fact.values is not None:
            with _disable_current_modes():
                return fact.values.item()
        if fact.mean is None:
            return None
        if tensor.dtype == torch.bool:
            return fact.mean >= 0.5
        return fact.mean if tensor.is_floating_point() else round(fact.mean)

    def _count(self, mask: Tensor) -> int | None:
        """Number of true elements of a mask: mean times size, rounded up; None if unknown."""
        fact = self.fact(mask) or Fact()
        unknown = fact.mean is None and fact.values is None
        if (unknown or fact.guessed) and not self._guesses():
            return None
        if unknown:
            fact = self.facts[mask] = Fact(mean=TRUE_SHARE, guessed=True)
        if fact.values is not None:
            with _disable_current_modes():
                return int((fact.values != 0).sum())
        share = min(1.0, fact.mean or 0.0)
        count: int = ceil(share * mask.numel() - 1e-6)
        return count

    def _nonzero(self, mask: Tensor) -> Argument:
        """As ``nonzero``, with the expected number of positions, in a vector the first ones."""
        count = self._count(mask)
        if count is None:
            return torch.ops.aten.nonzero.default(mask)
        output = mask.new_empty((count, mask.dim()), dtype=torch.int64)
        if mask.dim() == 1 and mask.numel() <= KNOWN_LIMIT:
            with _disable_current_modes():
                self.facts[output] = Fact(values=torch.arange(count)[:, None])
        return output

    def _bincount(self, args: Args, kwargs: Kwargs, top: float) -> Argument:
        """Return the bincount of balanced routing: every number below ``top`` is as frequent."""
        least = kwargs.get("minlength", args[2] if len(args) > 2 else 0) or 0
        output = args[0].new_empty((max(int(top), least),), dtype=torch.int64)
        self._spread(output, args[0].numel(), int(top))
        return output

    def _histogram(self, numbers: Tensor, bins: int = 100, *bounds: float) -> Tensor:
        """As ``histc`` of integers, which only CUDA has: each bin has an equal count."""
        output = numbers.new_empty((bins,))
        self._spread(output, numbers.numel(), bins)
        return output

    def _spread(self, output: Argument, total: int, over: int) -> None:
        """Note counts in ``output`` that add up to ``total`` and differ by at most one."""
        with _disable_current_modes():
            values = torch.zeros(output.shape, dtype=output.dtype)
            values[:over] = total // over
            values[: total % over] += 1
        self.facts[output] = Fact(values=values)

    def _note_derived(
        self, name: str, args: Args, kwargs: Kwargs, output: Argument, known: Fact | None
    ) -> None:
        """Keep what follows from indices, copies, sums and comparisons."""
        first = args[0]
        if name in INDEX_OUTPUT and first.dim():
            axis = index_axis(name, args, kwargs)
            outputs = output if isinstance(output, tuple) else (output,)
            if axis is not None and len(outputs) > INDEX_OUTPUT[name]:
                self.facts[outputs[INDEX_OUTPUT[name]]] = Fact(top=first.shape[axis])
            if axis is not None and name == "max" and known is not None and known.mean is not None:
                self.facts[outputs[0]] = Fact(mean=min(1.0, known.mean * first.shape[axis]))
        elif known is not None and known.values is None and name in KEEP:
            for tensor in output if isinstance(output, list | tuple) else (output,):
                self.facts[tensor] = known
        elif known is not None and name == "sum":
            self._note_sum(first, output, known)
        elif known is not None and known.mean is not None and name == "any":
            expected_true = known.mean * first.numel() / max(1, output.numel())
            self.facts[output] = Fact(mean=min(1.0, expected_true))
        elif known is not None and known.mean is not None and name == "all":
            self.facts[output] = Fact(mean=float(known.mean >= 1))
        else:
            other = args[1] if len(args) > 1 else None
            fact = fact_of_comparison(name, known, other, self.fact(other), args)
            fact = fact or expected(name, args, [self.fact(a) for a in args])
            if fact is not None:
                self.facts[output] = fact

    def _expected(self, name: str, args: Args) -> Fact:
        """What follows of means for a tensor that an op makes or overwrites; else nothing."""
        return expected(name, args, [self.fact(a) for a in args]) or Fact()

    def _note_sum(self, first: Tensor, output: Argument, known: Fact) -> None:
        """Note a sum of a mask or of counts: its mean; for a sum into a vector, equal counts."""
        if known.mean is None:
            return
        total = known.mean * first.numel()
        if output.dim() == 1 and 0 < output.numel() <= KNOWN_LIMIT:
            self._spread(output, round(total), output.numel())
        else:
            self.facts[output] = Fact(mean=total / max(1, prod(output.shape)))

    def _note_values(self, func: OpOverload, args: Args, kwargs: Kwargs, output: Argument) -> None:
        """Compute an op on known values, and keep its results."""
        outputs = [t for t in flatten_lists([output]) if isinstance(t, torch.Tensor)]
        if is_random(func) or not all(map(is_computed, outputs)):
            for tensor in outputs:
                self._drop(tensor, overwrites(func))
            return
        drawn = any(f is not None and f.drawn for f in map(self.fact, flatten_lists(args)))
        if kwargs.get("device") is not None:  # on meta it would have no values
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with _disable_current_modes():
            result = func(*self._with_values(args), **kwargs)
        for tensor, values in zip(flatten_lists([output]), flatten_lists([result]), strict=True):
            if isinstance(tensor, torch.Tensor):
                self.facts[tensor] = Fact(values=values, drawn=drawn)

    def _compute_values(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
        """The outputs of an op whose shapes depend on known values: fake tensors, values noted."""
        with _disable_current_modes():
            result = func(*self._with_values(args), **kwargs)
        values = flatten_lists([result])
        outputs = [torch.empty(t.shape, dtype=t.dtype) for t in values]
        for tensor, known in zip(outputs, values, strict=True):
            self.facts[tensor] = Fact(values=known)
        return tuple(outputs) if isinstance(result, tuple) else outputs[0]
