"""Finds the model that a running script trains, with its inputs, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from itercast.capture.opcall import OpCall
from itercast.capture.programs.backward import Backward, backward_passes
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import COLLECTIVE
from itercast.capture.programs.trained.bare import is_wrapper
from itercast.capture.programs.trained.facts import Trained
from itercast.capture.programs.trained.loss import Form, LossRecorder, LossTape, Size
from itercast.capture.recorder.log import DTYPES

KNOWN = {"SGD": "sgd", "LAMB": "lamb", "Lamb": "lamb", "Muon": "muon", "AdamW": "adamw"}
PARTS = ("all_reduce", "reduce_scatter", "all_to_all", "send", "recv", "exchange")  # of layers
ALIKE = ("Adam", *KNOWN)  # whose update is priced as what it is


@dataclass(kw_only=True)
class Call:
    """A micro-batch in training up to its backward; ``micro``: its number in the step, from 1.

    ``wrapped``: the modules that the script calls: models, or wrappers around them. ``autocast``:
    the dtype that autocast casts to, None without autocast. ``time_first``: the first two lengths
    of inputs to layers whose batch is the second axis. ``tape``: the calls that compute its loss.
    ``recomputes``: whether its backward runs modules again.
    """

    wrapped: list[torch.nn.Module] = field(default_factory=list)
    autocast: torch.dtype | None = None
    time_first: set[tuple[int, ...]] = field(default_factory=set)
    tape: LossTape | None = None
    micro: int = 0
    clip: bool = False
    recomputes: bool = False
    optimizers: list[Any] = field(default_factory=list)

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that its loss is made with."""
        return self.tape.models if self.tape else []

    @property
    def name(self) -> str:
        """Names of their classes."""
        return " + ".join(type(model).__name__ for model in self.models)


class Finder:
    """Watches a script to find the models that train: outermost modules with parameters."""

    def __init__(self) -> None:
        self.recorder = LossRecorder()
        self.inside = False  # whether a model's forward runs
        self.wrapper: torch.nn.Module | None = None
        self.call: Call | None = None  # the micro-batch that runs now
        self.latest: Call | None = None  # the last one whose backward began
        self.found: dict[int, Call] = {}  # by the optimizer's id, the last one before its step
        self.micro = 0  # micro-batches since the last step
        # Functions of autograd that run another one without gradients, and again in backward.
        self.checkpoints = {CheckpointFunction}
        self.split = ""  # by what messages a model's layers are, if they are

    @contextmanager
    def watching(self, log: ProgramLog) -> Iterator[None]:
        """Watch calls of modules, backward passes and updates inside the context."""
        self.log = log
        original_apply = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            run = original_apply.__get__(None, cls)
            noted = with_function(args, partial(self._running, cls))
            return self.recorder.applied(cls.apply, run, noted, kwargs)

        watched: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (torch.nn.Module, "_call_impl", self._calling),
            (log, "ended", self._ending),
            (clip_grad, "_clip_grads_with_norm_", self._clipping),
            (FullyShardedDataParallel, "clip_grad_norm_", self._clipping),
        )
        with ExitStack() as stack:
            for owner, name, around in watched:
                stack.enter_context(patch.object(owner, name, around(getattr(owner, name))))
            function = patch.object(torch.autograd.Function, "apply", classmethod(apply))
            for context in (function, backward_passes(self._backward), self.recorder):
                stack.enter_context(context)
            yield

    def _calling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A ``Module.__call__`` that notes layers, models and wrappers."""

        def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self._note_layer(module, args)
                return run(module, *args, **kwargs)
            if not trains(module):
                return run(module, *args, **kwargs)
            run_model = self._through if is_wrapper(module) else self._run
            return run_model(module, partial(run, module), args, kwargs)

        return call_module

    def _ending(self, ended: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
        """The log's ``ended``, which also notes when an optimizer has stepped."""

        def note_and_end(kind: str, owner: Any) -> None:
            if kind in ("optimizer", "update"):
                self._stepped(owner)
            ended(kind, owner)

        return note_and_end

    def _running(self, cls: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that autograd function ``cls`` runs: is ``cls`` a checkpoint?

        A checkpoint runs it without gradients in forward, and again with gradients in backward.
        """
        with_gradients = True

        def run_and_note(*args: Any, **kwargs: Any) -> Any:
            nonlocal with_gradients
            if not torch.is_grad_enabled():
                with_gradients = False
            elif not with_gradients and self.log.phase == "backward":
                self.checkpoints.add(cls)
            return run(*args, **kwargs)

        return run_and_note

    def _clipping(self, original_clip: Callable[..., Any]) -> Callable[..., Any]:
        """A function that clips gradients, wrapped to note that it was called."""

        def clip_and_note(*args: Any, **kwargs: Any) -> Any:
            if self.latest is not None:
                self.latest.clip = True
            return original_clip(*args, **kwargs)

        return clip_and_note

    @contextmanager
    def _backward(self, backward: Backward) -> Iterator[None]:
        """Note that a micro-batch ends if backward reaches parameters; modules in it recompute."""
        parameters = any(isinstance(x, torch.nn.Parameter) for x in backward.inputs)
        if backward.accumulates or (parameters and not backward.differentiable):
            self._ended(backward.roots)
        before, self.inside = self.inside, True
        try:
            yield
        finally:
            self.inside = before

    def _run(self, model: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a model for the script, and record the calls that follow from its output."""
        if self.call is None:
            self.call = Call()
            self.recorder.begin()
        self.call.wrapped.append(model if self.wrapper is None else self.wrapper)
        self._note_layer(model, args)

        def alone(*args: Any, **kwargs: Any) -> Any:
            """Run the model; what happens inside it is not recorded."""
            self.recorder.on, self.inside = False, True
            before = len(self.log.calls)
            try:
                return run(*args, **kwargs)
            finally:
                self.recorder.on, self.inside = True, False
                self._note_messages(self.log.calls[before:])

        return self.recorder.called(model, alone, args, kwargs)

    def _through(self, wrapper: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a wrapper around a model; its output is taken for the model's if the shapes agree."""
        before = self.wrapper
        self.wrapper = wrapper if before is None else before
        try:
            output = run(*args, **kwargs)
        finally:
            self.wrapper = before
        if self.call is not None:
            self.recorder.passed(output)
        return output

    def _note_layer(self, module: Any, args: Any) -> None:
        """Note autocast's dtype, and which axis is the batch; in backward, that it recomputes."""
        if self.log.phase == "backward" and self.latest is not None:
            self.latest.recomputes = True
        if self.call is None:
            return
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self.call.autocast = self.call.autocast or torch.get_autocast_dtype(device)
        if getattr(module, "batch_first", True) is False and args and hasattr(args[0], "shape"):
            self.call.time_first.add(tuple(args[0].shape[:2]))

    def _note_messages(self, calls: Sequence[OpCall]) -> None:
        """Note messages that carry parts of layers, or go to one rank: then the model is split."""
        sent = (call.kwargs for call in calls if call.op == COLLECTIVE)
        kinds = (facts["kind"] for facts in sent if len(facts["ranks"]) > 1)
        self.split = self.split or next((kind for kind in kinds if kind in PARTS), "")

    def _ended(self, roots: Sequence[Any]) -> None:
        """Note that the backward of a micro-batch begins, from ``roots``."""
        self.recorder.on = False
        if self.call is None:
            return
        self._note_messages([c for c in self.log.calls if c.kwargs.get("peer", -1) >= 0])
        self.call.tape = self.recorder.tape(roots[0])
        self.micro += 1
        self.call.micro = self.micro
        self.latest, self.call = self.call, None

    def _stepped(self, optimizer: Any) -> None:
        """Note that an optimizer stepped, or that an update by hand begins (None)."""
        if self.latest is None:
            return
        if self.micro:
            self.latest.optimizers, self.micro = [], 0
        if optimizer is not None:
            self.latest.optimizers.append(optimizer)
        self.found[id(next(iter(self.latest.optimizers), None))] = self.latest

    def only(self) -> Call:
        """The one micro-batch that plans can be made for; ValueError if none or several."""
        if self.split:
            raise ValueError(
                f"ranks of the script send each other parts of layers ({self.split}, as tensor "
                "parallelism and pipelines do): start it without, plans bring their own"
            )
        calls = [c for c in self.found.values() if c.optimizers] or list(self.found.values())
        if not calls:
            raise ValueError("no model found: no module is called in training before a step")
        if len(calls) > 1:
            names = " and ".join(dict.fromkeys(call.name for call in calls))
            turns = f"it makes {len(calls)} steps in turn, of {names}"
            raise ValueError(f"{turns}: plans are of one, itercast run forecasts it as it is")
        if calls[0].tape is None:
            name = type(calls[0].wrapped[0]).__name__
            raise ValueError(f"the loss is no function of torch of what {name} returns")
        return calls[0]


def with_function(args: Sequence[Any], wrap: Callable[[Any], Any]) -> list[Any]:
    """The arguments of an autograd function; ``wrap`` replaces the first function among them."""
    functions = (i for i, x in enumerate(args) if callable(x) and not isinstance(x, torch.Tensor))
    first = next(functions, None)
    return [wrap(x) if i == first else x for i, x in enumerate(args)]


def facts_of(call: Call) -> Trained:
    """The facts of the model in a micro-batch.

    A model in half precision whose optimizer updates copies in fp32 counts as mixed precision.
    """
    size = size_of(call)
    held = held_dtype(call.models)
    optimizer, notes = _optimizer(call.optimizers)
    if optimizer != "muon" and (call.clip or any(map(_clips, call.wrapped))):
        optimizer += "+clip"
    groups = (group for optimizer_ in call.optimizers for group in optimizer_.param_groups)
    updated = {p.dtype for group in groups for p in group["params"]}
    computes = call.autocast or (held if held.itemsize < 4 and torch.float32 in updated else None)
    return Trained(
        model=call.name,
        batch=size.batch,
        seq=size.seq,
        micro=call.micro,
        dtype=DTYPES[computes or held],
        amp=computes is not None,
        optimizer=optimizer,
        recompute="full" if call.recomputes else "",
        parameters=sum(p.numel() for model in call.models for p in model.parameters()),
        notes=notes,
    )


def held_dtype(models: Sequence[torch.nn.Module]) -> torch.dtype:
    """The dtype of most elements of parameters."""
    counts: dict[torch.dtype, int] = {}
    for p in (p for model in models for p in model.parameters()):
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    return max(counts, key=counts.__getitem__)


def size_of(call: Call) -> Size:
    """The size of a micro-batch, from the first tensor that the first model is given.

    Integers (batch, seq) are tokens; of other inputs only the batch is known.
    """
    first = call.tape.calls[0] if call.tape else None
    leaves = tree_leaves((first.arguments, dict(first.options))) if first else []
    forms = [leaf for leaf in leaves if isinstance(leaf, Form)]
    if not forms or not forms[0].shape:
        raise ValueError(f"{call.name} is given no tensor with a batch")
    shape, dtype = forms[0].shape, forms[0].dtype
    tokens = len(shape) == 2 and not dtype.is_floating_point
    time_first = len(shape) > 1 and tuple(shape[:2]) in call.time_first
    batch, seq = (shape[1], shape[0]) if time_first else (shape[0], shape[-1])
    return Size(batch=batch, seq=seq if tokens else 0, time_first=time_first)


def _optimizer(optimizers: list[Any]) -> tuple[str, tuple[str, ...]]:
    """The optimizer's name for plans, and a note where that is another one than the script's."""
    if not optimizers:
        return "sgd", ("its update is written by hand, and is taken to be sgd",)
    by_class = {type(optimizer).__name__: optimizer for optimizer in optimizers}
    name = "Muon" if "Muon" in by_class else next(iter(by_class))
    groups, kind = by_class[name].param_groups, KNOWN.get(name, "adamw")
    if name == "SGD" and any(group.get("momentum") for group in groups):
        kind = "sgd_momentum"
    if kind == "adamw" and any(group.get("fused") for group in groups):
        kind = "adamw_fused"
    return kind, () if name in ALIKE else (f"its optimizer {name} is taken to be {kind}",)


def _clips(module: Any) -> bool:
    """Whether DeepSpeed's engine clips gradients."""
    return float(getattr(module, "gradient_clipping", float)()) > 0


def trains(module: Any) -> bool:
    """Whether a module that is called now is in training and has parameters that train."""
    if not (torch.is_grad_enabled() and module.training):
        return False
    return any(p.requires_grad for p in module.parameters())
