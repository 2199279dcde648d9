"""Kinds of cases: sizes in, a model with inputs and loss out; importable without torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from microbench.cases.evalcase import EvalCase


def builder(module: str, name: str, **sizes: Any) -> Callable[[], Any]:
    """Builds class ``name`` of ``microbench.cases.<module>``, which needs torch, when called."""

    def build() -> Any:
        return getattr(importlib.import_module(f"microbench.cases.models.{module}"), name)(**sizes)

    return build


def token_inputs(vocab: int) -> Callable[[int, int], dict[str, Any]]:
    """Random tokens."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy: names need no torch

        return {"tokens": torch.randint(0, vocab, (batch, seq))}

    return inputs


def token_loss(logits: Any, given: dict[str, Any]) -> Any:
    """Cross entropy with the inputs as labels."""
    import torch  # lazy, as above

    labels = given["tokens"].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(labels), -1), labels)


def label_loss(logits: Any, given: dict[str, Any]) -> Any:
    """Cross entropy of classes."""
    import torch  # lazy, as above

    return torch.nn.functional.cross_entropy(logits, given["labels"])


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
    """A model over tokens; labels are the inputs."""
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
    """Linear layers with ReLU and a squared error."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {"x": torch.randn(batch, widths[0])}

    def loss(y: Any, given: dict[str, Any]) -> Any:
        return y.square().mean()

    build = builder("small", "Perceptron", widths=widths)
    return EvalCase(name=name, build=build, inputs=inputs, loss=loss, batch=batch)


def pictures(
    name: str, batch: int, image: int, labels: tuple[int, ...], classes: int, **case: Any
) -> EvalCase:
    """A classifier of square pictures with ``labels`` of that shape a picture."""

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
    """A classifier of square pictures."""
    build = builder(module, model, classes=classes, **sizes)
    return pictures(name, batch, image, (), classes, build=build, measured=measured)


def segmentation(
    name: str, model: str, batch: int, image: int, *, classes: int, **sizes: Any
) -> EvalCase:
    """A classifier of every pixel of square pictures; only forecast on a CPU."""
    build = builder("unet", model, classes=classes, **sizes)
    return pictures(name, batch, image, (image, image), classes, build=build, measured=False)


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
    """A classifier of every frame of a signal of ``channels``; only measured where it is named."""

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
    """The noise in square pictures; only measured where it is named."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        pictures, noise = (torch.randn(batch, 3, image, image) for _ in range(2))
        return {"images": pictures, "times": torch.rand(batch), "noise": noise}

    def loss(found: Any, given: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        return torch.nn.functional.mse_loss(found, given["noise"])

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
    **sizes: Any,
) -> EvalCase:
    """A recommendation model; ``rows`` of each table, ``bag`` look-ups per sample and table."""

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

    def loss(logits: Any, given: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        return torch.nn.functional.binary_cross_entropy_with_logits(logits, given["clicked"])

    build = builder("dlrm", "Dlrm", features=features, tables=tables, rows=rows, **sizes)
    return EvalCase(
        name=name, build=build, inputs=inputs, loss=loss, batch=batch, measured=measured
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
    """A classifier of random graphs with ``degree`` edges into each of ``nodes`` nodes."""

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
