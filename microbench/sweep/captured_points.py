"""Points for a sweep, captured as the op calls of random models of many kinds."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from itercast.capture.base.files import write_atomic
from itercast.microbench.ops import families, find_family
from itercast.microbench.ops.family import Point
from itercast.microbench.sweep.random_models import ORDER, SETTINGS, random_model

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
        self.models = [random_model(rng, n, device) for n in range(MODEL_COUNT)]
        self.points: dict[str, dict[Point, None]] = {
            name: dict.fromkeys(read_points(path, name) if self.done else ()) for name in families()
        }

    def due(self, elapsed_s: float, names: Sequence[str]) -> bool:
        """Whether to capture a model now: captures take a fixed share of a sweep of families.

        None if no kind of model calls these families.
        """
        left = self.done < MODEL_COUNT and self.taken_s < CAPTURE_SHARE * elapsed_s
        return left and (self.done < len(ORDER) or any(self.points[name] for name in names))

    def capture_next(self) -> None:
        """Capture a model and write all points, with those of this model."""
        from itercast.capture.recorder.log import capture_step
        from itercast.capture.step import StepSettings

        begin_s, model = time.monotonic(), self.models[self.done]
        settings = StepSettings(**SETTINGS[self.done % len(ORDER)])
        inputs = partial(model.inputs, model.batch, model.seq)
        for call in capture_step(model.build, inputs, model.loss, settings).calls:
            family, params = find_family(call)
            if family is not None:
                self.points[family.name][params] = None
        self.done += 1
        took_s = time.monotonic() - begin_s
        self.taken_s, self.seconds = self.taken_s + took_s, self.seconds + took_s
        done = {DONE: self.done, SECONDS: round(self.seconds, 3)}
        write_points(self.path, {name: list(points) for name, points in self.points.items()}, done)


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
    """Write points by family as JSON, for ``read_points``; ``more``: further keys of the file."""
    plain = {name: [asdict(p) for p in of_family] for name, of_family in points.items()}
    write_atomic(path, json.dumps({**(more or {}), **plain}).encode())


def read_points(path: Path, name: str) -> list[Point]:
    """The points of one family in a file, in its order."""
    return [families()[name].params(**p) for p in json.loads(path.read_text()).get(name, ())]


def check_points(path: Path) -> int:
    """Number of points in a file; ValueError where it is not a file of points."""
    try:
        names = [n for n in json.loads(path.read_text()) if n not in (DONE, SECONDS)]
        return sum(len(read_points(path, name)) for name in names)
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
    written_ns, captured_in_turn = 0, 0
    captured = as_called(_popped(waiting))
    while True:
        if path.is_file() and (now_ns := path.stat().st_mtime_ns) != written_ns:
            new = [p for p in read_points(path, name) if p not in seen]
            seen.update(new)
            mixed, written_ns = by_turns([*waiting, *new], seed), now_ns
            waiting.clear()
            waiting.extend(mixed)
            captured = as_called(_popped(waiting))
        point = next(captured, None) if captured_in_turn < CAPTURED_PER_SWEPT else None
        captured_in_turn = 0 if point is None else captured_in_turn + 1
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
