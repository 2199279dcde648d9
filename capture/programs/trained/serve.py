"""Captures the model that a script trains in any batch, in the process that ran the script."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from itercast.capture.base.files import write_atomic
from itercast.capture.opcall import StepCapture, torch_dtype
from itercast.capture.programs.trained.facts import ANSWER, ASKED, FACTS, REFUSED, Trained
from itercast.capture.programs.trained.finder import Call, Finder, facts_of
from itercast.capture.programs.trained.loss import Form, Scaled, Size
from itercast.capture.recorder.cache import dumps
from itercast.capture.recorder.truncate import capture_shortened
from itercast.capture.step import StepSettings

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model that a script trains, in the script's process, whose tensors stay fake.

    ``on_gpu``: the script put it on a GPU that is not there.
    """

    call: Call
    facts: Trained
    on_gpu: bool

    @classmethod
    def of(cls, finder: Finder, on_gpu: bool) -> TrainedModel:
        """The model that a script trained; ValueError in one line where a plan cannot be of it."""
        call = finder.only()
        return cls(call=call, facts=facts_of(call), on_gpu=on_gpu)

    def capture(
        self, settings: StepSettings, batch: int, seq: int, *, shallow: bool
    ) -> StepCapture:
        """Capture one micro-batch of its step: forward, loss, backward, and the update."""
        own = Size(batch=self.facts.batch, seq=self.facts.seq)
        size = Scaled(own=own, wanted=Size(batch=batch, seq=seq))
        stored = torch_dtype(settings.stored)
        was = torch.float32 if self.facts.amp else torch_dtype(self.facts.dtype)
        dtype = None if stored == was else stored
        model, tape = self.call.model, self.call.tape

        def given() -> dict[str, Any]:
            named = {str(i): one for i, one in enumerate(self.call.arguments)}
            return {k: self._value(v, size, dtype) for k, v in (named | self.call.options).items()}

        def loss(output: Any, inputs: Any) -> Any:
            if tape is None:
                raise ValueError("the model has no loss")
            return tape.play(output, dict(model.named_parameters()), size, dtype)

        with self._fresh(dtype):
            return capture_shortened(
                type(model).__name__,
                lambda: model,
                given,
                loss,
                settings,
                samples=batch,
                tokens=batch * seq,
                shallow=shallow,
                fake=self._mode,
            )

    def _value(self, value: Any, size: Scaled, dtype: torch.dtype | None) -> Any:
        if isinstance(value, Form):
            return self._placed(value.tensor(size, dtype))
        if isinstance(value, Mapping):
            return {k: self._value(v, size, dtype) for k, v in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(self._value(v, size, dtype) for v in value)
        return value

    @property
    def _mode(self) -> Any:
        """The mode of fake tensors that the script ran in."""
        first: Any = next(self.call.model.parameters()).data
        return first.fake_mode

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cuda() if self.on_gpu else tensor

    @contextmanager
    def _fresh(self, dtype: torch.dtype | None) -> Iterator[None]:
        """New parameters, without gradients or hooks, inside the context; all comes back after.

        The model takes its arguments by name there, and lists of its layers may be cut.
        """
        model, forward = self.call.model, self.call.model.forward
        held = [
            (m, dict(m._parameters), dict(m._buffers), dict(m._modules)) for m in model.modules()
        ]
        count = len(self.call.arguments)

        def by_name(**named: Any) -> Any:
            first = [named.pop(str(i)) for i in range(count)]
            return forward(*first, **named)

        own = model.__dict__.get("forward")
        try:
            with self._mode:
                self._renew(held, dtype)
            model.forward = by_name
            yield
        finally:
            model.__dict__.pop("forward", None)
            if own is not None:
                model.forward = own
            for module, parameters, buffers, modules in held:
                module._parameters.update(parameters)
                module._buffers.update(buffers)
                module._modules.update(modules)

    def _renew(self, held: list[tuple[Any, ...]], dtype: torch.dtype | None) -> None:
        """Give modules new parameters of the same form, tied ones the same."""
        made: dict[int, torch.nn.Parameter] = {}
        for module, parameters, buffers, _ in held:
            for name, old in parameters.items():
                if old is not None and id(old) not in made:
                    floats = dtype is not None and old.is_floating_point()
                    new = torch.empty_strided(
                        old.size(), old.stride(), dtype=dtype if floats else old.dtype
                    )
                    made[id(old)] = torch.nn.Parameter(self._placed(new), old.requires_grad)
                if old is not None:
                    module._parameters[name] = made[id(old)]
            for name, old in buffers.items():
                if old is not None and dtype is not None and old.is_floating_point():
                    module._buffers[name] = self._placed(old.to(dtype))


def serve(model: TrainedModel, folder: Path) -> None:
    """Write what is known of a model, then capture it as files in a folder ask, until killed."""
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
