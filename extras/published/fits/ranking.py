"""How well plans are ranked: `python -m itercast.extras.published.fits.ranking PARTS`.

A set is all measured steps of one model, number of samples, length, number format and number of
GPUs on one machine, under two plans or more, of sources that find causes; the fit leaves the source
out. Plans are ranked by their time as forecast on a typical machine, and after one step of the set
as an anchor, each in turn. PARTS is the folder that ``itercast.extras.published.fits.machines``
writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from scipy.stats import kendalltau

from itercast.capture.plan import ParallelPlan
from itercast.compose.machines.state import Spread
from itercast.extras.programs import run_program
from itercast.extras.published.fits.machine_fit import groups_of, left_out, written_parts

SET = ["source", "machine", "model", "samples", "seq", "dtype", "world_size"]
CLOSE_PCT = 3.0  # no assumption: a chosen plan that takes so much longer than the best is as good


def ranked(steps: pd.DataFrame, typical: Spread) -> dict[str, float]:
    """Kendall's tau of a set and loss of the chosen plan in %: without an anchor, mean with one."""
    (group,) = groups_of(steps)
    covariance = group.covariance(np.array(typical.spread), typical.model, typical.row)
    shared = covariance - typical.row**2 * np.eye(len(group.y))
    measured = np.log(steps["time_us"].to_numpy(dtype=float))
    told = [np.zeros(len(measured)), *(shared / np.diag(covariance) * group.y).T]
    scores = np.array([_scores(measured - group.y + moved, measured) for moved in told])
    tau, loss = scores[:, 0], scores[:, 1]
    return {
        "plans": len(steps),
        "tau": tau[0],
        "loss_pct": loss[0],
        "tau_anchor": tau[1:].mean(),
        "loss_pct_anchor": loss[1:].mean(),
    }


def _scores(forecast: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Kendall's tau of log times, and by how much in % the first choice is slower than the best."""
    loss = 100 * (np.exp(measured[forecast.argmin()] - measured.min()) - 1)
    return float(kendalltau(forecast, measured).statistic), float(loss)


def ranks(steps: pd.DataFrame) -> pd.DataFrame:
    """``ranked`` of each set of steps, by the fit over the other sources."""
    lines, without = {}, left_out(steps)
    replicas = [ParallelPlan.parse(plan).participants for plan in steps["plan"]]
    steps = steps.assign(samples=(steps["batch"] * replicas).round().astype(int))
    for name, mine in steps.drop_duplicates([*SET, "plan"]).groupby(SET, dropna=False):
        if mine["plan"].nunique() > 1:
            lines[" ".join(map(str, name[1:]))] = ranked(mine, without[str(name[0])])
    return pd.DataFrame.from_dict(lines, orient="index")


def main(parts: Annotated[Path, typer.Argument(help="folder of derivatives")]) -> None:
    """Print how well plans are ranked without and with an anchor."""
    found = ranks(written_parts(parts, ["finds causes"]))
    print(found.round(2).to_string())
    for end, words in (("", "no anchor"), ("_anchor", "one anchor")):
        close = int((found[f"loss_pct{end}"] <= CLOSE_PCT).sum())
        print(
            f"{words}: mean tau {found[f'tau{end}'].mean():.2f}, "
            f"chosen plan within {CLOSE_PCT:.0f} % in {close} of {len(found)} sets, "
            f"worst {found[f'loss_pct{end}'].max():.0f} %"
        )


if __name__ == "__main__":
    run_program(main)
