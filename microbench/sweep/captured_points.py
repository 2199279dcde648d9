"""Points that real models call: op calls captured from random models of many kinds.

Sizes are drawn anew for every model and are not those of the cases we validate on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from microbench.cases import kinds
from microbench.cases.kinds import clicks, graphs, images, language
from microbench.ops import families, find_family
from microbench.ops.family import Family, log_uniform
from microbench.store import read_rows, write_atomic


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
    """GPT, BERT or Llama style, some with experts; one block, since blocks repeat."""
    heads = int(rng.choice([2, 4, 6, 8, 12, 16] if largest < 2048 else [8, 12, 16, 20, 25, 32, 40]))
    per_head = min(int(rng.choice([16, 32, 48, 64, 80, 96, 128])), max(16, largest // heads))
    style = str(rng.choice(["gpt", "bert", "llama"]))
    heads -= heads % 2 if style == "llama" else 0  # two share a key
    sizes: dict[str, Any] = {
        "style": style,
        "width": heads * per_head,
        "layers": 1,
        "heads": heads,
    }
    if rng.random() < 0.3:
        sizes |= {"experts": int(rng.choice([4, 6, 8, 12])), "top": int(rng.choice([1, 2]))}
    batch, seq = log_uniform(rng, 2, 16), log_uniform(rng, 24, largest // 2)
    vocab = log_uniform(rng, 256, 24 * largest)
    return from_case(language("zoo", "Transformer", batch, seq, vocab=vocab, **sizes))


def perceptron(rng: np.random.Generator, largest: int) -> Draw:
    """Three layers."""
    widths = tuple(8 * log_uniform(rng, 4, largest // 2) for _ in range(4))
    return from_case(kinds.perceptron("zoo", widths, log_uniform(rng, 16, largest)))


def vit(rng: np.random.Generator, largest: int) -> Draw:
    """One block over patches."""
    heads, patch = int(rng.choice([2, 3, 4, 6, 8])), int(rng.choice([4, 6, 8, 16]))
    heads *= 1 if largest < 2048 else 3
    width = heads * int(rng.choice([32, 48, 64]))
    size = patch * log_uniform(rng, 4, 12 if largest < 2048 else 24)
    sizes: dict[str, Any] = {"width": width, "layers": 1, "heads": heads, "patch": patch}
    batch, classes = log_uniform(rng, 2, largest // 32), log_uniform(rng, 10, 1000)
    return from_case(images("zoo", "Vit", batch, size, size=size, classes=classes, **sizes))


def resnet(rng: np.random.Generator, largest: int) -> Draw:
    """Four stages of one or two blocks."""
    sizes: dict[str, Any] = {
        "width": 8 * log_uniform(rng, 1, min(largest // 64, 16)),
        "stages": tuple(int(n) for n in rng.integers(1, 3, 4)),
        "bottleneck": bool(rng.random() < 0.5),
    }
    batch = log_uniform(rng, 2, largest // 32)
    image = 32 * log_uniform(rng, 1, 4 if largest < 2048 else 8)
    return from_case(images("zoo", "ResNet", batch, image, classes=100, **sizes))


def convnet(rng: np.random.Generator, largest: int) -> Draw:
    """Depthwise or dense convolutions: two stages as of EfficientNet, ConvNeXt or DenseNet."""
    name = str(rng.choice(["EfficientNet", "ConvNext", "DenseNet"]))
    width = 8 * log_uniform(rng, 2, min(largest // 32, 48))
    sizes: dict[str, Any] = {"widths": (width, 2 * width, 3 * width), "depth": 1}
    if name == "DenseNet":
        sizes = {"width": width, "growth": 8 * int(rng.integers(1, 5)), "depth": 3}
    batch = log_uniform(rng, 2, largest // 32)
    image = 32 * log_uniform(rng, 1, 4 if largest < 2048 else 8)
    return from_case(images("zoo", name, batch, image, classes=100, module="convnets", **sizes))


def recurrent(rng: np.random.Generator, largest: int) -> Draw:
    """Gated recurrent units, or LSTMs, of one or two layers."""
    sizes: dict[str, Any] = {"width": 8 * log_uniform(rng, 4, largest // 8)}
    sizes |= {"layers": int(rng.integers(1, 3)), "kind": str(rng.choice(["gru", "lstm"]))}
    batch, seq = log_uniform(rng, 4, 64), log_uniform(rng, 8, 40)
    vocab = log_uniform(rng, 256, 8 * largest)
    more: dict[str, Any] = {"vocab": vocab, "module": "recurrent", **sizes}
    return from_case(language("zoo", "RecurrentLM", batch, seq, **more))


def recommender(rng: np.random.Generator, largest: int) -> Draw:
    """Tables of one size, for a GPU of sizes of their own; two perceptrons."""
    wide = 8 * log_uniform(rng, 8, largest // 8)
    tables = log_uniform(rng, 3, 24 if largest < 2048 else 64)
    rows: int | tuple[int, ...] = log_uniform(rng, 500, 64 * largest)
    if largest >= 2048:
        rows = tuple(log_uniform(rng, 1000, 2_000_000) for _ in range(tables))
    case = clicks(
        "zoo",
        log_uniform(rng, 64, 4 * largest),
        features=log_uniform(rng, 8, 64),
        bottom=(wide, wide // 2),
        tables=tables,
        rows=rows,
        bag=log_uniform(rng, 1, 16 if largest < 2048 else 64),
        width=int(rng.choice([16, 32, 48, 64, 96] if largest < 2048 else [32, 64, 96, 128])),
        top=(2 * wide, wide),
    )
    return from_case(case)


def graph(rng: np.random.Generator, largest: int) -> Draw:
    """Two layers of messages along random edges, by attention or not."""
    case = graphs(
        "zoo",
        log_uniform(rng, 4, largest // 16),
        nodes=log_uniform(rng, 20, 200),
        degree=log_uniform(rng, 3, 16),
        features=log_uniform(rng, 16, 128),
        width=8 * log_uniform(rng, 4, largest // 16),
        layers=2,
        classes=log_uniform(rng, 5, 50),
        attention=bool(rng.random() < 0.4),
    )
    return from_case(case)


KINDS: tuple[Callable[[np.random.Generator, int], Draw], ...] = (
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
LARGEST = {"cpu": 512, "cuda": 8192}  # width of the widest model
MODELS = 40
CAPTURED_PER_SWEPT = 2


def captured_points(device: str, models: int, seed: int) -> dict[str, list[Any]]:
    """Distinct parameters by family, as ``models`` random models call them."""
    from microbench.capture.log import capture_step
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


def points_path(root: Path, device: str, seed: int) -> Path:
    """Where the captured points of a sweep are."""
    return root / ".journal" / f"points-{device}-{seed}.json"


def points_file(root: Path, device: str, seed: int) -> Path:
    """The captured points of this seed, written where they are missing."""
    path = points_path(root, device, seed)
    if not path.is_file():
        write_points(path, captured_points(device, MODELS, seed))
    return path


def write_points(path: Path, points: Mapping[str, Sequence[Any]]) -> None:
    """Points by family, as ``read_points`` reads them."""
    plain = {name: [asdict(p) for p in some] for name, some in points.items()}
    write_atomic(path, json.dumps(plain).encode())


def read_points(path: Path, name: str) -> list[Any]:
    """The points of one family, in their order."""
    return [families()[name].params(**p) for p in json.loads(path.read_text()).get(name, ())]


def check_points(path: Path) -> int:
    """How many points the file names; ValueError in one line where it is no file of points."""
    try:
        return sum(len(read_points(path, name)) for name in json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise ValueError(f"points {str(path)!r}: not a file of points ({reason})") from exc


def points_of_rows(root: Path, gpu: str) -> dict[str, list[Any]]:
    """The distinct points under ``root`` that were measured well on a GPU alone, by family.

    Kinds take turns, so that the first points of any number are spread evenly. Products repeated
    for seconds (``load``) are no points of a sweep.
    """
    found: dict[str, list[Any]] = {}
    for name, family in families().items():
        rows = read_rows([root], name)
        if family.ranks > 1 or rows.empty:
            continue
        rows = rows[(rows["gpu"] == gpu) & (rows["status"] == "ok")]
        if "load" in rows:
            rows = rows[rows["load"].isna()]
        points = dict.fromkeys(_point_of_row(family, row) for row in rows.to_dict("records"))
        if points:
            found[name] = by_turns(list(points), seed=0)
    return found


def _point_of_row(family: Family, row: Mapping[Any, Any]) -> Any:
    """The parameters of a row; a column its part file has not, or as NaN, is left at its default.

    Numbers and flags that stood beside empty cells come back as floats.
    """
    kinds: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "bool": bool, "str": str}
    given = {f.name: (kinds[str(f.type)], row.get(f.name)) for f in fields(family.params)}
    known = {name: kind(value) for name, (kind, value) in given.items() if not _empty(value)}
    return family.params(**known)


def _empty(value: Any) -> bool:
    return value is None or value != value  # NaN alone is not itself


def write_measured_points(root: Path, gpu: str, path: Path) -> int:
    """Write what was measured under ``root`` as points for another GPU to repeat; their number."""
    points = points_of_rows(root, gpu)
    write_points(path, points)
    return sum(map(len, points.values()))


def mixed(
    path: Path,
    name: str,
    grid: Iterator[Any],
    seed: int,
    as_called: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> Iterator[Any]:
    """Two captured points, one of the family's own sweep, and so on; then the sweep alone.

    While the captured ones are not written yet, the sweep alone. ``as_called`` makes of captured
    points what the device to be measured calls.
    """
    while not path.is_file() and (point := next(grid, None)) is not None:
        yield point
    points = read_points(path, name) if path.is_file() else []
    for number, captured in enumerate(as_called(iter(by_turns(points, seed))), start=1):
        yield captured
        point = next(grid, None) if number % CAPTURED_PER_SWEPT == 0 else None
        if point is not None:
            yield point
    yield from grid


def by_turns(points: Sequence[Any], seed: int) -> list[Any]:
    """Points at random, but every kind (op, form, dtype) soon, and common ones more often.

    A kind of n points comes sqrt(n) times as often as a kind of one.
    """
    shuffled = [points[i] for i in np.random.default_rng(seed).permutation(len(points))]
    kinds = [tuple(v for v in asdict(p).values() if isinstance(v, str)) for p in shuffled]
    sizes, seen = Counter(kinds), Counter[tuple[str, ...]]()
    turns = []
    for kind in kinds:
        turns.append((seen[kind] + 0.5) / sizes[kind] ** 0.5)
        seen[kind] += 1
    return [shuffled[i] for i in np.argsort(turns, kind="stable")]
