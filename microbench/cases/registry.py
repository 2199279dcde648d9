"""The cases we forecast and measure, by name; importable without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalCase:
    """A model with its inputs and loss; ``measured`` cases are small enough for two cores.

    ``inputs(batch, seq)`` gives the keyword arguments of the model's forward; ``loss(output,
    inputs)`` a scalar. ``seq`` is 0 where there is none.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int, int], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Any]
    batch: int
    seq: int = 0
    measured: bool = True


def decoder(name: str, sizes: dict[str, Any], batch: int, seq: int, measured: bool) -> EvalCase:
    """A transformer over tokens; labels are the inputs."""

    def build() -> Any:
        from microbench.cases.transformers import Transformer  # lazy: names need no torch

        return Transformer(**sizes)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {"tokens": torch.randint(0, sizes["vocab"], (batch, seq))}

    def loss(logits: Any, given: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        labels = given["tokens"].reshape(-1)
        return torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels)

    return EvalCase(
        name=name, build=build, inputs=inputs, loss=loss, batch=batch, seq=seq, measured=measured
    )


def perceptron(name: str, widths: tuple[int, ...], batch: int) -> EvalCase:
    """Linear layers with ReLU and a squared error."""

    def build() -> Any:
        from microbench.cases.small import Perceptron  # lazy: names need no torch

        return Perceptron(widths)

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {"x": torch.randn(batch, widths[0])}

    def loss(y: Any, given: dict[str, Any]) -> Any:
        return y.square().mean()

    return EvalCase(name=name, build=build, inputs=inputs, loss=loss, batch=batch)


def _transformer(style: str, width: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {"style": style, "width": width, "layers": layers, "heads": heads, "vocab": vocab}


def _all_cases() -> list[EvalCase]:
    small, real = True, False
    return [
        perceptron("mlp-s", (128, 256, 256, 64), 64),
        perceptron("mlp-m", (512, 1024, 1024, 256), 128),
        perceptron("mlp-l", (1024, 2048, 2048, 512), 256),
        decoder("gpt-s", _transformer("gpt", 96, 2, 4, 512), 4, 64, small),
        decoder("gpt-m", _transformer("gpt", 192, 4, 6, 1024), 4, 96, small),
        decoder("gpt-l", _transformer("gpt", 320, 5, 5, 2048), 4, 128, small),
        decoder("bert-s", _transformer("bert", 128, 2, 2, 768), 4, 48, small),
        decoder("bert-m", _transformer("bert", 256, 3, 4, 1000), 8, 64, small),
        decoder("bert-l", _transformer("bert", 384, 4, 6, 2000), 8, 96, small),
        decoder("llama-s", _transformer("llama", 64, 3, 4, 400), 8, 64, small),
        decoder("llama-m", _transformer("llama", 256, 4, 4, 800), 4, 80, small),
        decoder("llama-l", _transformer("llama", 384, 5, 6, 1600), 4, 128, small),
        decoder("gpt2-small", _transformer("gpt", 768, 12, 12, 50257), 8, 1024, real),
        decoder("bert-base", _transformer("bert", 768, 12, 12, 30522), 8, 512, real),
    ]


def case_names() -> list[str]:
    """Names of all cases."""
    return [c.name for c in _all_cases()]


def case(name: str) -> EvalCase:
    """The case of that name."""
    for one in _all_cases():
        if one.name == name:
            return one
    raise ValueError(f"unknown case {name!r}; known: {', '.join(case_names())}")
