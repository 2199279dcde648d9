"""Points for a sweep, captured as the op calls of random models of many kinds.

Sizes are drawn at random for each model, so they are not those of the cases used for validation.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from itercast.capture.base.files import write_atomic
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.kinds import Sizes, make_case
from itercast.microbench.ops import families, find_family
from itercast.microbench.ops.family import Point, log_uniform


def transformer(rng: np.random.Generator, largest: int) -> EvalCase:
    """One block in the style of GPT, BERT or Llama, some with experts; further blocks are equal."""
    heads = int(rng.choice([2, 4, 6, 8, 12, 16] if largest < 2048 else [8, 12, 16, 20, 25, 32, 40]))
    per_head = min(int(rng.choice([16, 32, 48, 64, 80, 96, 128])), max(16, largest // heads))
    style = str(rng.choice(["gpt", "bert", "llama"]))
    heads -= heads % 2 if style == "llama" else 0  # two heads share a key
    sizes: Sizes = {"width": heads * per_head, "layers": 1, "heads": heads}
    if rng.random() < 0.3:
        more = {"experts": int(rng.choice([4, 6, 8, 12])), "top": int(rng.choice([1, 2]))}
        sizes = {**sizes, **more}
    batch, seq = log_uniform(rng, 2, 16), log_uniform(rng, 24, largest // 2)
    vocab = log_uniform(rng, 256, 24 * largest)
    return make_case(
        "random", "transformer", batch=batch, seq=seq, vocab=vocab, style=style, **sizes
    )


def perceptron(rng: np.random.Generator, largest: int) -> EvalCase:
    """A perceptron of three layers."""
    widths = tuple(8 * log_uniform(rng, 4, largest // 2) for _ in range(4))
    return make_case("random", "perceptron", widths=widths, batch=log_uniform(rng, 16, largest))


def vit(rng: np.random.Generator, largest: int) -> EvalCase:
    """A vision transformer with one block."""
    heads, patch = int(rng.choice([2, 3, 4, 6, 8])), int(rng.choice([4, 6, 8, 16]))
    heads *= 1 if largest < 2048 else 3
    width = heads * int(rng.choice([32, 48, 64]))
    size = patch * log_uniform(rng, 4, 12 if largest < 2048 else 24)
    sizes: Sizes = {"size": size, "patch": patch, "width": width, "heads": heads, "layers": 1}
    batch, classes = log_uniform(rng, 2, largest // 32), log_uniform(rng, 10, 1000)
    return make_case("random", "vit", batch=batch, classes=classes, **sizes)


def resnet(rng: np.random.Generator, largest: int) -> EvalCase:
    """A ResNet of four stages with one or two blocks each."""
    return make_case(
        "random",
        "resnet",
        width=8 * log_uniform(rng, 1, min(largest // 64, 16)),
        stages=tuple(int(n) for n in rng.integers(1, 3, 4)),
        bottleneck=bool(rng.random() < 0.5),
        **_image_sizes(rng, largest),
    )


def convnet(rng: np.random.Generator, largest: int) -> EvalCase:
    """An EfficientNet, ConvNeXt or DenseNet of two stages."""
    kind = str(rng.choice(["efficientnet", "convnext", "densenet"]))
    width = 8 * log_uniform(rng, 2, min(largest // 32, 48))
    sizes: Sizes = {"widths": (width, 2 * width, 3 * width), "depth": 1}
    if kind == "densenet":
        sizes = {"width": width, "growth": 8 * int(rng.integers(1, 5)), "depth": 3}
    return make_case("random", kind, **sizes, **_image_sizes(rng, largest))


def _image_sizes(rng: np.random.Generator, largest: int) -> Sizes:
    batch = log_uniform(rng, 2, largest // 32)
    image = 32 * log_uniform(rng, 1, 4 if largest < 2048 else 8)
    return {"batch": batch, "image": image, "classes": 100}


def recurrent(rng: np.random.Generator, largest: int) -> EvalCase:
    """A GRU or LSTM language model of one or two layers."""
    width, layers = 8 * log_uniform(rng, 4, largest // 8), int(rng.integers(1, 3))
    cell = str(rng.choice(["gru", "lstm"]))
    batch, seq = log_uniform(rng, 4, 64), log_uniform(rng, 8, 40)
    sizes: Sizes = {"vocab": log_uniform(rng, 256, 8 * largest), "width": width, "layers": layers}
    return make_case("random", "recurrent", batch=batch, seq=seq, cell=cell, **sizes)


def recommender(rng: np.random.Generator, largest: int) -> EvalCase:
    """A DLRM; on a GPU each embedding table has its own size."""
    wide = 8 * log_uniform(rng, 8, largest // 8)
    tables = log_uniform(rng, 3, 24 if largest < 2048 else 64)
    rows: int | tuple[int, ...] = log_uniform(rng, 500, 64 * largest)
    if largest >= 2048:
        rows = tuple(log_uniform(rng, 1000, 2_000_000) for _ in range(tables))
    return make_case(
        "random",
        "dlrm",
        batch=log_uniform(rng, 64, 4 * largest),
        features=log_uniform(rng, 8, 64),
        bottom=(wide, wide // 2),
        tables=tables,
        rows=rows,
        bag=log_uniform(rng, 1, 16 if largest < 2048 else 64),
        width=int(rng.choice([16, 32, 48, 64, 96] if largest < 2048 else [32, 64, 96, 128])),
        top=(2 * wide, wide),
    )


def graph(rng: np.random.Generator, largest: int) -> EvalCase:
    """A graph network of two layers on random edges, with or without attention."""
    return make_case(
        "random",
        "graph",
        batch=log_uniform(rng, 4, largest // 16),
        nodes=log_uniform(rng, 20, 200),
        degree=log_uniform(rng, 3, 16),
        features=log_uniform(rng, 16, 128),
        width=8 * log_uniform(rng, 4, largest // 16),
        layers=2,
        classes=log_uniform(rng, 5, 50),
        attention=bool(rng.random() < 0.4),
    )


MODELS: tuple[Callable[[np.random.Generator, int], EvalCase], ...] = (
    transformer,
    perceptron,
    vit,
    resnet,
    convnet,
    transformer,
    recurrent,
    recommender,
    graph,
)
SGD, ADAMW = {"optimizer": "sgd"}, {"optimizer": "adamw"}
MUON = {"optimizer": "muon", "amp": True, "dtype": "bf16"}
SETTINGS: tuple[dict[str, Any], ...] = (SGD, ADAMW, ADAMW, SGD, ADAMW, MUON, SGD, ADAMW, ADAMW)
LARGEST = {"cpu": 512, "cuda": 8192}  # width of the widest model
MODEL_COUNT = 40
CAPTURE_SHARE = 0.25  # of the time of a sweep that captures models between its points
DONE, SECONDS = "models", "seconds"  # in a file of captured points, beside the families
CAPTURED_PER_SWEPT = 2


class ModelCaptures:
    """Captures the random models of a seed one by one; after each its points are in the file.

    ``done``: models captured, by earlier processes too. A file that does not say so is complete.
    """

    def __init__(self, path: Path, device: str, seed: int) -> None:
        stored = json.loads(path.read_text()) if path.is_file() else {DONE: 0}
        rng = np.random.default_rng(seed)
        self.path = path
        self.done = int(stored.get(DONE, MODEL_COUNT))
        self.seconds = float(stored.get(SECONDS, 0.0))
        self.taken_s = 0.0  # by this process
        self.models = [MODELS[n % len(MODELS)](rng, LARGEST[device]) for n in range(MODEL_COUNT)]
        self.points: dict[str, dict[Point, None]] = {
            name: dict.fromkeys(read_points(path, name) if self.done else ()) for name in families()
        }

    def due(self, elapsed_s: float, names: Sequence[str]) -> bool:
        """Whether to capture a model now: captures take a fixed share of a sweep of families.

        None if no kind of model calls these families.
        """
        left = self.done < MODEL_COUNT and self.taken_s < CAPTURE_SHARE * elapsed_s
        return left and (self.done < len(MODELS) or any(self.points[name] for name in names))

    def capture_next(self) -> None:
        """Capture a model and write all points, with those of this model."""
        from itercast.capture.recorder.log import capture_step
        from itercast.capture.step import StepSettings

        begin_s, model = time.monotonic(), self.models[self.done]
        settings = StepSettings(**SETTINGS[self.done % len(MODELS)])
        inputs = partial(model.inputs, model.batch, model.seq)
        for call in capture_step(model.build, inputs, model.loss, settings).calls:
            family, params = find_family(call)
            if family is not None:
                self.points[family.name][params] = None
        self.done += 1
        took_s = time.monotonic() - begin_s
        self.taken_s, self.seconds = self.taken_s + took_s, self.seconds + took_s
        done = {DONE: self.done, SECONDS: round(self.seconds, 3)}
        write_points(self.path, {name: list(some) for name, some in self.points.items()}, done)


def capture_seconds(path: Path) -> float:
    """How long the captures of a file of points took; 0 where it does not say."""
    return float(json.loads(path.read_text()).get(SECONDS, 0.0)) if path.is_file() else 0.0


def points_path(root: Path, device: str, seed: int) -> Path:
    """Path of the captured points of a sweep."""
    return root / ".journal" / f"points-{device}-{seed}.json"


def points_file(root: Path, device: str, seed: int) -> Path:
    """Path of the captured points of this seed; captures the models that are missing there."""
    captures = ModelCaptures(points_path(root, device, seed), device, seed)
    while captures.done < MODEL_COUNT:
        captures.capture_next()
    return captures.path


def write_points(
    path: Path, points: Mapping[str, Sequence[Point]], more: Mapping[str, float] | None = None
) -> None:
    """Write points by family as JSON, as ``read_points`` reads them; ``more`` beside them."""
    plain = {name: [asdict(p) for p in some] for name, some in points.items()}
    write_atomic(path, json.dumps({**(more or {}), **plain}).encode())


def read_points(path: Path, name: str) -> list[Point]:
    """The points of one family in a file, in its order."""
    return [families()[name].params(**p) for p in json.loads(path.read_text()).get(name, ())]


def check_points(path: Path) -> int:
    """Number of points in a file; ValueError where it is not a file of points."""
    try:
        listed = [n for n in json.loads(path.read_text()) if n not in (DONE, SECONDS)]
        return sum(len(read_points(path, name)) for name in listed)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise ValueError(f"points {str(path)!r}: not a file of points ({reason})") from exc


def alternate(
    path: Path,
    name: str,
    grid: Iterator[Point],
    seed: int,
    as_called: Callable[[Iterator[Point]], Iterator[Point]] = iter,
) -> Iterator[Point]:
    """Two captured points, then one of the family's sweep, and so on; at last only the sweep.

    The file may be written, and grow, meanwhile. ``as_called`` turns captured points into those
    that the measured device calls.
    """
    seen: set[Point] = set()
    waiting: deque[Point] = deque()
    written_ns, since = 0, 0
    captured = as_called(_popped(waiting))
    while True:
        if path.is_file() and (now_ns := path.stat().st_mtime_ns) != written_ns:
            fresh = [p for p in read_points(path, name) if p not in seen]
            seen.update(fresh)
            mixed, written_ns = by_turns([*waiting, *fresh], seed), now_ns
            waiting.clear()
            waiting.extend(mixed)
            captured = as_called(_popped(waiting))
        point = next(captured, None) if since < CAPTURED_PER_SWEPT else None
        since = 0 if point is None else since + 1
        if point is None and (point := next(grid, None)) is None:
            yield from captured
            return
        yield point


def _popped(waiting: deque[Point]) -> Iterator[Point]:
    while waiting:
        yield waiting.popleft()


def by_turns(points: Sequence[Point], seed: int) -> list[Point]:
    """Orders points at random so that all kinds (op, form, dtype) come early.

    A kind with n points comes sqrt(n) times as often as a kind with one.
    """
    shuffled = [points[i] for i in np.random.default_rng(seed).permutation(len(points))]
    kinds = [tuple(v for v in asdict(p).values() if isinstance(v, str)) for p in shuffled]
    sizes, seen = Counter(kinds), Counter[tuple[str, ...]]()
    turns = []
    for kind in kinds:
        turns.append((seen[kind] + 0.5) / sizes[kind] ** 0.5)
        seen[kind] += 1
    return [shuffled[i] for i in np.argsort(turns, kind="stable")]
