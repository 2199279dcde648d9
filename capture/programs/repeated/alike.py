"""Decides which passes of a model, and which layers of a list, are equal: one stands for others.

Numbers that count layers may differ, unless code of the layers computes with them: a layer that
does more if its number is a multiple of four has the same attributes as its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dis import get_instructions
from types import FunctionType
from typing import Any

import torch

from itercast.capture.programs.gpus.devices import parts
from itercast.capture.programs.reducer import Reducer
from itercast.capture.recorder.fake import below_transforms
from itercast.capture.recorder.watch import attributes

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
FEWEST = 6  # layers in a list of which some are left out
RUN = 3  # the last of a kind, which run: two of them alike, one after them that may be unlike
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
OF_TORCH = ("torch.distributed.tensor",)  # whose hooks do the same in each pass
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Layer ``number`` of a list of equal ones. ``kinds``: what passes of these layers launched.

    ``awaits_backward``: it may be repeated only once its own backward was seen, as fewer than
    ``RUN`` equal layers follow.
    """

    layers: Sequence[torch.nn.Module]
    number: int
    awaits_backward: bool
    kinds: list[Any]

    def held(self, graph: bool = True) -> Any:
        """What equal layers have in common; None where hooks may do anything."""
        return _held(self.layers, self.number)

    def takes(self, trained: Sequence[torch.Tensor]) -> bool:
        """Whether a layer may be repeated that is given these tensors with gradients."""
        return len(trained) == 1 and trained[0].grad_fn is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model; ``outermost`` is the outermost wrapper (DDP...) around it, or the model itself.

    ``kinds``: what its passes launched since its attributes last changed. ``library``: the library
    whose wrapper has a ``backward`` of its own (DeepSpeed), or "". The hooks of that library gather
    and free parameters and send gradients; they belong to each pass, which leaves everything as it
    was before.
    """

    model: Any
    outermost: Any
    kinds: list[Any]
    library: str = ""
    awaits_backward = True

    def held(self, graph: bool = True) -> Any:
        """What has to be the same for two passes to be equal; None if the model cannot be repeated.

        These are its attributes, and of each parameter id, requires_grad, dtype, memory and, before
        a backward (``graph``), the dtype of its gradient: a pass that makes the first gradients
        differs.
        """
        parameters, modules = list(self.model.parameters()), list(self.model.modules())
        others = hooked(modules[1:]) or (graph and any(map(_hooked, parameters)))
        if (others and not self.library) or (graph and not self.model.training):
            return None
        held = attributes(self.outermost)
        if self.library:
            held = attributes(self.model, _counters(modules))
        memory = [below_transforms(p).untyped_storage() for p in parameters]
        facts = [m.nbytes() if self.library else m._cdata for m in memory]
        gradients = [graph and p.grad is not None and p.grad.dtype for p in parameters]
        trains = [p.requires_grad for p in parameters]
        dtypes = [p.dtype for p in parameters]
        return held, [*map(id, parameters)], trains, dtypes, facts, gradients

    def gradients(self) -> list[int]:
        """The id of each parameter's gradient, which passes do not replace."""
        return [id(p.grad) for p in self.model.parameters()]

    def takes(self, trained: Sequence[torch.Tensor]) -> bool:
        """Whether it may be repeated: no graph goes on outside it, towards its inputs."""
        return not trained


def _counters(modules: Sequence[torch.nn.Module]) -> set[str]:
    """Names of integers that no method of the modules mentions: a library's counters."""
    functions = _functions({cls for module in modules for cls in type(module).__mro__})
    named = {name for function in functions for name in function.__code__.co_names}
    return {n for m in modules for n, value in vars(m).items() if type(value) is int} - named


def _functions(classes: Iterable[type]) -> list[FunctionType]:
    """The functions of classes other than ``torch.nn.Module``."""
    own = [cls for cls in classes if not cls.__module__.startswith("torch.nn.modules.module")]
    return [f for cls in own for f in vars(cls).values() if isinstance(f, FunctionType)]


def layers_of(model: torch.nn.Module) -> Iterator[tuple[int, Layer]]:
    """The layers of a model, by id(layer): elements of its lists of ``FEWEST`` modules or more.

    Lists inside such a list count as parts of its layers."""
    for child in model.children():
        layers = list(child.children())
        if not (isinstance(child, LISTS) and len(layers) >= FEWEST):
            yield from layers_of(child)
            continue
        if _compute_with_their_number(layers):
            continue
        held, kinds = [_held(layers, at) for at in range(len(layers))], list[Any]()
        for at, layer in enumerate(layers):
            awaits = held[at + 1 :].count(held[at]) < RUN
            yield id(layer), Layer(layers=layers, number=at, awaits_backward=awaits, kinds=kinds)


def _compute_with_their_number(layers: Sequence[torch.nn.Module]) -> bool:
    """Whether code of layers computes with attributes that count layers, beside passing them on.

    An attribute counts layers where the second layer's value is the first one's plus 1.
    """
    first, second = (list(layer.modules()) for layer in layers[:2])
    counters = {
        name
        for module, next_module in zip(first, second, strict=False)
        for name, value in vars(module).items()
        if type(value) is int and vars(next_module).get(name) == value + 1
    }
    classes = {cls for module in first for cls in type(module).__mro__}
    return bool(counters) and any(_computes_with(f, counters) for f in _functions(classes))


def _computes_with(function: FunctionType, names: set[str]) -> bool:
    """Whether a function reads one of these attributes, and soon computes with it.

    That is, in one of the next two opcodes. ``__init__`` is exempt: what it computes is compared as
    an attribute.
    """
    if function.__name__ == "__init__":
        return False
    code = list(get_instructions(function))
    reads = (
        i for i, step in enumerate(code) if step.opname == "LOAD_ATTR" and step.argval in names
    )
    return any(step.opname in COMPUTED for i in reads for step in code[i + 1 : i + 3])


def uses_arguments_alone(hook: Any) -> bool:
    """Whether a hook is a function that uses its arguments alone, so that repeating it is safe."""
    if not isinstance(hook, FunctionType) or hook.__defaults__ or hook.__kwdefaults__:
        return False
    return OUTSIDE.isdisjoint(step.opname for step in get_instructions(hook))


def hooked(modules: Sequence[torch.nn.Module], known: tuple[str, ...] = OF_TORCH) -> bool:
    """Whether modules have hooks that may do anything; those of ``known`` packages do not."""
    hooks = [hook for m in modules for name in FORWARD_HOOKS for hook in getattr(m, name).values()]
    backward = any(getattr(module, name) for module in modules for name in BACKWARD_HOOKS)
    others = (h for h in hooks if not str(getattr(h, "__module__", "")).startswith(known))
    return backward or not all(map(uses_arguments_alone, others))


def _hooked(parameter: Any) -> bool:
    """Whether a parameter's gradient has hooks that are not DDP's reducer's."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or not all(
        isinstance(getattr(hook, "__self__", None), Reducer) for hook in after
    )


def _held(layers: Sequence[torch.nn.Module], at: int) -> Any:
    """What layer ``at`` of a list holds, to be compared: two layers with equal results are equal.

    Attributes are described relative to the first layer's. None if the layer cannot be repeated.
    """
    first, module = layers[0], layers[at]
    names = [name for name, _ in first.named_modules()]
    inner, inner_of_first = list(module.modules()), list(first.modules())
    if hooked(inner[1:]) or len(inner) != len(inner_of_first) or _keep_results(inner):
        return None
    facts = [
        (name, type(part), _in_common(vars(part), vars(part_of_first), at, DEEP))
        for name, part, part_of_first in zip(names, inner, inner_of_first, strict=True)
    ]
    return facts, [tensor_held(t) for t in (*module.parameters(), *module.buffers())]


def _keep_results(modules: Sequence[torch.nn.Module]) -> bool:
    """Whether modules keep tensors that backward goes through, as a balance loss of experts."""
    values = [value for module in modules for value in vars(module).values()]
    lists = [value for value in values if isinstance(value, list | tuple)]
    every = (*values, *(x for elements in lists for x in elements))
    own = [x for x in every if isinstance(x, torch.Tensor) and not _of_parameter(x)]
    return any(x.grad_fn is not None for x in own)


def _of_parameter(tensor: Any) -> bool:
    """Whether a tensor is a view of a parameter: weights that FSDP cuts anew in each pass."""
    return isinstance(tensor._base, torch.nn.Parameter)


def _in_common(value: Any, first: Any, at: int, depth: int) -> Any:
    """Describes an attribute of layer ``at``, such that equal layers have equal descriptions.

    ``first``: the same attribute of the first layer. An integer that is larger by ``at`` counts
    layers and becomes "place". Of floats that differ, such as a drop rate that depends on depth,
    only the sign counts. ``depth``: how many levels of nested objects are still described.
    """
    if isinstance(value, torch.Tensor):
        return tuple(value.shape) if _of_parameter(value) else tensor_held(value)
    if type(value) is type(first) is int and 0 < at == value - first:
        return "place"
    if type(value) is type(first) is float and value != first:
        return float, value > 0
    if isinstance(value, bool | int | float | str | torch.dtype | torch.device | type(None)):
        return value
    if value is first or depth == 0:
        return type(value)
    if isinstance(value, dict):
        firsts = first if isinstance(first, dict) else {}
        inner = [
            (name, _in_common(element, firsts.get(name), at, depth - 1))
            for name, element in (value.items() if len(value) <= 100 else ())
            if type(name) is str and name not in BY_OTHERS
        ]
        return type(value), len(value), inner
    if isinstance(value, tuple) and isinstance(first, tuple) and len(value) == len(first):
        return [_in_common(v, f, at, depth - 1) for v, f in zip(value, first, strict=True)]
    if isinstance(value, list | tuple | set):
        return type(value), len(value)
    if hasattr(value, "__code__"):
        return value.__code__
    if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
        return type(value), 0
    attributes = _in_common(vars(value), getattr(first, "__dict__", {}), at, depth - 1)
    return type(value), attributes


def tensor_held(tensor: Any) -> Any:
    """Describes a parameter or buffer: equal layers have equal ones; None if it has a hook."""
    if tensor._backward_hooks:
        return None
    inner = [(tuple(t.shape), t.stride(), t.dtype) for t in parts(tensor)]
    trains = tensor.requires_grad, tensor.is_leaf and tensor.grad is None
    placed = getattr(tensor, "placements", None)
    return type(tensor), tuple(tensor.shape), tensor.dtype, trains, placed, inner
