"""The op calls of one step of a module, without running it: shapes, dtypes, strides, phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from microbench.capture_attention import KeepAttention
from microbench.capture_habits import habits_of_real_tensors
from microbench.capture_routing import Routing
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from microbench.step import StepSettings, make_step

DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
TF32_DTYPES = {**DTYPES, torch.float32: "tf32"}
TF32_OPS = {
    *(f"aten.{op}.default" for op in ("mm", "addmm", "bmm", "baddbmm")),
    *("aten.convolution.default", "aten.convolution_backward.default"),
    *("itercast.sdpa", "itercast.sdpa_backward"),
}
SILENT = {
    "aten::detach",
    "aten::alias",
    "aten::lift_fresh",
    "aten::_local_scalar_dense",
    "aten::item",
}


class OpLog(TorchDispatchMode):
    """Writes down every aten call that reaches the dispatcher below autograd.

    ``routing`` answers ops whose shape depends on data. With ``tf32`` the fp32 operands of matrix
    products, convolutions and attention are written down as tf32.
    """

    def __init__(self, routing: Routing | None = None, tf32: bool = False) -> None:
        super().__init__()
        self.routing, self.tf32 = routing, tf32
        self.calls: list[OpCall] = []
        self.host = {"module_call": 0, "view_op": 0, "autograd_node": 0}
        self.phase = "forward"
        self.module = ""
        self.paused = 0
        self.names = DTYPES
        self._storages: dict[int, int] = {}
        self._kept: list[Any] = []  # storages stay alive, so that their addresses stay theirs

    def reset(self) -> None:
        """Forget what was logged, not the storages."""
        self.calls = []
        self.host = dict.fromkeys(self.host, 0)

    def storage(self, tensor: Any) -> int:
        """A small number that names the memory behind a tensor."""
        key = tensor.untyped_storage()._cdata
        if key not in self._storages:
            self._kept.append(tensor.untyped_storage())
            self._storages[key] = len(self._storages)
        return self._storages[key]

    def describe(self, value: Any) -> Any:
        """Tensors as TensorSpec, lists as tuples, dtypes and devices as text."""
        if isinstance(value, torch.Tensor):
            return TensorSpec(
                shape=tuple(value.shape),
                dtype=self.names[value.dtype],
                stride=tuple(value.stride()),
                storage=self.storage(value),
            )
        if isinstance(value, list | tuple):
            return tuple(self.describe(v) for v in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def add(self, op: str, args: Any, kwargs: Any, output: Any) -> None:
        """Log one call."""
        outputs = output if isinstance(output, list | tuple) else (output,)
        self.names = TF32_DTYPES if self.tf32 and op in TF32_OPS else DTYPES
        self.calls.append(
            OpCall(
                op=op,
                args=self.describe(tuple(args)),
                kwargs={k: self.describe(v) for k, v in kwargs.items()},
                outputs=tuple(self.describe(o) for o in outputs if isinstance(o, torch.Tensor)),
                phase=self.phase,
                module=self.module if self.phase == "forward" else "",
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.routing is None:
            output = func(*args, **kwargs)
        else:
            output = self.routing.call(func, args, kwargs)
        name = func._schema.name
        if self.paused or name.startswith(("prim::", "profiler::")) or name in SILENT:
            return output
        if self.phase in ("forward", "loss"):
            self.host["autograd_node"] += 1
        if func.is_view:
            self.host["view_op"] += 1
            return output
        self.add(str(func), args, kwargs, output)
        return output


def capture_step(
    build: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], dict[str, Any]],
    loss_fn: Callable[[Any, dict[str, Any]], Any],
    settings: StepSettings,
    *,
    fake: bool = True,
    samples: int = 1,
    tokens: int = 0,
) -> StepCapture:
    """The second step's calls (the first allocates optimizer state); ``fake=False`` runs it.

    Where shapes depend on data, routing is taken as balanced (``capture_routing``); ValueError
    names the op where that says nothing.
    """
    log = OpLog(Routing() if fake else None, settings.dtype == "tf32")
    with ExitStack() as stack:
        if fake:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(habits_of_real_tensors())
        with default_dtype(storage_dtype(settings.dtype)):
            model, inputs = build(), make_inputs()
        step = make_step(model, inputs, loss_fn, settings, lambda name: setattr(log, "phase", name))
        ready = _watch_parameters(model, log)
        stack.enter_context(_module_hooks(log))
        stack.enter_context(KeepAttention(log, eager=settings.attn == "eager"))
        stack.enter_context(log)
        try:
            step()
            log.reset()
            step()
        except (DynamicOutputShapeException, DataDependentOutputException) as exc:
            raise ValueError(f"the step depends on data in {exc.func}: cannot capture it") from exc
    _count_bookkeeping(log, settings, sum(p.requires_grad for p in model.parameters()))
    parameters = tuple(
        ParamSpec(
            name=name,
            shape=tuple(p.shape),
            dtype=DTYPES[p.dtype],
            storage=log.storage(p),
            ready_after=ready.get(name, -1),
        )
        for name, p in model.named_parameters()
    )
    return StepCapture(
        calls=tuple(log.calls),
        parameters=parameters,
        host=log.host,
        samples=samples,
        tokens=tokens,
    )


def storage_dtype(name: str) -> torch.dtype:
    """What parameters are stored in; tf32 is fp32 with TF32 products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors are of this dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _count_bookkeeping(log: OpLog, settings: StepSettings, parameters: int) -> None:
    """Host events of autograd and the optimizer; a step without backward records no node."""
    if settings.mode != "train":
        log.host["autograd_node"] = 0
        return
    log.host |= {"zero_grad": parameters, "accumulate_grad": parameters, "backward": 1}
    if settings.optimizer != "none":
        log.host[f"{settings.optimizer}_step"] = parameters


def _watch_parameters(model: torch.nn.Module, log: OpLog) -> dict[str, int]:
    ready: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: ready.__setitem__(name, len(log.calls) - 1)
            )
    return ready


class _module_hooks:
    """Counts module calls and names the innermost module while it runs."""

    def __init__(self, log: OpLog) -> None:
        self.log = log
        self.outer: list[str] = []

    def __enter__(self) -> None:
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )

        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ]

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, module: Any, args: Any) -> None:
        self.log.host["module_call"] += 1
        self.outer.append(self.log.module)
        self.log.module = type(module).__name__

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        self.log.module = self.outer.pop()
