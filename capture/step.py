"""Builds one training or inference step of a module as a function to run, time or capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from itercast.capture.base.extensions import function_of
from itercast.capture.base.slow_imports import torch
from itercast.capture.opcall import layer_key

Inputs = dict[str, Any]  # by argument name of the model's forward: tensors, seldom flags
Loss = Callable[[Any, Inputs], "torch.Tensor"]  # of the model's output
# How steps follow each other when they are timed.
SYNCHRONISED, BACK_TO_BACK = TIMINGS = ("synchronised", "back_to_back")
ALLOWED = {
    "mode": ("train", "infer"),
    "optimizer": ("adamw", "adamw_fused", "sgd", "sgd_momentum", "lamb", "muon", "none"),
    "loss": ("default", "none"),
    "dtype": ("fp32", "tf32", "bf16", "fp16"),
    "attn": ("sdpa", "eager"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What one step does: the command line has options of the same names.

    ``amp``: parameters are in fp32, and the forward pass runs under autocast to ``dtype``.
    ``optimizer``: a name, and what is done beside its update: +clip (gradients are clipped to a
    norm over all of them before it), +ema (it moves an average of the parameters), or both.
    ``channels_last``: parameters and inputs of four dimensions lie in memory as NHWC.
    """

    mode: str = "train"
    optimizer: str = "adamw"
    loss: str = "default"
    dtype: str = "fp32"
    attn: str = "sdpa"
    amp: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = update_of(self.optimizer) if name == "optimizer" else getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name} {value!r}: allowed are {', '.join(allowed)}")
        name, *beside = self.optimizer.split("+")
        in_order = beside in (["clip"], ["ema"], ["clip", "ema"])
        if beside and (name in ("muon", "none") or not in_order):
            only = "+clip, +ema or +clip+ema may follow a name, of muon and none nothing"
            raise ValueError(f"optimizer {self.optimizer!r}: {only}")
        if self.amp and self.dtype not in ("bf16", "fp16"):
            raise ValueError(f"amp: dtype is bf16 or fp16, got {self.dtype!r}")

    @property
    def stored(self) -> str:
        """The dtype of parameters, gradients and optimizer state."""
        return "fp32" if self.amp else self.dtype


def update_of(optimizer: str) -> str:
    """The optimizer's name without what is done beside its update: adamw of adamw+clip."""
    return optimizer.partition("+")[0]


def update_event(optimizer: str, kind: str = "step") -> str:
    """The name of the host event that counts an optimizer's Python: ``adamw_step``, ``sgd_step``.

    Momentum has none of its own: it is one more call of SGD's loop.
    """
    return f"{update_of(optimizer).removesuffix('_momentum')}_{kind}"


def hidden_matrices(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters that Muon updates, by name: matrices of numbered layers, without embeddings.

    Embeddings, the head, norms and biases are AdamW's, as https://kellerjordan.github.io/posts/muon
    recommends; stacked experts too, as torch.optim.Muon takes matrices only.
    """
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    others = {id(p) for m in model.modules() if isinstance(m, tables) for p in m.parameters()}
    named = model.named_parameters()
    return {n: p for n, p in named if p.ndim == 2 and layer_key(n) and id(p) not in others}


class _Muon:
    """torch.optim.Muon for some parameters, then a foreach AdamW for the others."""

    def __init__(
        self, parameters: Iterable[Any], matrices: Sequence[Any], capturable: bool
    ) -> None:
        of_muon = {id(p) for p in matrices}
        self.optimizers: list[Any] = [torch.optim.Muon(matrices, lr=1e-4)]
        if others := [p for p in parameters if id(p) not in of_muon]:
            adamw = torch.optim.AdamW(others, lr=1e-4, foreach=True, capturable=capturable)
            self.optimizers.append(adamw)

    def step(self) -> None:
        """Update all parameters that have gradients."""
        for optimizer in self.optimizers:
            optimizer.step()


def make_optimizer(
    parameters: Any, name: str, capturable: bool = False, matrices: Sequence[Any] = ()
) -> Any:
    """Makes a foreach AdamW or SGD, or a fused AdamW or LAMB, with a small constant learning rate.

    Muon updates the ``matrices`` among the parameters, AdamW the others. None for the name "none".
    ``capturable``: its step can be captured in a CUDA graph.
    """
    if name == "none":
        return None
    if name == "muon":
        if not matrices:
            raise ValueError("optimizer 'muon': there are no matrices in numbered layers to update")
        return _Muon(parameters, matrices, capturable)
    if name in ("sgd", "sgd_momentum"):
        momentum = 0.0 if name == "sgd" else 0.9
        return torch.optim.SGD(parameters, lr=1e-4, momentum=momentum, foreach=True)
    if name == "lamb":
        return function_of("optimizers", "lamb")(parameters, lr=1e-4)
    if name not in ("adamw", "adamw_fused"):
        raise ValueError(f"optimizer {name!r}: no optimizer of this name is made")
    fused = name == "adamw_fused"
    return torch.optim.AdamW(
        parameters, lr=1e-4, capturable=capturable, fused=fused, foreach=not fused
    )


def first_float(output: Any) -> torch.Tensor:
    """The first floating-point tensor in the output of a model; ValueError if there is none."""
    values = output.values() if isinstance(output, dict) else output
    if isinstance(output, torch.Tensor):
        return output
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise ValueError("loss 'none' needs a floating-point tensor in the model's output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of a model: what comes before the optimizer, and the optimizer's update."""

    gradients: Callable[[], None]
    update: Callable[[], None]

    def __call__(self) -> None:
        """Run both."""
        self.gradients()
        self.update()


def make_step(
    model: torch.nn.Module,
    inputs: Inputs,
    loss_fn: Loss,
    settings: StepSettings,
    on_phase: Callable[[str], None] = lambda name: None,
    capturable: bool = False,
    precision: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    """Makes a step of a model: a callable that runs forward, backward and the update.

    It calls ``on_phase`` with zero_grad, forward, loss, backward and optimizer as they begin. The
    forward pass and the loss run inside the context ``precision``, such as autocast.
    ``capturable``: the step can be captured in a CUDA graph.
    """
    if settings.mode == "infer":
        return _inference_step(model, inputs, on_phase, precision)
    model.train()
    matrices = list(hidden_matrices(model).values())
    name, *beside = settings.optimizer.split("+")
    optimizer = make_optimizer(model.parameters(), name, capturable, matrices)
    averaged = [p.detach() for p in model.parameters() if p.requires_grad and "ema" in beside]
    averages = [p.clone() for p in averaged]

    def gradients() -> None:
        on_phase("zero_grad")
        for parameter in model.parameters():
            parameter.grad = None
        on_phase("forward")
        with precision():
            output = model(**inputs)
            on_phase("loss")
            loss = loss_fn(output, inputs) if settings.loss == "default" else first_float(output)
        del output  # as torchtitan, Megatron and the Trainer do: what backward reads is kept
        seed = None if settings.loss == "default" else torch.ones_like(loss)
        on_phase("backward")
        loss.backward(seed)

    def update() -> None:
        on_phase("optimizer")
        if "clip" in beside:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        if optimizer is not None:
            optimizer.step()
        if averages:
            torch._foreach_mul_(averages, 0.999)
            torch._foreach_add_(averages, averaged, alpha=0.001)

    return Step(gradients=gradients, update=update)


def _inference_step(
    model: torch.nn.Module,
    inputs: Inputs,
    on_phase: Callable[[str], None],
    precision: Callable[[], AbstractContextManager[None]],
) -> Step:
    """One forward pass in eval mode without gradients, as a function."""
    model.eval()

    def infer() -> None:
        on_phase("forward")
        with torch.no_grad(), precision():
            model(**inputs)

    return Step(gradients=infer, update=lambda: None)
