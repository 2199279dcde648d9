"""Captures the model that a script trains in any batch, in the process that ran the script."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint

from itercast.capture.base.files import write_atomic
from itercast.capture.opcall import StepCapture, TensorSpec, torch_dtype
from itercast.capture.programs.trained.bare import make_bare
from itercast.capture.programs.trained.facts import ANSWER, ASKED, FACTS, REFUSED, Trained
from itercast.capture.programs.trained.finder import (
    Finder,
    facts_of,
    held_dtype,
    size_of,
    with_function,
)
from itercast.capture.programs.trained.loss import Form, LossTape, Rescaled, Size
from itercast.capture.recorder.cache import dumps
from itercast.capture.recorder.truncate import capture_shortened
from itercast.capture.step import StepSettings

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that a script trains, in the script's process, whose tensors stay fake.

    ``size``: of the script's own micro-batch. ``mode``: of the fake tensors that the script ran
    with. ``on_gpu``: the script put it on a GPU that is not there. ``checkpoints``: autograd
    functions that recompute (``Finder``).
    """

    tape: LossTape
    facts: Trained
    size: Size
    mode: Any
    on_gpu: bool
    checkpoints: frozenset[Any]

    @classmethod
    def of(cls, finder: Finder, on_gpu: bool) -> TrainedModel:
        """The model that a ``Finder`` found; ValueError where no plan can be made for it.

        Wrappers that split the model over GPUs are removed.
        """
        call = finder.only()
        p: Any = next(call.models[0].parameters()).data
        mode = getattr(p, "_local_tensor", p).fake_mode
        for module in call.wrapped:
            call.autocast = make_bare(module) or call.autocast
        if call.tape is None:
            raise ValueError("no loss was recorded")
        facts, size = facts_of(call), size_of(call)
        return cls(
            tape=call.tape,
            facts=facts,
            size=size,
            mode=mode,
            on_gpu=on_gpu,
            checkpoints=frozenset(finder.checkpoints),
        )

    def capture(
        self, settings: StepSettings, batch: int, seq: int, *, shallow: bool
    ) -> StepCapture:
        """Capture one micro-batch of its step: forward, loss, backward, and the update.

        ``shallow``: equal layers may be left out (``capture_shortened``), if the model is called
        once. Where a model is called several times, or there are several models, forward computes
        the loss too.
        """
        size = Rescaled(own=self.size, wanted=Size(batch=batch, seq=seq))
        models, tape = self.tape.models, self.tape
        in_half = settings.amp and torch_dtype(settings.dtype) == held_dtype(models)
        settings = replace(settings, amp=settings.amp and not in_half)  # weights are cast already
        stored = torch_dtype(settings.stored)
        dtype = None if stored == held_dtype(models) else stored
        alone = tape.calls_of_models == 1
        whole, first = models[0] if alone else Together(models), tape.calls[0]

        def inputs() -> dict[str, Any]:
            named = {str(i): value for i, value in enumerate(first.arguments)} | dict(first.options)
            return {k: self._value(v, size, dtype) for k, v in named.items()}

        def loss(output: Any) -> Any:
            named = {f"{id(m)}.{n}": p for m in models for n, p in m.named_parameters()}
            new_tensor = partial(self._new_tensor, size=size, dtype=dtype)
            return tape.replay(output, named, size, new_tensor)

        def run(**named: Any) -> Any:
            args = [named.pop(str(i)) for i in range(len(first.arguments))]
            return forward(*args, **named) if alone else loss(models[0](*args, **named))

        forward = whole.forward
        with self._fresh(whole, run, size, dtype), _without_checkpointing(self.checkpoints):
            step = capture_shortened(
                self.facts.model,
                lambda: whole,
                inputs,
                lambda output, inputs: loss(output) if alone else output,
                settings,
                samples=batch,
                tokens=batch * seq,
                shallow=shallow and alone,
                fake=self.mode,
            )
        return updated_in_fp32(step) if in_half else step

    def _new_tensor(self, form: Form, size: Rescaled, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of a form, on the GPU if the model is there."""
        return self._placed(form.tensor(size, dtype))

    def _value(self, value: Any, size: Rescaled, dtype: torch.dtype | None) -> Any:
        """A recorded argument at another size: forms in it become tensors."""
        if isinstance(value, Form):
            return self._new_tensor(value, size, dtype)
        if isinstance(value, Mapping):
            return {k: self._value(v, size, dtype) for k, v in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._value(v, size, dtype) for v in value)
        return value

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the GPU, if the script put the model there."""
        return tensor.cuda() if self.on_gpu else tensor

    @contextmanager
    def _fresh(
        self, model: Any, forward: Any, size: Rescaled, dtype: torch.dtype | None
    ) -> Iterator[None]:
        """Give the model new parameters, without gradients or hooks, inside the context.

        Inside, ``forward`` replaces the model's forward, and buffers with a row for each token of a
        sequence have the length of ``size``. Afterwards all is as before.
        """
        held = [  # dicts of modules, the dtype for tensors in them, and these tensors
            (owner, to, {k: v for k, v in owner.items() if isinstance(v, torch.Tensor)})
            for m in model.modules()
            for owner, to in ((m._parameters, dtype), (m._buffers, dtype), (vars(m), None))
        ]
        own, renewed = model.__dict__.get("forward"), dict[int, torch.nn.Parameter]()
        try:
            with self.mode:
                for owner, to, old in held:
                    owner.update((k, self._renewed(v, size, to, renewed)) for k, v in old.items())
            model.forward = forward
            yield
        finally:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.forward = own
            for owner, _, old in held:
                owner.update(old)

    def _renewed(
        self,
        old: torch.Tensor,
        size: Rescaled,
        dtype: torch.dtype | None,
        renewed: dict[int, torch.nn.Parameter],
    ) -> torch.Tensor:
        """A new tensor in place of one of the model's: parameters keep their shape and strides.

        ``renewed``: new parameters by the id of the old one, so that tied ones stay tied. Buffers
        get the shape that they have at ``size``; floats get ``dtype``, unless it is None.
        """
        to = dtype if dtype is not None and old.is_floating_point() else old.dtype
        if isinstance(old, torch.nn.Parameter):
            if id(old) not in renewed:
                new = torch.empty_strided(old.size(), old.stride(), dtype=to)
                renewed[id(old)] = torch.nn.Parameter(self._placed(new), old.requires_grad)
            return renewed[id(old)]
        shape = size.table(old.shape)
        if to == old.dtype and shape == list(old.shape):
            return old
        return self._placed(old.new_empty(shape, dtype=to))


@contextmanager
def _without_checkpointing(functions: Iterable[Any]) -> Iterator[None]:
    """Let checkpoints save all activations: each plan says later what it recomputes.

    ``functions``: autograd functions that recompute.
    """

    def no_hooks(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        own = "_checkpoint_without_reentrant_generator"
        stack.enter_context(patch.object(checkpoint, own, no_hooks))
        for function in functions:
            stack.enter_context(patch.object(function, "apply", partial(_saving_all, function)))
        yield


class NoContext:
    """Stands for the context ``ctx`` of an autograd function without a backward: keeps nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _saving_all(function: Any, *args: Any) -> Any:
    """Run the forward of a recomputing autograd function so that autograd saves everything.

    The function among its arguments runs with gradients.
    """
    arguments = with_function(args, torch.enable_grad())
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*arguments)
    return function.forward(NoContext(), *arguments)


def updated_in_fp32(step: StepCapture) -> StepCapture:
    """A copy of a half-precision step whose optimizer updates fp32 parameters."""

    def fp32(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return replace(value, dtype="fp32") if value.dtype in ("bf16", "fp16") else value
        return tuple(map(fp32, value)) if isinstance(value, tuple) else value

    calls = tuple(
        replace(c, args=fp32(c.args), outputs=fp32(c.outputs)) if c.phase == "optimizer" else c
        for c in step.calls
    )
    parameters = tuple(replace(p, dtype="fp32") for p in step.parameters)
    return replace(step, calls=calls, parameters=parameters)


class Together(torch.nn.Module):
    """Several models that a script calls before one backward, as one module."""

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for i, model in enumerate(models):
            self.add_module(str(i), model)


def serve(model: TrainedModel, folder: Path) -> None:
    """Write the facts of a model to a folder, then answer files there that ask for captures.

    It ends when the parent process does, or is killed.
    """
    write_atomic(folder / FACTS, json.dumps(asdict(model.facts)).encode())
    parent = os.getppid()
    while os.getppid() == parent:
        for path in folder.glob(f"*{ASKED}"):
            asked = json.loads(path.read_text())
            path.unlink()
            settings = StepSettings(**asked.pop("settings"))
            try:
                step = model.capture(settings, **asked)
                write_atomic(path.with_suffix(ANSWER), dumps(step))
            except ValueError as exc:
                write_atomic(path.with_suffix(REFUSED), str(exc).encode())
        time.sleep(POLL_S)
