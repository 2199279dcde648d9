"""Functions that make a case of one kind from its sizes: its model, inputs and loss.

They import torch only when a model, inputs or a loss are made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from itercast.microbench.cases.evalcase import EvalCase


def builder(module: str, name: str, **sizes: Any) -> Callable[[], Any]:
    """A function that builds class ``name`` of ``itercast.microbench.cases.models.<module>``."""

    def build() -> Any:
        return getattr(importlib.import_module(f"itercast.microbench.cases.models.{module}"), name)(
            **sizes
        )

    return build


def token_inputs(vocab: int) -> Callable[[int, int], dict[str, Any]]:
    """A function (batch, seq) -> inputs that draws random tokens."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy: names need no torch

        return {"tokens": torch.randint(0, vocab, (batch, seq))}

    return inputs


def token_loss(logits: Any, inputs: dict[str, Any]) -> Any:
    """Cross-entropy with the input tokens as labels."""
    import torch  # lazy, as above

    labels = inputs["tokens"].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels)


def label_loss(logits: Any, inputs: dict[str, Any]) -> Any:
    """Cross-entropy of class labels."""
    import torch  # lazy, as above

    return torch.nn.functional.cross_entropy(logits, inputs["labels"])


def language(
    name: str,
    model: str,
    batch: int,
    seq: int,
    *,
    vocab: int,
    module: str = "transformers",
    measured: bool = True,
    **sizes: Any,
) -> EvalCase:
    """A language model whose labels are its input tokens."""
    return EvalCase(
        name=name,
        build=builder(module, model, vocab=vocab, **sizes),
        inputs=token_inputs(vocab),
        loss=token_loss,
        batch=batch,
        seq=seq,
        measured=measured,
    )


def perceptron(name: str, widths: tuple[int, ...], batch: int) -> EvalCase:
    """A multilayer perceptron with a squared-error loss."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {"x": torch.randn(batch, widths[0])}

    def loss(y: Any, inputs: dict[str, Any]) -> Any:
        return y.square().mean()

    build = builder("small", "Perceptron", widths=widths)
    return EvalCase(name=name, build=build, inputs=inputs, loss=loss, batch=batch)


def image_case(
    name: str, batch: int, image: int, labels: tuple[int, ...], classes: int, **case: Any
) -> EvalCase:
    """A case with square images; ``labels`` is the shape of the labels of one image."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {
            "images": torch.randn(batch, 3, image, image),
            "labels": torch.randint(0, classes, (batch, *labels)),
        }

    return EvalCase(name=name, inputs=inputs, loss=label_loss, batch=batch, **case)


def images(
    name: str,
    model: str,
    batch: int,
    image: int,
    *,
    classes: int,
    module: str = "vision",
    measured: bool = True,
    **sizes: Any,
) -> EvalCase:
    """An image classifier."""
    build = builder(module, model, classes=classes, **sizes)
    return image_case(name, batch, image, (), classes, build=build, measured=measured)


def segmentation(
    name: str, model: str, batch: int, image: int, *, classes: int, **sizes: Any
) -> EvalCase:
    """A segmentation model, which classifies every pixel; not among the measured CPU cases."""
    build = builder("unet", model, classes=classes, **sizes)
    return image_case(name, batch, image, (image, image), classes, build=build, measured=False)


def signals(
    name: str,
    module: str,
    model: str,
    batch: int,
    seq: int,
    channels: int,
    *,
    classes: int,
    **sizes: Any,
) -> EvalCase:
    """A model that classifies every frame of a signal; measured only if it is named."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        labels = torch.randint(0, classes, (batch, seq))
        return {"signal": torch.randn(batch, seq, channels), "labels": labels}

    return EvalCase(
        name=name,
        build=builder(module, model, classes=classes, **sizes),
        inputs=inputs,
        loss=label_loss,
        batch=batch,
        seq=seq,
        measured=False,
    )


def denoiser(name: str, batch: int, image: int, **sizes: Any) -> EvalCase:
    """Make the case of a diffusion model that predicts the noise in images (mean squared error).

    It is not among the cases measured by default; name it to measure it.
    """

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        images, noise = (torch.randn(batch, 3, image, image) for _ in range(2))
        return {"images": images, "times": torch.rand(batch), "noise": noise}

    def loss(predicted: Any, inputs: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        return torch.nn.functional.mse_loss(predicted, inputs["noise"])

    build = builder("denoiser", "Denoiser", **sizes)
    return EvalCase(name=name, build=build, inputs=inputs, loss=loss, batch=batch, measured=False)


def clicks(
    name: str,
    batch: int,
    *,
    features: int,
    tables: int,
    rows: int | tuple[int, ...],
    bag: int,
    measured: bool = True,
    optimizer: str = "adamw",
    **sizes: Any,
) -> EvalCase:
    """A recommendation model with ``rows`` per table and ``bag`` lookups per sample and table."""

    def indices(lookups: int) -> Any:
        import torch  # lazy, as above

        if isinstance(rows, int):
            return torch.randint(0, rows, (tables, lookups))
        return torch.stack([torch.randint(0, n, (lookups,)) for n in rows])

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {
            "dense": torch.randn(batch, features),
            "indices": indices(batch * bag),
            "offsets": torch.arange(0, batch * bag, bag),
            "clicked": torch.randint(0, 2, (batch,)).to(torch.get_default_dtype()),
        }

    def loss(logits: Any, inputs: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        return torch.nn.functional.binary_cross_entropy_with_logits(logits, inputs["clicked"])

    build = builder("dlrm", "Dlrm", features=features, tables=tables, rows=rows, **sizes)
    return EvalCase(
        name=name,
        build=build,
        inputs=inputs,
        loss=loss,
        batch=batch,
        measured=measured,
        optimizer=optimizer,
    )


def graphs(
    name: str,
    batch: int,
    *,
    nodes: int,
    degree: int,
    features: int,
    classes: int,
    measured: bool = True,
    **sizes: Any,
) -> EvalCase:
    """A classifier of random graphs of ``nodes`` nodes with ``degree`` edges each on average."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        graph = torch.arange(batch).repeat_interleave(nodes, output_size=batch * nodes)
        edges = batch * nodes * degree
        first = torch.arange(batch).mul(nodes).repeat_interleave(nodes * degree, output_size=edges)
        return {
            "nodes": torch.randn(batch * nodes, features),
            "source": first + torch.randint(0, nodes, (edges,)),
            "target": first + torch.randint(0, nodes, (edges,)),
            "weight": torch.full((edges, 1), 1 / degree),
            "graph": graph,
            "labels": torch.randint(0, classes, (batch,)),
        }

    return EvalCase(
        name=name,
        build=builder("graph", "GraphNet", features=features, classes=classes, **sizes),
        inputs=inputs,
        loss=label_loss,
        batch=batch,
        measured=measured,
    )
