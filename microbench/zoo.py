"""Points that real models call: op calls captured from random models of many kinds.

Sizes are drawn anew for every model and are not those of the cases we validate on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from microbench.ops import families, find_family
from microbench.ops.family import log_uniform
from microbench.store import write_atomic


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A model, its inputs and its loss, as ``capture_step`` takes them."""

    build: Callable[[], Any]
    inputs: Callable[[], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], Any]


def from_case(case: Any) -> Draw:
    """An evaluation case's builder with other sizes."""
    return Draw(build=case.build, inputs=lambda: case.inputs(case.batch, case.seq), loss=case.loss)


def transformer(rng: np.random.Generator, largest: int) -> Draw:
    """GPT, BERT or Llama style; one block, since blocks repeat."""
    from microbench.cases.registry import decoder

    heads = int(rng.choice([2, 4, 6, 8, 12, 16]))
    per_head = min(int(rng.choice([16, 32, 48, 64, 80, 96, 128])), max(16, largest // heads))
    sizes = {
        "style": str(rng.choice(["gpt", "bert", "llama"])),
        "width": heads * per_head,
        "layers": 1,
        "heads": heads,
        "vocab": log_uniform(rng, 256, 24 * largest),
    }
    batch, seq = log_uniform(rng, 2, 16), log_uniform(rng, 24, largest // 2)
    return from_case(decoder("zoo", sizes, batch, seq, False))


def perceptron(rng: np.random.Generator, largest: int) -> Draw:
    """Three layers."""
    from microbench.cases.registry import perceptron

    widths = tuple(8 * log_uniform(rng, 4, largest // 2) for _ in range(4))
    return from_case(perceptron("zoo", widths, log_uniform(rng, 16, largest)))


KINDS: tuple[Callable[[np.random.Generator, int], Draw], ...] = (transformer, perceptron)
LARGEST = {"cpu": 512, "cuda": 8192}  # width of the widest model
MODELS = 36


def captured_points(device: str, models: int, seed: int) -> dict[str, list[Any]]:
    """Distinct parameters by family, as ``models`` random models call them."""
    from microbench.capture import capture_step
    from microbench.step import StepSettings

    rng = np.random.default_rng(seed)
    found: dict[str, dict[Any, None]] = {name: {} for name in families()}
    for number in range(models):
        draw = KINDS[number % len(KINDS)](rng, LARGEST[device])
        optimizer = "adamw" if number % 3 else "sgd"
        settings = StepSettings(optimizer=optimizer)
        capture = capture_step(draw.build, draw.inputs, draw.loss, settings)
        for call in capture.calls:
            family, params = find_family(call)
            if family is not None:
                found[family.name][params] = None
    return {name: list(points) for name, points in found.items()}


def points_file(root: Path, device: str, seed: int) -> Path:
    """The captured points of this seed, written where they are missing."""
    path = root / ".journal" / f"points-{device}-{seed}.json"
    if not path.is_file():
        found = captured_points(device, MODELS, seed)
        plain = {name: [asdict(p) for p in points] for name, points in found.items()}
        write_atomic(path, json.dumps(plain).encode())
    return path


def read_points(path: Path, name: str) -> list[Any]:
    """The points of one family."""
    return [families()[name].params(**p) for p in json.loads(path.read_text())[name]]


def mixed(points: list[Any], grid: Iterator[Any], seed: int) -> Iterator[Any]:
    """Captured points and points of the family's own sweep in turn; then the sweep alone."""
    order = np.random.default_rng(seed).permutation(len(points))
    for index in order:
        yield points[index]
        point = next(grid, None)
        if point is not None:
            yield point
    yield from grid
