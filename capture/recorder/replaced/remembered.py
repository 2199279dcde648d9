"""Results of ops on fake tensors, remembered: torch's own cache of them is slow."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves

from itercast.capture.opcall import Args, Argument, Kwargs
from itercast.capture.recorder.facts import reads_numbers

FAKE, NEW = torch._C._TorchDispatchModeKey.FAKE, FakeTensor.__new__
PLAIN = (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format, type(None))
CPU = torch.device("cpu")
RESHAPING = ("set_", "resize_", "resize_as_")  # change a tensor, or where its memory is
FIRST = "the first argument"  # which an op wrote over and returns

Form = tuple[torch.Size, tuple[int, ...], torch.dtype]  # of a new tensor
attributes: dict[str, Any] = {}  # of new fake tensors, of the mode and device that were last
results: dict[Any, Any] = {}  # forms by op and arguments; none where these do not decide them


class UntoldError(Exception):
    """Raised for an argument or a result that is no plain value, nor a fake tensor on the CPU."""


def run_remembered(func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """Run an op on fake tensors, or make new ones as it made for arguments of the same forms."""
    mode = torch._C._get_dispatch_mode(FAKE)
    if mode is None or not _decided_by_forms(func):
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _form(args), _form(tuple(kwargs.items()))
    except UntoldError:
        return func(*args, **kwargs)
    if key not in results:
        output = func(*args, **kwargs)
        results[key] = _of_results(output, args, kwargs, key)
        return output
    forms = results[key]
    if not forms:
        return func(*args, **kwargs)
    if forms is FIRST:
        return args[0]
    with in_kernel_invocation_manager(mode):
        made = [f and _fake(mode, _empty(f), CPU) for f in forms[1:]]
    return made[0] if forms[0] is Tensor else forms[0](made)


@cache
def _decided_by_forms(func: OpOverload) -> bool:
    """Whether forms of results may follow from those of arguments, not from numbers or memory."""
    if func.namespace != "aten" or func.is_view or reads_numbers(func):
        return False
    return torch.Tag.inplace_view not in func.tags and func._opname not in RESHAPING


def _form(value: Argument) -> Any:
    """What decides results: a tensor's shape, strides and dtype; a plain value and its type."""
    if type(value) is FakeTensor:
        if value.constant is not None or value.fake_device != CPU or value.layout != torch.strided:
            raise UntoldError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    if type(value) in PLAIN or (type(value) is torch.device and value == CPU):
        return type(value), value
    raise UntoldError


def _of_results(output: Any, args: Args, kwargs: Kwargs, key: Any) -> Any:
    """What to remember of results: container and forms; nothing where they share memory."""
    if args and output is args[0]:
        return FIRST if _form(args) == key[2] else ()
    single = not isinstance(output, list | tuple)
    tensors = [output] if single else output
    try:
        forms = [None if t is None else _form(t) for t in tensors]
    except UntoldError:
        return ()
    given, made = (
        [t.untyped_storage()._cdata for t in tree_leaves(ts) if isinstance(t, Tensor)]
        for ts in ((args, kwargs), tensors)  # one of kwargs is ``out``
    )
    new = {*given}.isdisjoint(made) and len({*made}) == len(forms) - forms.count(None)
    return (Tensor if single else type(output), *forms) if new else ()


def _empty(form: Form) -> Tensor:
    """A new tensor of this form, without data."""
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _fake(mode: FakeTensorMode, tensor: Tensor, device: torch.device) -> FakeTensor:
    """A fake tensor around one without data: with attributes as of the first that torch made."""
    if attributes.get("fake_mode") is not mode or attributes["_fake_device"] != device:
        made = NEW(FakeTensor, mode, tensor, device)
        attributes.clear()
        attributes.update(vars(made))
        return made
    devices: dict[str, Any] = {"dispatch_device": True, "device_for_backend_keys": device}
    made = Tensor._make_subclass(FakeTensor, tensor, tensor.requires_grad, **devices)
    torch._C._set_throw_on_mutable_data_ptr(made)
    vars(made).update(attributes)
    return made


def view_of(func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
    """A view of a fake tensor, or several, made by torch's own rule for tensors without data."""
    mode, device = args[0].fake_mode, args[0].fake_device
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return _fake(mode, made, device)
        return [_fake(mode, part, device) for part in made]


def is_plain(tensor: Argument, facts: Any) -> bool:
    """Whether this is a fake tensor of floats, about which there are no ``facts``."""
    if type(tensor) is not FakeTensor or tensor.constant is not None or tensor in facts:
        return False
    return tensor.is_floating_point() and tensor.layout == torch.strided


@cache
def views_one(func: OpOverload) -> bool:
    """Whether an op is a view of one tensor that torch makes from its form alone."""
    tensors = sum("Tensor" in str(argument.type) for argument in func._schema.arguments)
    return func.is_view and tensors == 1 and not consists_of_others(func)


@cache
def consists_of_others(func: OpOverload) -> bool:
    """Whether torch has no kernel for this op and runs other ops."""
    if func.namespace != "aten" or not func._can_decompose():
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")
