"""Points of a sweep from models that people train: what they call, as often as it takes time.

The catalogue names real configurations (catalogue.yaml). A sweep's points are their calls, drawn in
proportion to the time of a step that a roofline gives them, and sizes around them. Whole models are
held out: what users bring is a model that nobody swept, not another batch of a known one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import numpy as np

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.kinds import Sizes, make_case
from itercast.capture.cases.registry import case
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families, find_family
from itercast.microbench.ops.family import Point
from itercast.microbench.ops.step.optimizer import OptimizerOp
from itercast.microbench.store import Facts
from itercast.microbench.sweep.gpu_space import fits, roofline_us
from itercast.microbench.sweep.rows import one_line

log = logging.getLogger(__name__)
FACTS = facts_of(__file__)
SHIFTS = (-8, -4, -2, -1, 1, 2, 4, 8)  # elements
Calls = Counter[tuple[str, Point]]  # of a step, by family and parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the catalogue; ``runs``: batches and lengths of its steps."""

    name: str
    kind: str
    sizes: Sizes
    runs: Sequence[tuple[int, int]]

    @property
    def held_out(self) -> bool:
        """Whether no point is drawn from it."""
        return crc32(self.name.encode()) % int(FACTS["held_out_in"]) == 0

    def case(self, batch: int, seq: int, layers: int = 0) -> EvalCase:
        """The case with a batch and a length; with so many layers if given."""
        if self.kind == "":
            return case(self.name)
        sizes = {**self.sizes, **({"layers": layers} if layers else {})}
        if "positions" not in sizes and self.kind == "transformer":
            sizes["positions"] = max(1024, seq)
        return make_case(self.name, self.kind, batch=batch, seq=seq, **sizes)

    def calls(self, batch: int, seq: int, dtype: str) -> Calls:
        """The calls of a training step, those of equal layers as often as there are layers."""
        layers = int(self.sizes.get("layers", 0))
        if layers < 2:
            return _captured(self.case(batch, seq), batch, seq, dtype)
        one, two = (_captured(self.case(batch, seq, n), batch, seq, dtype) for n in (1, 2))
        found = Counter({p: n for p, n in one.items() if not isinstance(p[1], OptimizerOp)})
        for p, n in two.items():
            if not isinstance(p[1], OptimizerOp):
                found[p] += (layers - 1) * (n - one[p])
        return +found + _updates(one, two, layers)


def catalogue() -> list[Model]:
    """All models of catalogue.yaml in its order, then its cases of capture/cases.

    Those have no ``kind`` and no sizes: ``Model.case`` takes them as they are.
    """
    models = []
    for kind, listed in FACTS["models"].items():
        shared = FACTS["kinds"][kind]
        for name, values in listed.items():
            plain = [tuple(v) if isinstance(v, list) else v for v in values]
            sizes = {**shared.get("fixed", {}), **dict(zip(shared["columns"], plain, strict=True))}
            runs = tuple((int(b), int(s)) for b, s in shared["runs"])
            models.append(Model(name=name, kind=shared.get("of", kind), sizes=sizes, runs=runs))
    for known in map(case, FACTS["cases"]):
        models.append(Model(name=known.name, kind="", sizes={}, runs=((known.batch, known.seq),)))
    return models


def _captured(chosen: EvalCase, batch: int, seq: int, dtype: str) -> Calls:
    """The calls of a step of a case that families describe."""
    from itercast.capture.recorder.log import capture_step
    from itercast.capture.step import StepSettings

    settings = StepSettings(optimizer=chosen.optimizer, dtype=dtype)
    inputs = partial(chosen.inputs, batch, seq)
    calls = capture_step(chosen.build, inputs, chosen.loss, settings).calls
    described = ((family, p) for family, p in map(find_family, calls) if family is not None)
    return Counter((family.name, p) for family, p in described if p is not None)


def _updates(one: Calls, two: Calls, layers: int) -> Calls:
    """The optimizer's calls over all layers, from those over one layer and over two."""
    found: Calls = Counter()
    lists = [[(p, n) for p, n in c.items() if isinstance(p[1], OptimizerOp)] for c in (one, two)]
    for ((name, first), n), ((_, second), _) in zip(*lists, strict=True):
        grown: Facts = {
            size: a + (layers - 1) * (b - a)
            for size in ("tensors", "numel")
            for a, b in [(getattr(first, size), getattr(second, size))]
        }
        found[name, replace(first, **grown)] += n
    return found


def steps(models: Sequence[Model], seed: int) -> Iterator[tuple[Model, int, int, str]]:
    """Steps of each model with a batch, a length and a dtype that are drawn."""
    dtypes = FACTS["dtypes"]
    for model in models:
        rng = np.random.default_rng([seed, crc32(model.name.encode())])
        number = min(FACTS["steps"], len(model.runs))
        for run in rng.choice(len(model.runs), size=number, replace=False):
            dtype = str(rng.choice(list(dtypes), p=list(dtypes.values())))
            yield model, *model.runs[run], dtype


def step_us(calls: Calls, gpu: Gpu) -> dict[tuple[str, Point], float]:
    """Time of a step by call, at the GPU's roofline, of calls that are timed on a GPU."""
    found: dict[tuple[str, Point], float] = {}
    for (name, p), count in calls.items():
        family = families()[name]
        known = family.gpu_sweep.variant(p, np.random.default_rng(0))
        if known is not None and (us := roofline_us(family, known, gpu)) > 0:
            found[name, known] = found.get((name, known), 0.0) + count * us
    return found


def drawn_points(
    calls_us: Mapping[tuple[str, Point], float], gpu: Gpu, seed: int
) -> dict[str, list[Point]]:
    """Points by family: calls of models in proportion to their time, and sizes around them."""
    found: dict[str, list[Point]] = {}
    for name, count in FACTS["counts"].items():
        rng, family = np.random.default_rng([seed, crc32(name.encode())]), families()[name]
        mine = {p: us for (of, p), us in calls_us.items() if of == name and fits(family, p, gpu)}
        if not mine:
            continue
        around = round(FACTS["around_frac"] * count)
        share = np.array(list(mine.values())) / sum(mine.values())
        number = min(len(mine), count - around)
        chosen = rng.choice(len(mine), size=number, replace=False, p=share)
        listed = [list(mine)[i] for i in chosen]
        found[name] = listed + [
            p for p in (_near(name, listed, rng) for _ in range(around)) if fits(family, p, gpu)
        ]
        rng.shuffle(found[name])  # type: ignore[arg-type]
    return found


def _near(name: str, listed: Sequence[Point], rng: np.random.Generator) -> Point:
    """A point with up to twice or half the work of one of these, some with an odd size."""
    p = listed[int(rng.integers(len(listed)))]
    factor, first_share = float(np.exp2(rng.uniform(-1, 1))), float(rng.random())
    p = families()[name].gpu_sweep.resize(p, factor, first_share)
    if isinstance(p, OptimizerOp) and rng.random() < FACTS["odd_frac"]:
        return replace(p, aligned_frac=round(float(rng.random()), 2))
    axes = FACTS["axes"].get(name, ())
    if axes and rng.random() < FACTS["odd_frac"]:
        axis = str(rng.choice(axes))
        size = max(1, getattr(p, axis) + int(rng.choice(SHIFTS)))
        p = replace(p, **{axis: size})  # type: ignore[type-var]
    return p


def shares(calls_us: Mapping[tuple[str, Point], float]) -> Facts:
    """Share of the time by family."""
    by_family: Counter[str] = Counter()
    for (name, _), us in calls_us.items():
        by_family[name] += us  # type: ignore[assignment]
    total = sum(by_family.values())
    return {name: us / total for name, us in by_family.most_common()}


def points_of_models(gpu: Gpu, seed: int, models: Sequence[Model]) -> dict[str, list[Point]]:
    """Points by family that these models call; a model that cannot be captured is logged."""
    calls_us: Counter[tuple[str, Point]] = Counter()
    for model, batch, seq, dtype in steps(models, seed):
        try:
            found = step_us(model.calls(batch, seq, dtype), gpu)
        except (ValueError, RuntimeError, NotImplementedError) as exc:
            log.warning("%s: %s", model.name, one_line(exc))
            continue
        total = sum(found.values())
        for call, us in found.items():
            calls_us[call] += us / total  # type: ignore[assignment]
    return drawn_points(calls_us, gpu, seed)
