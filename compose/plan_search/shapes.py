"""Shapes of plans: what decides how long GPUs compute for a sample, whatever replicas and stages.

A plan takes at least the mean of its ranks' compute time (``mean_us``): the GPU time of a step over
the number of GPUs. Plans of one shape have equal GPU time. A finer shape, with fewer samples in a
micro-batch or more ranks of tp or cp, takes no less per sample, as kernels are smaller and messages
more. So where a shape is too slow, no finer one is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from itercast.capture.base.assumptions import assumed
from itercast.capture.plan import ParallelPlan
from itercast.compose.plan_search.bounds import mean_us
from itercast.compose.plan_search.candidates import Search
from itercast.compose.simulate.rank import Rank

FINER_TAKES: float = assumed(__file__, "finer_takes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The micro-batch of a plan and how ranks share it; ``cast``: FSDP casts the module."""

    samples: int
    tp: int
    cp: int
    ep: int
    sp: bool
    cast: bool
    shard: str

    @classmethod
    def of(cls, plan: ParallelPlan, batch: int) -> Shape:
        """The shape of a plan for a step of ``batch`` samples."""
        return cls(
            samples=batch // (plan.dp * plan.microbatches),
            tp=plan.tp,
            cp=plan.cp,
            ep=plan.ep,
            sp=plan.sp,
            cast=plan.amp and plan.zero > 0,
            shard=plan.shard,
        )

    @property
    def ranks_per_sample(self) -> float:
        """Ranks that share a micro-batch over its samples: the more, the finer is the shape."""
        return self.tp * self.cp / self.samples

    def refines(self, other: Shape) -> bool:
        """Whether this shape is finer than another: more ranks per sample, or fewer samples."""
        more_ranks = self.tp % other.tp == self.cp % other.cp == 0
        fewer_samples = other.samples % self.samples == 0
        same = (self.ep, self.cast, self.shard) == (other.ep, other.cast, other.shard)
        return more_ranks and fewer_samples and same and (self.sp == other.sp or other.tp == 1)


class Shapes:
    """Plans that are not listed yet, by shape, each with a lower bound of their scores.

    ``scores_per_us``: the score of a plan over the time of all GPUs for a step.
    """

    def __init__(self, search: Search, plans: Iterable[ParallelPlan], scores_per_us: float) -> None:
        self.search, self.scores_per_us = search, scores_per_us
        self.waiting: dict[Shape, list[ParallelPlan]] = {}
        for plan in plans:
            self.waiting.setdefault(Shape.of(plan, search.batch), []).append(plan)
        self.bounds = dict.fromkeys(self.waiting, 0.0)

    @property
    def least(self) -> float:
        """The lowest bound; infinite where all plans are listed."""
        return min((self.bounds[shape] for shape in self.waiting), default=inf)

    def only(self, wanted: Callable[[ParallelPlan], bool]) -> Shapes:
        """Those of the plans that are wanted, with the same bounds."""
        plans = (plan for own in self.waiting.values() for plan in own if wanted(plan))
        few = Shapes(self.search, plans, self.scores_per_us)
        few.bounds = self.bounds
        return few

    def take(self, most: float) -> list[Rank]:
        """Price the coarsest waiting shapes with bounds up to ``most``; returns their ranks.

        Shapes that refine these take at least FINER_TAKES of their time, so their bounds rise.
        """
        within = [shape for shape in self.waiting if self.bounds[shape] <= most]
        coarsest = min(shape.ranks_per_sample for shape in within)
        taken = {s: self.waiting.pop(s) for s in within if s.ranks_per_sample == coarsest}
        self.search.price([plans[0] for plans in taken.values()])
        ranks = list[Rank]()
        for shape, plans in taken.items():
            legal = self.search.legal(plans)
            ranks += legal
            all_gpus_us = mean_us(legal[0]) * legal[0].plan.world_size if legal else 0.0
            least = FINER_TAKES * self.scores_per_us * all_gpus_us
            for other in self.waiting:
                if other.refines(shape):
                    self.bounds[other] = max(self.bounds[other], least)
        self.search.price_sharded(ranks)
        return ranks
