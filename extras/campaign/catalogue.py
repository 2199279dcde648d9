"""Points of a sweep from models that people train, drawn in proportion to the time of their calls.

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
from itercast.microbench.store import Facts, Row
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
        calls: Calls = Counter()
        for call in {**one, **two}:
            if not isinstance(call[1], OptimizerOp):
                calls[call] = one[call] + (layers - 1) * (two[call] - one[call])
        return +calls + _updates(one, two, layers)


def catalogue() -> list[Model]:
    """All models of catalogue.yaml in its order, then its cases of capture/cases.

    Cases have no ``kind`` and no sizes: ``Model.case`` returns them unchanged.
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
    """The calls of a training step of a case, of those ops that an op family describes."""
    from itercast.capture.recorder.log import capture_step
    from itercast.capture.step import StepSettings

    settings = StepSettings(optimizer=chosen.optimizer, dtype=dtype)
    inputs = partial(chosen.inputs, batch, seq)
    calls = capture_step(chosen.build, inputs, chosen.loss, settings).calls
    described = ((family, p) for family, p in map(find_family, calls) if family is not None)
    return Counter((family.name, p) for family, p in described if p is not None)


def _updates(one: Calls, two: Calls, layers: int) -> Calls:
    """The optimizer's calls for ``layers`` layers, extrapolated from those for one and for two.

    Sizes of a fused update are linear in the number of layers.
    """
    updates: Calls = Counter()
    of_one, of_two = ([c for c in calls if isinstance(c[1], OptimizerOp)] for calls in (one, two))
    for (name, first), (_, second) in zip(of_one, of_two, strict=True):
        sizes: Row = {}
        for size in ("tensors", "numel"):
            with_one, with_two = getattr(first, size), getattr(second, size)
            sizes[size] = with_one + (layers - 1) * (with_two - with_one)
        updates[name, replace(first, **sizes)] += one[name, first]
    return updates


def steps(models: Sequence[Model], seed: int) -> Iterator[tuple[Model, int, int, str]]:
    """(model, batch, length, dtype) of some steps of each model, drawn at random."""
    dtypes = FACTS["dtypes"]
    for model in models:
        rng = np.random.default_rng([seed, crc32(model.name.encode())])
        number = min(FACTS["steps"], len(model.runs))
        for run in rng.choice(len(model.runs), size=number, replace=False):
            dtype = str(rng.choice(list(dtypes), p=list(dtypes.values())))
            yield model, *model.runs[run], dtype


def step_us(calls: Calls, gpu: Gpu) -> dict[tuple[str, Point], float]:
    """Time in us of all equal calls of a step by call, each at the GPU's roofline.

    Only calls that are timed on a GPU.
    """
    us_of_call: dict[tuple[str, Point], float] = {}
    for (name, p), count in calls.items():
        family = families()[name]
        timed = family.gpu_sweep.variant(p, np.random.default_rng(0))
        if timed is not None and (us := roofline_us(family, timed, gpu)) > 0:
            us_of_call[name, timed] = us_of_call.get((name, timed), 0.0) + count * us
    return us_of_call


def drawn_points(
    calls_us: Mapping[tuple[str, Point], float], gpu: Gpu, seed: int
) -> dict[str, dict[Point, Point]]:
    """Points by family, and for each the call that it was drawn from.

    Three quarters are calls of models in proportion to their time, the rest sizes around them.
    """
    points: dict[str, dict[Point, Point]] = {}
    for name, count in FACTS["counts"].items():
        rng, family = np.random.default_rng([seed, crc32(name.encode())]), families()[name]
        us_of_point = {
            p: us for (of, p), us in calls_us.items() if of == name and fits(family, p, gpu)
        }
        if not us_of_point:
            continue
        around = round(FACTS["around_frac"] * count)
        share = np.array(list(us_of_point.values())) / sum(us_of_point.values())
        number = min(len(us_of_point), count - around)
        chosen = rng.choice(len(us_of_point), size=number, replace=False, p=share)
        drawn = [list(us_of_point)[i] for i in chosen]
        pairs = [(p, p) for p in drawn]
        for _ in range(around):
            call = drawn[int(rng.integers(len(drawn)))]
            near = _near(name, call, rng)
            if fits(family, near, gpu):
                pairs.append((near, call))
        points[name] = dict(pairs[i] for i in rng.permutation(len(pairs)))
    return points


def _near(name: str, point: Point, rng: np.random.Generator) -> Point:
    """The point, resized to half to twice its work; some get an odd size."""
    factor, first_share = float(np.exp2(rng.uniform(-1, 1))), float(rng.random())
    point = families()[name].gpu_sweep.resize(point, factor, first_share)
    if isinstance(point, OptimizerOp) and rng.random() < FACTS["odd_frac"]:
        return replace(point, aligned_frac=round(float(rng.random()), 2))
    axes = FACTS["axes"].get(name, ())
    if axes and rng.random() < FACTS["odd_frac"]:
        axis = str(rng.choice(axes))
        size = max(1, getattr(point, axis) + int(rng.choice(SHIFTS)))
        point = replace(point, **{axis: size})  # type: ignore[type-var]
    return point


def shares(calls_us: Mapping[tuple[str, Point], float]) -> Facts:
    """Share of the time by family, largest first."""
    by_family: Counter[str] = Counter()
    for (name, _), us in calls_us.items():
        by_family[name] += us  # type: ignore[assignment]
    total = sum(by_family.values())
    return {name: us / total for name, us in by_family.most_common()}


def points_of_models(
    gpu: Gpu, seed: int, models: Sequence[Model]
) -> dict[str, dict[Point, list[str]]]:
    """Points by family that were drawn from calls of these models, and the names of those.

    A model that cannot be captured is logged.
    """
    share_of_call: Counter[tuple[str, Point]] = Counter()
    callers: dict[tuple[str, Point], dict[str, None]] = {}
    for model, batch, seq, dtype in steps(models, seed):
        try:
            step_us_of_call = step_us(model.calls(batch, seq, dtype), gpu)
        except (ValueError, RuntimeError, NotImplementedError) as exc:
            log.warning("%s: %s", model.name, one_line(exc))
            continue
        total = sum(step_us_of_call.values())
        for call, us in step_us_of_call.items():
            share_of_call[call] += us / total  # type: ignore[assignment]
            callers.setdefault(call, {})[model.name] = None
    drawn = drawn_points(share_of_call, gpu, seed)
    return {
        name: {point: list(callers[name, call]) for point, call in calls.items()}
        for name, calls in drawn.items()
    }
