"""Tells which layers of a model are equal: those of a list whose modules hold the same.

Numbers that count layers may differ, unless their code computes with them: a layer that does more
where its number is a multiple of four looks like its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from dis import get_instructions
from types import FunctionType
from typing import Any

import torch

from itercast.capture.programs.gpus.devices import parts

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
FEWEST = 6  # layers in a list of which some are left out
LAST = 3  # of a kind that run: two of them alike, one after them that may be unlike
DEEP = 3  # objects in objects that are looked at
BY_OTHERS = ("_parameters", "_modules", "_buffers")  # their tensors and modules are told apart
OUTSIDE = frozenset(  # what code does that uses more than its arguments
    ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "STORE_GLOBAL", "IMPORT_NAME", "MAKE_FUNCTION")
)
COMPUTED = frozenset(  # what code does next to a number that it computes with, or keeps
    (
        *("BINARY_OP", "BINARY_SUBSCR", "COMPARE_OP", "CONTAINS_OP", "STORE_FAST"),
        *("TO_BOOL", "UNARY_NOT", "POP_JUMP_IF_FALSE", "POP_JUMP_IF_TRUE"),
    )
)
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A layer in its list; ``last``: few of its kind, or none, come after it."""

    layers: Sequence[torch.nn.Module]
    at: int
    last: bool

    def held(self) -> Any:
        """What the layer holds, as others of its kind do; None where hooks may do anything."""
        return _held(self.layers, self.at)


def places(model: torch.nn.Module) -> Iterator[tuple[int, Place]]:
    """The layers of a model by their ids: elements of the outermost long lists."""
    for one in model.children():
        layers = list(one.children())
        if not (isinstance(one, LISTS) and len(layers) >= FEWEST):
            yield from places(one)
            continue
        if _compute_with_their_place(layers):
            continue
        kinds = [_held(layers, at) for at in range(len(layers))]
        for at, layer in enumerate(layers):
            last = kinds[at + 1 :].count(kinds[at]) < LAST
            yield id(layer), Place(layers=layers, at=at, last=last)


def _compute_with_their_place(layers: Sequence[torch.nn.Module]) -> bool:
    """Whether code of layers computes with numbers that count them, and not only hands them on."""
    first, second = (list(layer.modules()) for layer in layers[:2])
    names = {
        name
        for one, other in zip(first, second, strict=False)
        for name, value in vars(one).items()
        if type(value) is int and vars(other).get(name) == value + 1
    }
    kinds = {kind for one in first for kind in type(one).__mro__}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.nn.modules.module")]
    functions = [f for kind in own for f in vars(kind).values() if isinstance(f, FunctionType)]
    return bool(names) and any(_computes_with(f, names) for f in functions)


def _computes_with(function: FunctionType, names: set[str]) -> bool:
    done = list(get_instructions(function))
    read = (i for i, one in enumerate(done) if one.opname == "LOAD_ATTR" and one.argval in names)
    following = (done[i + 1 : i + 3] for i in read)
    return function.__name__ != "__init__" and any(
        one.opname in COMPUTED for some in following for one in some
    )


def uses_arguments_alone(hook: Any) -> bool:
    """Whether a hook's Python does the same in each pass: all that it can change is compared."""
    if not isinstance(hook, FunctionType) or hook.__defaults__ or hook.__kwdefaults__:
        return False
    return OUTSIDE.isdisjoint(one.opname for one in get_instructions(hook))


def hooked(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether modules have hooks that may do anything; those of tensor parallelism do not."""
    hooks = [hook for one in modules for n in FORWARD_HOOKS for hook in getattr(one, n).values()]
    backward = any(getattr(one, name) for one in modules for name in BACKWARD_HOOKS)
    return backward or not all(_known(hook) or uses_arguments_alone(hook) for hook in hooks)


def _known(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor")


def _held(layers: Sequence[torch.nn.Module], at: int) -> Any:
    first, module = layers[0], layers[at]
    names = [name for name, _ in first.named_modules()]
    inner, known = list(module.modules()), list(first.modules())
    if hooked(inner[1:]) or len(inner) != len(known) or _keep_results(inner):
        return None
    pairs = zip(names, inner, known, strict=True)
    facts = [(name, type(one), _of(vars(one), vars(other), at, DEEP)) for name, one, other in pairs]
    return facts, [tensor_held(t) for t in (*module.parameters(), *module.buffers())]


def _keep_results(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether modules hold what backward goes through, as a mixture's loss of balance."""
    values = [value for one in modules for value in vars(one).values()]
    lists = [value for value in values if isinstance(value, list | tuple)]
    every = (*values, *(x for some in lists for x in some))
    return any(isinstance(x, torch.Tensor) and x.grad_fn is not None for x in every)


def _of(value: Any, first: Any, at: int, deep: int) -> Any:
    """What is the same in equal layers, of an attribute of the one at a place and of the first.

    Numbers that count layers are, and fractions that depend on depth, zero or not.
    """
    if isinstance(value, torch.Tensor):
        return tensor_held(value)
    if type(value) is type(first) is int and 0 < at == value - first:
        return "place"
    if type(value) is type(first) is float and value != first:
        return float, value > 0
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device | type(None)):
        return value
    if value is first or deep == 0:
        return type(value)
    if isinstance(value, dict):
        of = first if isinstance(first, dict) else {}
        pairs = value.items() if len(value) <= 100 else ()
        inner = [(k, _of(v, of.get(k), at, deep - 1)) for k, v in pairs if k not in BY_OTHERS]
        return type(value), len(value), [one for one in inner if type(one[0]) is str]
    if isinstance(value, tuple) and isinstance(first, tuple) and len(value) == len(first):
        return [_of(v, of, at, deep - 1) for v, of in zip(value, first, strict=True)]
    if isinstance(value, list | tuple | set):
        return type(value), len(value)
    if hasattr(value, "__code__"):
        return value.__code__
    inside = not isinstance(value, torch.nn.Module) and hasattr(value, "__dict__")
    return type(value), _of(
        vars(value), getattr(first, "__dict__", {}), at, deep - 1
    ) if inside else 0


def tensor_held(tensor: Any) -> Any:
    """What of a parameter or buffer is the same in equal layers; None where a hook is on it."""
    if tensor._backward_hooks:
        return None
    inner = [(tuple(t.shape), t.stride(), t.dtype) for t in parts(tensor)]
    trains = tensor.requires_grad, tensor.is_leaf and tensor.grad is None
    placed = getattr(tensor, "placements", None)
    return type(tensor), tuple(tensor.shape), tensor.dtype, trains, placed, inner
