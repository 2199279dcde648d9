"""Steps by torchrec's DistributedModelParallel beside those that are forecast, as a second witness.

torchrec looks all tables of a rank up in one call of FBGEMM's and updates them in their backward
pass; ours, which is forecast, runs torch's ops table by table. Both run the same random models
under the same shardings, a step in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.table import Table

from itercast.compose.sharding.forecast import Forecaster
from itercast.compose.sharding.tables import RankingModel
from itercast.compose.target import find_target
from itercast.eval.recommenders.judge import usual_anchor_us
from itercast.eval.recommenders.measure import Measured, measure
from itercast.eval.recommenders.tasks import Candidate, any_configuration, any_sharding

CONFIGURATIONS = 6
OPTIMIZERS = ("sgd", "adagrad")  # FBGEMM has no Adam on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """A model's forecast iteration, and those measured by torch and by torchrec, in us."""

    model: RankingModel
    forecast_us: float
    torch_us: float
    torchrec_us: float


def is_installed() -> bool:
    """Whether torchrec and FBGEMM are there."""
    return all(find_spec(name) for name in ("torchrec", "fbgemm_gpu"))


def drawn(count: int, ranks: int, seed: int) -> list[Candidate]:
    """Random models under random shardings, each by torch and then by torchrec."""
    rng, found = np.random.default_rng(seed), list[Candidate]()
    while len(found) < 2 * count:
        model: RankingModel = any_configuration(rng)
        if model.optimizer in OPTIMIZERS:
            sharding = any_sharding(rng, model, ranks)
            ours = Candidate(name=str(len(found) // 2), model=model, sharding=sharding)
            found += [ours, replace(ours, library="torchrec")]
    return found


def measure_both(
    count: int,
    ranks: int,
    threads: int,
    bundle: Path,
    folder: Path,
    progress: Callable[[int], None],
) -> list[Witnessed]:
    """Forecast such models and measure both libraries' steps."""
    candidates = drawn(count, ranks, seed=2)
    usual_us, target = usual_anchor_us(bundle, threads), find_target("cpu", f"dp={ranks}", bundle)
    times = [
        _middle_us(m) for m in measure(candidates, ranks, threads, folder, 2, usual_us, progress)
    ]
    return [
        Witnessed(
            model=c.model,
            forecast_us=Forecaster(c.model, target, ranks).forecast(c.sharding).iteration_us,
            torch_us=ours,
            torchrec_us=theirs,
        )
        for c, ours, theirs in zip(candidates[::2], times[::2], times[1::2], strict=True)
    ]


def _middle_us(measured: Measured) -> float:
    """Geometric mean of the rounds."""
    return float(np.exp(np.mean(np.log(measured.rounds_us))))


def witness_table(found: Sequence[Witnessed], ranks: int) -> Table:
    """Measured steps of both libraries beside the forecast of ours."""
    names = ("forecast ms", "torch ms", "torchrec ms", "torchrec / torch")
    title = f"a second witness: torchrec's DistributedModelParallel, {ranks} processes"
    table = Table("tables", "batch", "optimizer", *names, title=title)
    for w in found:
        shown = [f"{us / 1e3:.1f}" for us in (w.forecast_us, w.torch_us, w.torchrec_us)]
        sizes = (str(len(w.model.tables)), str(w.model.batch), w.model.optimizer)
        table.add_row(*sizes, *shown, f"{w.torchrec_us / w.torch_us:.2f}")
    return table
