"""Finds the model that a running script trains, with its inputs, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map

from itercast.capture.programs.trained.facts import Trained
from itercast.capture.programs.trained.loss import LossRecorder, LossTape, Size, form_of
from itercast.capture.recorder.log import DTYPES

WRAPPERS = (DistributedDataParallel, DataParallel)
KNOWN = {"SGD": "sgd", "LAMB": "lamb", "Lamb": "lamb", "Muon": "muon", "AdamW": "adamw"}
ALIKE = ("Adam", *KNOWN)  # whose update is priced as what it is


@dataclass(kw_only=True)
class Call:
    """A call of a model in training, its backward, and how many micro-batches a step had so far.

    Tensors of the arguments are forms: none is kept alive.
    """

    model: torch.nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    autocast: torch.dtype | None = None
    tape: LossTape | None = None
    micro: int = 0
    times: int = 1
    optimizers: list[Any] = field(default_factory=list)


class Finder:
    """Watches a script; the model is the outermost module with parameters that trains.

    ``found`` is its last call before a step of an optimizer, by the optimizer.
    """

    def __init__(self) -> None:
        self.recorder = LossRecorder()
        self.inside = False
        self.call: Call | None = None
        self.latest: Call | None = None
        self.found: dict[int, Call] = {}
        self.micro = self.called = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch calls of modules, backward passes and optimizers inside the context."""
        run, backward = torch.nn.Module._call_impl, torch.autograd.backward

        def called(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                self._note_autocast()
                return run(module, *args, **kwargs)
            if not _trains(module):
                return run(module, *args, **kwargs)
            return self._run(module, run, args, kwargs)

        def backwards(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._ended(tree_leaves(tensors))
            return backward(tensors, *args, **kwargs)

        hook = register_optimizer_step_post_hook(lambda one, args, kwargs: self._stepped(one))
        try:
            with (
                patch.object(torch.nn.Module, "_call_impl", called),
                patch.object(torch.autograd, "backward", backwards),
                self.recorder,
            ):
                yield
        finally:
            hook.remove()

    def _run(self, module: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run a model as the script calls it, and record what follows its output."""
        model, recorder = unwrapped(module), self.recorder
        arguments, options = tree_map(_form, (args, kwargs))
        self.called += 1
        self.call = Call(model=model, arguments=arguments, options=options, times=self.called)
        self._note_autocast()
        recorder.on, self.inside = False, True
        try:
            output = run(module, *args, **kwargs)
        finally:
            self.inside = False
        recorder.names = {id(p): name for name, p in model.named_parameters()}
        recorder.begin(output)
        recorder.on = True
        return output

    def _note_autocast(self) -> None:
        for device in ("cuda", "cpu"):
            if self.call is not None and torch.is_autocast_enabled(device):
                self.call.autocast = self.call.autocast or torch.get_autocast_dtype(device)

    def _ended(self, roots: list[Any]) -> None:
        """A micro-batch ended: its backward begins."""
        self.recorder.on = False
        if self.call is None:
            return
        self.call.tape = self.recorder.tape(roots[0])
        self.micro += 1
        self.call.micro = self.micro
        self.latest, self.call, self.called = self.call, None, 0

    def _stepped(self, optimizer: Any) -> None:
        """A step ended, or another optimizer's part of it."""
        if self.latest is None:
            return
        if self.micro:
            self.latest.optimizers, self.micro = [], 0
        self.latest.optimizers.append(optimizer)
        self.found[id(self.latest.optimizers[0])] = self.latest

    def only(self) -> Call:
        """The one call that a plan can be of; ValueError in one line where there is none."""
        calls = list(self.found.values())
        names = list(dict.fromkeys(type(call.model).__name__ for call in calls))
        if not calls:
            raise ValueError("no model found: no module is called in training before a step")
        if (models := len({id(call.model) for call in calls})) > 1:
            raise ValueError(f"it trains {models} models in turn ({', '.join(names)})")
        call = calls[-1]
        if call.times > 1:
            told = "before a backward: a plan is of one model that is called once"
            raise ValueError(f"it calls {call.times} models, or {names[0]} so often, {told}")
        if call.tape is None:
            raise ValueError(f"the loss of {names[0]} is no function of torch of its output alone")
        if not all(type(p.data) is FakeTensor for p in call.model.parameters()):
            raise ValueError(f"the parameters of {names[0]} are sharded over ranks already")
        return call


def unwrapped(module: Any) -> Any:
    """The user's own module inside what torch wraps it in; ValueError for a sharded one."""
    while True:
        if isinstance(module, WRAPPERS):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def facts_of(call: Call) -> Trained:
    """What is known of a call, in plain values."""
    size = size_of(call)
    counts: dict[torch.dtype, int] = {}
    for p in call.model.parameters():
        counts[p.dtype] = counts.get(p.dtype, 0) + p.numel()
    dtype = call.autocast or max(counts, key=counts.__getitem__)
    optimizer, notes = _optimizer(call.optimizers)
    return Trained(
        model=type(call.model).__name__,
        batch=size.batch,
        seq=size.seq,
        micro=call.micro,
        dtype=DTYPES[dtype],
        amp=call.autocast is not None,
        optimizer=optimizer,
        parameters=sum(counts.values()),
        notes=notes,
    )


def size_of(call: Call) -> Size:
    """Samples and tokens of the first tensor that the model is given."""
    forms = [x for x in tree_leaves((call.arguments, call.options)) if hasattr(x, "scaled")]
    if not forms or not forms[0].shape:
        raise ValueError(f"{type(call.model).__name__} is given no tensor with a batch")
    first = forms[0]
    tokens = len(first.shape) == 2 and not first.dtype.is_floating_point
    return Size(batch=first.shape[0], seq=first.shape[1] if tokens else 0)


def _optimizer(optimizers: list[Any]) -> tuple[str, tuple[str, ...]]:
    """The optimizer as plans know it, and what differs in it."""
    named = {type(one).__name__: one for one in optimizers}
    name = "Muon" if "Muon" in named else next(iter(named))
    kind = KNOWN.get(name, "adamw")
    fused = any(group.get("fused") for group in named[name].param_groups)
    kind = "adamw_fused" if kind == "adamw" and fused else kind
    others = [] if name in ALIKE else [f"its optimizer {name} is taken to be {kind}"]
    momentum = name == "SGD" and any(g.get("momentum") for g in named[name].param_groups)
    return kind, (*others, *(["SGD's momentum is left out"] if momentum else []))


def _trains(module: Any) -> bool:
    grad = torch.is_grad_enabled() and module.training
    return grad and any(p.requires_grad for p in module.parameters())


def _form(value: Any) -> Any:
    return form_of(value) if isinstance(value, torch.Tensor) else value
