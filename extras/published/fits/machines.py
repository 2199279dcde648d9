"""How machines differ: `python -m itercast.extras.published.fits.machines PUBLIC PARTS`.

Measured steps of each source, published tables (PUBLIC) and files of ``datasets/*_runs``, are
forecast without the source, as the machine is priced, with the derivative of the forecast by each
factor (written to PARTS/SOURCE.parquet, read from there where it is, so that a run that was stopped
goes on; all take 20 minutes). Factors are fitted on sources that find causes (roles.yaml), each
left out in turn; those that judge are forecast by the fit over all of these, and shown with --judge
alone. Forecasts with factors and anchors are to first order.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
import yaml

from itercast.anchors import measured_steps
from itercast.capture.base.assumptions import leaving_out
from itercast.capture.opcall import StepCapture
from itercast.compose.forecast import Forecast
from itercast.compose.machines.state import Machine, Spread
from itercast.compose.machines.typical import stated
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.target import Target, forecast_step
from itercast.eval.results import records
from itercast.extras.anchors.infer_machine import sensitivity
from itercast.extras.imports.base import positive
from itercast.extras.processes import processes
from itercast.extras.programs import run_program
from itercast.extras.published.fits.machine_fit import (
    ANCHORS,
    SENSITIVITY,
    calibrated,
    with_anchors,
    written_parts,
)
from itercast.extras.published.models import captured_step, read_lines, row_target, timed_us
from itercast.extras.published.roles import FEW_PCT, ROLES, role_of
from itercast.learners.bundle import SHIPPED
from itercast.learners.train import errors
from itercast.microbench.store import Facts, Row
from itercast.options import Question

ROOT = Path(__file__).resolve().parents[3]
TYPICAL = ROOT / "compose/machines/typical.yaml"
RUNS = "datasets/*_runs/*.yaml"  # files of measured steps, each a source
OF_MACHINE, OF_SOURCE = 20, 40  # steps that are drawn, at most
LIMIT_S, SLOW_S = 150, 25  # of a forecast; a slower one has its parts as derivative
# Single modules, and a source whose rows teach the shipped models: no steps of a machine's own.
NOT_STEPS = ("kernelbench", "liger-kernel", "llmservingsim", "neusight", "timm")
OF_STEP = ["source", "machine", "gpu", "plan", "batch", "seq", "dtype", "world_size", "time_us"]
KEY = ["source", "machine", "case", "batch", "plan", "dtype", "engine", "time_us"]


def steps_of(public: Path) -> pd.DataFrame:
    """Measured steps of all lines about iterations, each once, some of each machine and source."""
    parts = [
        rows[positive(rows["time_us"]) > 0]
        for line, rows in read_lines(public, "")
        if line.part == "step" and not (line.calibrated or line.fits_hosts)
    ]
    found = pd.concat(parts, ignore_index=True)
    found = found[~found["source"].isin(NOT_STEPS)]
    found["machine"] = [_machine(row) for row in records(found)]
    found = found.drop_duplicates(KEY).sample(frac=1, random_state=0)
    found = found[found.groupby("machine").cumcount() < OF_MACHINE]
    kept: pd.DataFrame = found[found.groupby("source").cumcount() < OF_SOURCE]
    return kept.reset_index(drop=True)


def _machine(row: Facts) -> str:
    """A name for the machine of a row: the source's own name for it, and its GPU."""
    own = [row.get(name) for name in ("machine", "system")]
    called = next((name for name in own if isinstance(name, str) and name), "")
    return f"{row['source']} {called} {row['gpu']}"


def of_row(row: Facts) -> Row:
    """A published step's model and ``derivatives``, or the reason why there are none."""
    given = {name: value for name, value in row.items() if value == value and value is not None}

    def make() -> tuple[StepCapture, Target]:
        target = row_target(given, SHIPPED)
        return captured_step(given, target.plan), target

    found = derivatives(make, float(given["time_us"]), partial(timed_us, given))
    return {"model": str(row["case"]), **found}


def of_file(file: Path) -> list[Row]:
    """The measured steps of a file, as published ones, and their ``derivatives``."""
    rows = list[Row]()
    for one in measured_steps(file, Question):
        if not isinstance(one, MeasuredStep):
            raise ValueError(f"{file.name}: {one.label!r} is a script's, allowed are models'")
        step, target = one.step, one.target
        facts = {
            **{"source": file.stem, "machine": f"{file.stem} {target.gpu.name}"},
            **{"gpu": target.gpu.name, "plan": one.plan, "model": one.name},
            "batch": step.samples * target.plan.microbatches,
            "seq": step.tokens / step.samples if step.tokens else np.nan,
            "dtype": " ".join(sorted({t.dtype for call in step.calls for t in call.outputs})),
            **{"world_size": target.plan.world_size, "time_us": one.time_us},
        }
        known = partial(attrgetter("step", "target"), one)
        rows.append(facts | derivatives(known, one.time_us, attrgetter("iteration_us")))
    return rows


def derivatives(
    make: Callable[[], tuple[StepCapture, Target]],
    measured_us: float,
    timed: Callable[[Forecast], float],
) -> Row:
    """log(measured / forecast) of a step as priced, and ``SENSITIVITY``; or why there is none.

    ``timed``: what was timed of a forecast.
    """
    signal.signal(signal.SIGALRM, partial(_stop))
    signal.alarm(LIMIT_S)
    start = time.monotonic()
    try:
        step, target = make()
        target = replace(target, known=Machine.new(AS_PRICED))
        found = forecast_step(step, target)
        slow = time.monotonic() - start > SLOW_S
        of_step = partial(forecast_step, step)
        j = tuple(found.parts_frac.values()) if slow else sensitivity(of_step, target)
    except ValueError as exc:
        return {"reason": str(exc)[:120]}
    finally:
        signal.alarm(0)
    ratio = float(np.log(measured_us / timed(found)))
    return {"log_ratio": ratio, **dict(zip(SENSITIVITY, j, strict=True))}


AS_PRICED = Spread(spread=(1.0,) * 5, model=1.0, row=1.0)


def _stop(*_: Any) -> None:
    raise ValueError(f"forecast takes longer than {LIMIT_S} s")


def parts_of(public: Path, folder: Path, roles: Sequence[str]) -> pd.DataFrame:
    """All steps of sources of these roles with their derivatives.

    Sources whose file is in the folder are read from it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked: dict[str, pd.DataFrame | Path] = {
        str(source): mine.reset_index(drop=True)
        for source, mine in steps_of(public).groupby("source")
    }
    asked |= {path.stem: path for path in sorted(ROOT.glob(RUNS))}
    paths = {name: folder / f"{name}.parquet" for name in asked if role_of(name) in roles}
    for source, path in paths.items():
        if not path.is_file():
            with leaving_out(source), processes(1) as pool:
                _parts(asked[source], pool).to_parquet(path)
    return written_parts(folder, roles).reset_index(drop=True)


def _parts(source: pd.DataFrame | Path, pool: Executor) -> pd.DataFrame:
    """The steps of a table or a file with their derivatives."""
    if isinstance(source, Path):
        return pd.DataFrame(pool.submit(of_file, source).result())
    return pd.concat(
        [source[OF_STEP], pd.DataFrame(pool.map(of_row, source.to_dict("records")))], axis=1
    )


def judged(steps: pd.DataFrame, spreads: Mapping[str, Spread], count: int) -> pd.DataFrame:
    """Errors in % by source of forecasts that know ``count`` measured steps of the machine.

    Also the share in % of errors inside the interval (``covered``), its median half width in log
    time (``half``), and the mean loss of its ends (see ``with_anchors``).
    """
    lines = {}
    for source, of_source in steps.groupby("source"):
        left = with_anchors(of_source, spreads[str(source)], count)
        if not len(left):
            continue
        measured = np.exp(left["log_ratio"].to_numpy(dtype=float))
        scores = errors(np.ones(len(measured)), measured)
        names = ("mape_pct", "median_ape_pct", "p90_ape_pct", "worst_ape_pct", "bias_pct")
        line = {name.removesuffix("_ape_pct").removesuffix("_pct"): scores[name] for name in names}
        line |= {"covered": 100 * left["covered"].mean(), "half": left["half"].median()}
        line |= {"loss": left["loss"].mean()}
        lines[source] = {"steps": len(of_source), **line}
    return pd.DataFrame.from_dict(lines, orient="index")


def tables(steps: pd.DataFrame, spreads: Mapping[str, Spread], titles: Sequence[str]) -> str:
    """Errors by role and source: of a typical machine, with one and three anchors."""
    text = []
    for count, title in zip(ANCHORS, titles, strict=True):
        found = judged(steps, spreads, count)
        found.insert(0, "role", [role_of(source) for source in found.index])
        for role in ROLES:
            mine = found[found["role"] == role].drop(columns="role")
            if len(mine):
                text += [f"\n{title}; {role}:", mine.round(3).to_string(), _summary(mine)]
    return "\n".join(text)


def _summary(lines: pd.DataFrame) -> str:
    mean, bias = lines["mape"].mean(), lines["bias"].mean()
    told = f"mean of {len(lines)} sources {mean:.1f} %, bias {bias:+.1f}"
    few = int((lines["covered"] < FEW_PCT).sum())
    covered = f"covered {lines['covered'].mean():.0f} %, less than {FEW_PCT:.0f} % of {few}"
    half = f"half width of the median source {lines['half'].median():.2f}"
    return f"{told}, {covered}, loss {lines['loss'].mean():.3f}, {half}"


def typical_text(known: pd.DataFrame, whole: Spread, without: Mapping[str, Spread]) -> str:
    """The file of typical machines."""
    counts = known.groupby("source").size()
    head = [
        "# How machines with GPUs differ: spread of the log of each factor (Factors),",
        "# of models on a machine and of steps of a model; how many deviations of a step's log",
        "# time its 80 % interval ends from the forecast (deviates).",
        f"# source: python -m itercast.extras.published.fits.machines, {len(known)} steps of "
        f"{known['machine'].nunique()} machines:",
        "# " + ", ".join(f"{source} {n}" for source, n in counts.items()),
    ]
    entries = {source.casefold(): _rounded(one) for source, one in without.items()}
    body = yaml.safe_dump(
        {"all": _rounded(whole), "without": entries},
        sort_keys=False,
        default_flow_style=None,
        width=150,
    )
    return "\n".join([*head, body])


def _rounded(spread: Spread) -> Row:
    return {name: round(value, 3) for name, value in stated(spread).items()}


def main(
    public: Annotated[
        Path, typer.Argument(help="folder of published measurements", exists=True, file_okay=False)
    ],
    parts: Annotated[Path, typer.Argument(help="folder of derivatives, written where missing")],
    judge: Annotated[bool, typer.Option(help="print sources that judge, too")] = False,
    write: Annotated[bool, typer.Option(help="write compose/machines/typical.yaml")] = False,
) -> None:
    """Fit how machines differ, print errors by source, without and with anchors."""
    steps = parts_of(public, parts, tuple(ROLES) if judge else ("finds causes",))
    known = steps[steps["source"].isin(ROLES["finds causes"])]
    whole, without = calibrated(known)
    spreads = {str(s): without.get(str(s), whole) for s in steps["source"].unique()}
    print(tables(steps, spreads, ("typical machine", "one anchor", "three anchors")))
    text = typical_text(known, whole, without)
    print(text)
    if write:
        TYPICAL.write_text(text)


if __name__ == "__main__":
    run_program(main)
