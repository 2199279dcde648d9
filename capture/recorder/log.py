"""Capture of a training step as a list of op calls, on fake tensors: nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from traceback import StackSummary
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from itercast.capture.base.garbage import without_garbage_collection
from itercast.capture.base.user_errors import source_line
from itercast.capture.base.yaml_text import facts_of
from itercast.capture.collectives import is_collective, tensors_in
from itercast.capture.opcall import (
    ALSO_IN_TORCH,
    COMPLEX,
    ITEMSIZE_BYTES,
    Args,
    Argument,
    Kwargs,
    OpCall,
    ParamSpec,
    StepCapture,
    TensorSpec,
    torch_dtype,
)
from itercast.capture.recorder.attention import WholeAttention
from itercast.capture.recorder.autocast import autocast_as_on_cuda, in_tf32
from itercast.capture.recorder.facts import note_message
from itercast.capture.recorder.fake import asked_of
from itercast.capture.recorder.fake_patches import (
    behave_like_real_tensors,
    modes_in_backward,
    run_uncompiled,
)
from itercast.capture.recorder.recurrent import recurrent_networks
from itercast.capture.recorder.replaced.corrected import trilinear
from itercast.capture.recorder.replaced.positions import by_position, takes_masks
from itercast.capture.recorder.replaced.remembered import consists_of_others
from itercast.capture.recorder.routing import Routing
from itercast.capture.recorder.sparse import (
    FakeSparseOps,
    as_row_ops,
    check_layouts,
    is_sparse,
    layout_name,
    values_of,
)
from itercast.capture.recorder.watch import (
    MadeBy,
    ModuleTracker,
    accumulates,
    attributes,
    count_host_events,
    default_dtype,
    record_ready_gradients,
)
from itercast.capture.recorder.zeros import mark_zeros
from itercast.capture.step import Inputs, Loss, StepSettings, hidden_matrices, make_step

DTYPES = {torch_dtype(name): name for name in ITEMSIZE_BYTES if name != "tf32"}
DTYPES |= {getattr(torch, name): logged for name, logged in ALSO_IN_TORCH.items()}
FACTS = facts_of(__file__)
IN_PLACE: Mapping[str, str] = FACTS["in_place"]
UNDECLARED_VIEWS, SILENT = (
    frozenset(f"aten::{op}" for op in FACTS[ops].split()) for ops in ("undeclared_views", "silent")
)
UNLOGGED = ("profiler::", "aten::item")
CAST = "aten._to_copy.default"
ITEM = "aten._local_scalar_dense.default"  # the host reads a number
TF32_DTYPES = {**DTYPES, torch.float32: "tf32"}
TF32_OPS = {op: kind for kind, ops in FACTS["tf32"].items() for op in ops.split()}


class OpLog(TorchDispatchMode):
    """Logs every aten call that reaches the dispatcher below autograd.

    ``routing`` computes the results of ops on fake tensors (``capture.routing``). ``tf32``: whether
    fp32 operands of an operator, matmul (products and attention), conv or rnn, are logged as tf32.
    """

    def __init__(
        self, routing: Routing | None = None, tf32: Callable[[str], bool] = lambda _: False
    ) -> None:
        super().__init__()
        self.routing, self.tf32 = routing, tf32
        self.calls: list[OpCall] = []
        self.host = {"module_call": 0, "view_op": 0, "autograd_node": 0}
        self.phase = "forward"
        self.module = ""
        self.stream = 0
        self.paused = 0
        self.names = DTYPES
        self.networks: list[Kwargs] = []  # recurrent ones, see ``StepCapture``
        self.network = MadeBy()
        self._storages: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # alive, so that no address is used twice

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch need not keep its compiler from this class: nothing is compiled meanwhile."""
        return False

    def reset(self) -> None:
        """Forget the calls and host events, and keep the numbers of storages."""
        self.calls, self.networks = [], []
        self.host = dict.fromkeys(self.host, 0)

    def storage(self, tensor: Tensor) -> int:
        """The number of the memory behind a tensor; for a sparse tensor, behind its values."""
        memory = values_of(tensor).untyped_storage()
        key = memory._cdata
        if key not in self._storages:
            self._kept.append(memory)
            self._storages[key] = len(self._storages)
        return self._storages[key]

    def _alias(self, tensor: Tensor, result: Tensor) -> None:
        """Give an op's result the storage of the tensor that it would have overwritten."""
        if tensor.stride() == result.stride():
            self.storage(result)  # keeps it alive
            self._storages[result.untyped_storage()._cdata] = self.storage(tensor)

    def describe(self, value: Argument) -> Argument:
        """Convert an op's argument: tensors to TensorSpec, dtypes and devices to text."""
        if isinstance(value, torch.Tensor):
            return self._sparse_spec(value) if is_sparse(value) else self._spec(value)
        if isinstance(value, list | tuple):
            return tuple(self.describe(v) for v in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        return str(value)

    def _spec(self, tensor: Tensor) -> TensorSpec:
        """A dense tensor; complex numbers become real ones with one more axis, of length 2."""
        shape, stride, dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
        if tensor.is_complex():
            shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
            dtype = dtype.to_real()
        return TensorSpec(
            shape=shape, dtype=self.names[dtype], stride=stride, storage=self.storage(tensor)
        )

    def _sparse_spec(self, tensor: Tensor) -> TensorSpec:
        """A sparse tensor; ``nnz`` of one that stores whole rows counts their elements."""
        return TensorSpec(
            shape=tuple(tensor.shape),
            dtype=self.names[tensor.dtype],
            storage=self.storage(tensor),
            layout=layout_name(tensor),
            nnz=values_of(tensor).numel(),
        )

    def add(self, op: str, args: Args, kwargs: Kwargs, output: Argument) -> None:
        """Log one call. ``mm.out`` becomes ``mm``; sums in backward are in place, as on a GPU."""
        if op.endswith(".out"):
            op = op.removesuffix("out")
            overloads = getattr(torch.ops.aten, op.split(".")[1]).overloads()
            op += "Tensor" if "Tensor" in overloads else "default"
            kwargs = {k: v for k, v in kwargs.items() if k != "out"}
        self.names = TF32_DTYPES if op in TF32_OPS and self.tf32(TF32_OPS[op]) else DTYPES
        outputs = tuple(output) if isinstance(output, list | tuple) else (output,)
        sparse = any(map(is_sparse, (*args, *outputs)))
        if any(isinstance(x, torch.Tensor) and x.is_complex() for x in (*args, *outputs)):
            kwargs = {**kwargs, COMPLEX: True}
        if sparse:
            op, args, outputs = as_row_ops(op, args, outputs)
        described = self.describe(tuple(args))
        in_place = self.phase == "backward" and op in IN_PLACE and not sparse
        if in_place and described[0].shape == output.shape:
            op = IN_PLACE[op]
            self._alias(args[0], output)
        self.calls.append(
            OpCall(
                op=op,
                args=described,
                kwargs={k: self.describe(v) for k, v in kwargs.items()},
                outputs=tuple(self.describe(o) for o in outputs if isinstance(o, torch.Tensor)),
                phase=self.phase,
                module=self.module if self.phase == "forward" else "",
                stream=self.stream,
                within=self._network_pass(op),
            )
        )

    def recurrent_dtype(self, dtype: torch.dtype) -> str:
        """The name of the dtype that recurrent networks of such weights are logged in."""
        return (TF32_DTYPES if self.tf32("rnn") else DTYPES)[dtype]

    def _network_pass(self, op: str) -> int:
        """The number of the recurrent network's pass that runs now, 0 for none.

        Network n has passes 2n - 1 (forward) and 2n (backward). Casts by autocast, and their
        backward, are no part of it: they come before cuDNN's call.
        """
        number = self.network.number()
        if op == CAST and number:
            node = torch._C._current_autograd_node()
            number = 0 if node is None or node.name().startswith("ToCopy") else number
        is_forward = bool(self.network.running)
        return 2 * number - is_forward if number else 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Argument:
        if func.namespace == "prim":  # a question about a tensor
            return asked_of(func, args, kwargs or {})
        with torch._C.DisableTorchFunction():  # modes that watch a program slow shapes down
            return self._run(func, args, kwargs or {})

    def _run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Argument:
        """Run an op and log it; views and autograd's nodes are counted as host events instead."""
        if consists_of_others(func):  # such ops of inference tensors come whole
            with self:
                return func.decompose(*args, **kwargs)
        if takes_masks(func, args):
            return by_position(self._run, func, args, kwargs)
        if func is torch.ops.aten._trilinear.default:
            return trilinear(self, *args[:3], expand=args[3:6], sumdim=args[6], along=args[7:])
        if self.routing is None:
            output = func(*args, **kwargs)
        else:
            output = self.routing.call(func, args, kwargs)
        if is_collective(func):  # a step's own messages are those of its plan
            note_message(self.routing and self.routing.facts, func, args, kwargs, output)
            return output
        name = func._schema.name
        if self.paused or name.startswith(UNLOGGED) or name in SILENT:
            return output
        if str(func) == ITEM:
            self.read_by_host(args[0])
        elif func.is_view or name in UNDECLARED_VIEWS:
            self.count_view()
        else:
            self._count_node()
            self.add(str(func), args, kwargs, output)
        return output

    def count_view(self, *, views: int = 1) -> None:
        """Count a view, and its autograd node."""
        if not self.paused:
            self._count_node()
            self.host["view_op"] += views

    def _count_node(self) -> None:
        """Count an autograd node, where forward makes one."""
        if self.phase in ("forward", "loss") and torch.is_grad_enabled():
            self.host["autograd_node"] += 1

    def read_by_host(self, tensor: Tensor) -> None:
        """Log that the host waits for numbers from the device, unless it has them already.

        It has numbers that it drew at random, an optimizer's step counter, and the rest of a list
        whose first element it has just read.
        """
        drawn = self.routing is not None and self.routing.drawn(tensor)
        has_just_read = bool(self.calls) and self.calls[-1].op == ITEM
        if not (drawn or self.phase == "optimizer" or has_just_read):
            self.add(ITEM, (tensor,), {}, ())


@without_garbage_collection()
def capture_step(
    build: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Inputs],
    loss_fn: Loss,
    settings: StepSettings,
    *,
    fake: bool | FakeTensorMode = True,
    samples: int = 1,
    tokens: int = 0,
) -> StepCapture:
    """Capture the op calls of one training or inference step of the model that ``build`` makes.

    Two steps run, since the optimizer allocates its state in the first. Forward and backward are
    those of the first step; of the second if the first changes attributes of modules (such as
    cached tables), if there are recurrent networks, or if inputs collect gradients. ``fake``: True
    runs on fake tensors, without computing; False runs for real; a program's fake mode runs under
    its TF32 flags and guesses unknown numbers. Dtype tf32 allows TF32 everywhere. ``samples`` and
    ``tokens`` of the batch are only stored. ValueError for ops whose shapes depend on data, except
    in the routing of experts (``capture.routing``).
    """
    asked, of_program = settings.dtype == "tf32", isinstance(fake, FakeTensorMode)
    allowed = in_tf32 if of_program and not asked else lambda _: asked
    guesses = dict[str, StackSummary]() if of_program else None
    log = OpLog(Routing(guesses) if fake else None, allowed)
    with ExitStack() as stack:
        if fake:
            mode = FakeTensorMode(allow_non_fake_inputs=True) if fake is True else fake
            stack.enter_context(mode)
            stack.enter_context(behave_like_real_tensors())
        model, inputs = _build(build, make_inputs, settings, fake)
        if log.routing is not None:
            log.routing.note_inputs(inputs)
        set_phase = partial(setattr, log, "phase")
        amp = partial(autocast_as_on_cuda, torch_dtype(settings.dtype))
        precision = amp if settings.amp else nullcontext
        step = make_step(model, inputs, loss_fn, settings, set_phase, precision=precision)
        ready = record_ready_gradients(model, log)
        with _logging(log, eager=settings.attn == "eager"):
            before = attributes(model)
            step.gradients()
            calls, host = list(log.calls), dict(log.host)
            step.update()
            alike = attributes(model) == before and not accumulates(inputs)
            if fake and not log.networks and alike:
                log.calls, log.host = calls, host
                step.update()
            else:
                log.reset()
                step()
    count_host_events(log, settings, sum(p.requires_grad for p in model.parameters()))
    return StepCapture(
        calls=mark_zeros(log.calls),
        parameters=_parameters(model, log, ready, settings),
        host=log.host,
        samples=samples,
        tokens=tokens,
        optimizer=settings.optimizer if settings.mode == "train" else "none",
        inputs=_inputs(inputs, log),
        networks=tuple(log.networks),
    )


def _inputs(inputs: Inputs, log: OpLog) -> tuple[TensorSpec, ...]:
    """The dense tensors of a batch."""
    log.names = DTYPES
    return tuple(log.describe(t) for t in tensors_in(inputs) if not is_sparse(t))


def _build(
    build: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Inputs],
    settings: StepSettings,
    fake: bool | FakeTensorMode,
) -> tuple[torch.nn.Module, Inputs]:
    """The model and its inputs in the dtype of the settings, all in layouts that are known."""
    made_fake = FakeSparseOps() if fake else nullcontext()
    with default_dtype(torch_dtype(settings.stored)), made_fake:
        model, inputs = build(), make_inputs()
    if settings.channels_last:
        move: Any = model.to  # whose types leave out the memory format
        model = move(memory_format=torch.channels_last)
        inputs = tree_map(_in_channels_last, inputs)
    check_layouts((f"parameter {name}", p) for name, p in model.named_parameters())
    check_layouts((f"buffer {name}", b) for name, b in model.named_buffers())
    check_layouts((f"input {name}", t) for name, x in inputs.items() for t in tree_leaves(x))
    return model, inputs


def _in_channels_last(value: Argument) -> Argument:
    """A tensor of four dimensions in torch.channels_last; other values as they are."""
    images = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if images else value


@contextmanager
def _logging(log: OpLog, eager: bool) -> Iterator[None]:
    """Log ops, modules and attention inside the context; name the op that depends on data."""
    watching = (ModuleTracker(log), WholeAttention(log, eager), recurrent_networks(log))
    with ExitStack() as stack:
        for context in (run_uncompiled({}), *watching, modes_in_backward(), log):
            stack.enter_context(context)
        try:
            yield
        except (DynamicOutputShapeException, DataDependentOutputException) as exc:
            line = f"{exc.func}{source_line(exc)}"
            raise ValueError(f"the step depends on data in {line}: cannot capture it") from exc


def _parameters(
    model: torch.nn.Module, log: OpLog, ready: Mapping[str, int], settings: StepSettings
) -> tuple[ParamSpec, ...]:
    """The model's parameters, with the call after which each one's gradient is complete."""
    log.names = DTYPES
    matrices = hidden_matrices(model) if settings.optimizer == "muon" else {}
    specs = {name: log.describe(p.detach()) for name, p in model.named_parameters()}
    taken = ("shape", "dtype", "storage", "layout", "nnz")
    return tuple(
        ParamSpec(
            name=name,
            ready_after=ready.get(name, -1),
            matrix=name in matrices,
            **{fact: getattr(spec, fact) for fact in taken},
        )
        for name, spec in specs.items()
    )
