"""The op calls of one step of a module, without running it: shapes, dtypes, strides, phases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from microbench.capture.attention import eager_attention
from microbench.capture.autocast import autocast_as_on_cuda
from microbench.capture.fake_patches import habits_of_real_tensors, runs_as_written
from microbench.capture.meta_answers import is_sparse, without_sparse
from microbench.capture.routing import Routing
from microbench.capture.watch import (
    count_bookkeeping,
    default_dtype,
    module_hooks,
    storage_dtype,
    watch_parameters,
)
from microbench.capture.zeros import mark_zeros
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
# What autograd does in place on plain tensors and out of place under a dispatch mode:
# https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/input_buffer.cpp and
# areAnyTensorSubclassLike in FunctionsManual.cpp
IN_PLACE = {
    "aten.add.Tensor": "aten.add_.Tensor",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.index_put.default": "aten.index_put_.default",
    "aten.scatter.src": "aten.scatter_.src",
}
# Views whose schema does not say so: they only make tensors' heads.
UNDECLARED_VIEWS = {"aten::unsafe_split", "aten::unsafe_split_with_sizes", "aten::unsafe_chunk"}
UNDECLARED_VIEWS |= {"aten::_indices", "aten::_values", "aten::_coalesced_"}
UNDECLARED_VIEWS |= {"aten::_sparse_coo_tensor_with_dims_and_tensors"}
UNDECLARED_VIEWS |= {"aten::transpose_", "aten::t_", "aten::squeeze_", "aten::unsqueeze_"}
SILENT = {"aten::detach", "aten::alias", "aten::lift_fresh", "aten::_local_scalar_dense"}
TF32_DTYPES = {**DTYPES, torch.float32: "tf32"}
TF32_OPS = {
    *(f"aten.{op}.default" for op in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")),
    *("aten.convolution.default", "aten.convolution_backward.default"),
    *("itercast.sdpa", "itercast.sdpa_backward"),
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
            shape, stride, dtype = tuple(value.shape), tuple(value.stride()), value.dtype
            if value.is_complex():  # pairs of real numbers
                shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
                dtype = dtype.to_real()
            return TensorSpec(
                shape=shape,
                dtype=self.names[dtype],
                stride=stride,
                storage=self.storage(value),
            )
        if isinstance(value, list | tuple):
            return tuple(self.describe(v) for v in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def add(self, op: str, args: Any, kwargs: Any, output: Any) -> None:
        """Log one call."""
        self.names = TF32_DTYPES if self.tf32 and op in TF32_OPS else DTYPES
        outputs = output if isinstance(output, list | tuple) else (output,)
        if any(map(is_sparse, (*args, *outputs))):
            op, args, outputs = without_sparse(op, args, outputs)
        described = self.describe(tuple(args))
        if self.phase == "backward" and op in IN_PLACE and described[0].shape == output.shape:
            op, outputs = IN_PLACE[op], (args[0],)
        self.calls.append(
            OpCall(
                op=op,
                args=described,
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
        if self.paused or name.startswith(("prim::", "profiler::", "aten::item")) or name in SILENT:
            return output
        if self.phase in ("forward", "loss"):
            self.host["autograd_node"] += 1
        if func.is_view or name in UNDECLARED_VIEWS:
            self.host["view_op"] += 1
            return output
        self.add(str(func), args, kwargs, output)
        return output


class _LoggedAttention(torch.autograd.Function):
    """Scaled dot-product attention as one op forward and one op backward.

    The output lies in memory as (batch, length, heads, dim), as fused kernels leave it.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, log: OpLog, mask: Any, options: dict[str, Any], q: Any, k: Any, v: Any
    ) -> Any:
        ctx.log, ctx.mask, ctx.options = log, mask, options
        ctx.save_for_backward(q, k, v)
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            output = q.new_empty(*q.shape[:-1], v.shape[-1])
        else:
            call = torch.nn.functional.scaled_dot_product_attention
            output = call(q, k, v, mask, **options)
        if q.dim() == 4:
            output = output.transpose(1, 2).contiguous().transpose(1, 2)
        log.paused -= 1
        log.add("itercast.sdpa", (q, k, v), _attention_facts(mask, options), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        q, k, v = ctx.saved_tensors
        log = ctx.log
        log.paused += 1
        if torch._guards.detect_fake_mode((q,)):
            grads = [torch.empty_like(t) for t in (q, k, v)]
        else:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                call: Any = torch.nn.functional.scaled_dot_product_attention
                output = call(*leaves, ctx.mask, **ctx.options)
                found = torch.autograd.grad(output, leaves, grad)
            grads = [torch.empty_like(t).copy_(g) for t, g in zip(leaves, found, strict=True)]
        log.paused -= 1
        facts = _attention_facts(ctx.mask, ctx.options)
        log.add("itercast.sdpa_backward", (grad, q, k, v), facts, grads)
        return None, None, None, *grads


def _attention_facts(mask: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "is_causal": bool(options.get("is_causal", False)),
        "dropout_p": float(options.get("dropout_p", 0.0)),
        "enable_gqa": bool(options.get("enable_gqa", False)),
        "masked": mask is not None,
    }


class KeepAttention(TorchFunctionMode):
    """Keeps scaled_dot_product_attention whole (on CPU it would decompose), or writes it out."""

    def __init__(self, log: OpLog, eager: bool) -> None:
        super().__init__()
        self.log, self.eager = log, eager

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention or self.log.paused:
            return func(*args, **kwargs)
        if self.eager:
            return eager_attention(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = (given.pop(n) for n in names[:3])
        return _LoggedAttention.apply(self.log, given.pop("attn_mask", None), given, q, k, v)


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
        with default_dtype(storage_dtype(settings.stored)):
            model, inputs = build(), make_inputs()
        if log.routing is not None:
            log.routing.given(inputs)
        stack.enter_context(runs_as_written())
        mixed = partial(autocast_as_on_cuda, storage_dtype(settings.dtype))
        step = make_step(
            model,
            inputs,
            loss_fn,
            settings,
            lambda name: setattr(log, "phase", name),
            precision=mixed if settings.amp else nullcontext,
        )
        ready = watch_parameters(model, log)
        stack.enter_context(module_hooks(log))
        stack.enter_context(KeepAttention(log, eager=settings.attn == "eager"))
        stack.enter_context(log)
        try:
            step()
            log.reset()
            step()
        except (DynamicOutputShapeException, DataDependentOutputException) as exc:
            raise ValueError(f"the step depends on data in {exc.func}: cannot capture it") from exc
    count_bookkeeping(log, settings, sum(p.requires_grad for p in model.parameters()))
    log.names = DTYPES
    specs = {name: log.describe(p) for name, p in model.named_parameters()}
    parameters = tuple(
        ParamSpec(
            name=name,
            shape=spec.shape,
            dtype=spec.dtype,
            storage=spec.storage,
            ready_after=ready.get(name, -1),
        )
        for name, spec in specs.items()
    )
    return StepCapture(
        calls=mark_zeros(log.calls),
        parameters=parameters,
        host=log.host,
        samples=samples,
        tokens=tokens,
    )
