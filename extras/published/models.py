"""Run lines of the public benchmark about whole models: forecast published iterations, score."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.forecast import Forecast, rank_of
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.simulate.memory.stage_memory import stage_memory
from itercast.compose.target import Target, find_target
from itercast.eval.compare import SETTING_COLUMNS, step_of
from itercast.eval.iteration_parts import PARTS, parts_us
from itercast.eval.progress import progress_bar
from itercast.eval.results import COVERAGE, records
from itercast.eval.tables import beside_output
from itercast.extras.calibration.host_fit import fit_host, host_yaml
from itercast.extras.imports.base import positive
from itercast.extras.processes import processes
from itercast.extras.published.lines import LineResult, ModelLine, Rows, model_lines
from itercast.extras.published.readers import node_sums_us, read_iterations
from itercast.learners.train import errors
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.hardware.stack import asked_stack
from itercast.microbench.store import Facts

Answer = Mapping[str, float] | str  # forecasts by part, or the error message
# What is compared, and the column of its measurement: us of a step and of its backward pass, bytes.
MEASURED = {"step": "time_us", "backward": "backward_us", "memory": "memory_bytes"}
INTERVAL = ("step_p10", "step_p90")  # bounds of the 80 % interval of a step in us
HOST = "host_file"
CALIBRATED_ON = 32  # models, or cases of a machine
OF_ROWS = ("backward_us", "workspace_bytes")  # what was measured, too
SIZES = ("rows", "cols", "inner", "experts", "topk")  # of a layer
FLUSH = "flush_bytes"  # that a device writes between two calls that are timed
OF_BUILDERS = ("problem_source", *SIZES, "timer", FLUSH)  # what describes other models
ASSUMED = "assumed_frac"  # share of a step that rests on assumed numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastLine:
    """A line, its published rows with their forecasts (``add_forecasts``), and seconds taken."""

    line: ModelLine
    rows: Rows
    seconds: float


def read_lines(public: Path, only: str) -> list[tuple[ModelLine, Rows]]:
    """The lines whose name contains ``only``, and the published rows of each.

    Lines whose folder is missing are left out, and it is printed.
    """
    lines = [line for line in model_lines() if only in line.name]
    tables = {name: read_iterations(public, name) for name in {x.folder: None for x in lines}}
    return [
        (line, line.choose(table)) for line in lines if (table := tables[line.folder]) is not None
    ]


def forecast_lines(
    public: Path, lines: Sequence[tuple[ModelLine, Rows]], bundle: Path
) -> Iterator[ForecastLine]:
    """Forecast the rows of lines, each configuration once."""
    neusight = any(line.folder == "NeuSight" for line, _ in lines)
    nodes = node_sums_us(public / "NeuSight") if neusight else {}
    known: dict[object, Answer] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        processes() as pool,
    ):
        for line, rows in lines:
            start = time.monotonic()
            rows = with_fitted_hosts(line, rows, bundle, pool, Path(folder))
            found = add_forecasts(rows, bundle, known, pool)
            found["nodes"] = [nodes.get(str(o), {}).get(line.part, np.nan) for o in found["origin"]]
            yield ForecastLine(line=line, rows=found, seconds=time.monotonic() - start)


def add_forecasts(rows: Rows, bundle: Path, known: dict[object, Answer], pool: Executor) -> Rows:
    """Rows with their forecasts: ``step`` and ``backward`` in us, ``memory`` in bytes.

    Also the bounds of a step (INTERVAL), the share of it that is assumed, and its PARTS in us.
    Rows that cannot be forecast are left out, counted by reason and printed. ``known`` keeps the
    forecasts of earlier lines.
    """
    names = [c for c in (*SETTING_COLUMNS, "hf_config", *OF_ROWS, HOST, *OF_BUILDERS) if c in rows]
    asked = rows[names].to_dict("records")
    keys = [tuple(map(str, values.values())) for values in asked]
    new = {k: v for k, v in zip(keys, asked, strict=True) if k not in known}
    answers = pool.map(partial(_answer, bundle), new.values())
    with progress_bar() as bar:
        tracked = bar.track(answers, total=len(new), description="forecast")
        known.update(zip(new, tracked, strict=True))
    found = [known[k] for k in keys]
    for reason, count in Counter(f for f in found if isinstance(f, str)).most_common():
        beside_output().print(f"{count} not forecast: {reason}")
    good = [not isinstance(f, str) for f in found]
    columns = [*MEASURED, *INTERVAL, ASSUMED, *PARTS]
    forecasts = pd.DataFrame([f for f in found if not isinstance(f, str)], columns=columns)
    return pd.concat([rows[good].reset_index(drop=True), forecasts], axis=1)


def _answer(bundle: Path, asked: Facts) -> Answer:
    """Forecast a row's step and backward pass in us, its peak memory in bytes; or say why not.

    backward = step - forward in eval mode, so dropout counts as backward; it is small beside the
    products. It is 0 under a plan and where no backward time was published.
    """
    from itercast.compose.target import forecast_step

    try:
        target = row_target(asked, bundle)
        step = captured_step(asked, target.plan)
        whole = forecast_step(step, target)
        step_us, backward_us = timed_us(asked, whole), 0.0
        published = float(asked.get("backward_us") or 0.0)
        if published > 0 and not asked["plan"] and asked["mode"] != "infer":
            ahead = forecast_step(captured_step({**asked, "mode": "infer"}, target.plan), target)
            backward_us = timed_us(asked, whole, ahead)
    except ValueError as exc:
        return str(exc)[:120]
    share = step_us / whole.iteration_us
    bounds_us = (whole.iteration_us_p10 * share, whole.iteration_us_p90 * share)
    memory = last_rank_bytes(step, target) + float(np.nan_to_num(asked.get("workspace_bytes", 0.0)))
    parts = {"step": step_us, "backward": backward_us, "memory": memory}
    bounds = dict(zip(INTERVAL, bounds_us, strict=True))
    return {**parts, **bounds, ASSUMED: whole.assumed_frac, **parts_us(whole)}


def last_rank_bytes(step: StepCapture, target: Target) -> int:
    """Peak memory of the last rank of a plan, which is that of all without a pipeline."""
    cluster = cluster_for(target.plan, target.gpu, target.node)
    rank = rank_of(step, target.plan, target.book, cluster)
    return sum(stage_memory(rank, step.optimizer)[-1].values())


def timed_us(asked: Facts, found: Forecast, ahead: Forecast | None = None) -> float:
    """The time that a published measurement covers, by the forecast ``found``, in us.

    A host's timer measures the iteration, a device's the kernels. ``ahead``: the forecast of what
    runs before the timed part, which is subtracted. triton's do_bench first zeroes FLUSH bytes,
    while the host launches: the device waits only for what the host takes longer.
    """
    before = (ahead.compute_us, ahead.host_us, ahead.iteration_us) if ahead else (0.0, 0.0, 0.0)
    if asked.get("timer") != "device":
        return found.iteration_us - before[2]
    kernels_us, host_us = found.compute_us - before[0], found.host_us - before[1]
    flush_bytes = float(np.nan_to_num(asked.get(FLUSH, np.inf), nan=np.inf))
    flush_us = flush_bytes / load_gpu(str(asked["gpu"])).hbm_bytes_per_s * 1e6
    return max(kernels_us, host_us - flush_us)


def row_target(asked: Facts, bundle: Path) -> Target:
    """What a row ran on: its GPU, plan and software, and its host where one was fitted."""
    stack, host = asked_stack(asked.get("stack")), str(asked.get(HOST) or "")
    return find_target(str(asked["gpu"]), str(asked["plan"]), bundle, host=host, stack=stack)


def with_fitted_hosts(
    line: ModelLine, rows: Rows, bundle: Path, pool: Executor, folder: Path
) -> Rows:
    """Rows of a line with files of their machines' hosts, where it fits them (``fits_hosts``)."""
    if not line.fits_hosts:
        return rows
    known, hosts = rows[line.fits(rows)], dict[str, str]()
    for machine, mine in known.groupby("machine"):
        of_cases = mine.sort_values("time_us").drop_duplicates("case")
        fastest = of_cases.head(CALIBRATED_ON)
        path = folder / f"{machine}.yaml"
        hosts[str(machine)] = pool.submit(_write_host, path, fastest, bundle).result()
    return rows.assign(**{HOST: rows["machine"].map(hosts)})


def _write_host(path: Path, rows: Rows, bundle: Path) -> str:
    """Fit a host to rows and write its file."""
    steps = measured_steps(rows, bundle)
    path.write_text(host_yaml(fit_host(path.stem, steps, source=f"{len(steps)} rows of it")))
    return str(path)


def measured_steps(rows: Rows, bundle: Path) -> list[MeasuredStep]:
    """Published rows as steps that a host can be fitted to."""
    steps = []
    for record in records(rows):
        row = {**record, HOST: ""}
        target = row_target(row, bundle)
        step, time_us = captured_step(row, target.plan), float(row["time_us"])
        steps.append(MeasuredStep(name=row["case"], time_us=time_us, step=step, target=target))
    return steps


def captured_step(asked: Facts, plan: ParallelPlan) -> StepCapture:
    """Capture what a row describes: a model under a plan, a problem's text, or a layer."""
    how = {"mode": asked["mode"], "loss": "none", "optimizer": "none"}
    if asked.get("problem_source"):
        from itercast.extras.published.sources.problem import problem  # needs torch

        make = partial(problem, str(asked["problem_source"]))
        step = capture(make, dtype=asked["dtype"], **how)
    elif asked.get("rows"):
        from itercast.extras.published.sources.layers import layer  # needs torch

        sizes = {name: int(np.nan_to_num(asked.get(name, 0))) for name in SIZES}
        step = capture(layer(str(asked["case"]), str(asked["dtype"]), **sizes), (), **how)
        host = {name: n for name, n in step.host.items() if name != "zero_grad"}  # not timed
        step = replace(step, host=host)
    else:
        return step_of(asked, plan)
    return with_engine(step, str(asked["engine"]))


def judge(line: ModelLine, rows: Rows, seconds: float) -> Iterator[LineResult]:
    """Score a line; yields a result for each of its targets.

    The baseline "nodes summed" adds up the measured times of a model's ops (NeuSight's nodes), on
    the rows that have them.
    """
    rows = rows[positive(rows[MEASURED[line.part]]) > 0]
    if not len(rows):
        return
    rows = judged(line, rows)
    if line.calibrated:
        line = replace(line, name=f"{line.name} models")
    measured = rows[MEASURED[line.part]].to_numpy(dtype=float)
    guess = rows[line.part].to_numpy(dtype=float)
    scores = {"itercast": {**errors(guess, measured), **coverage(line, rows)}}
    nodes = rows["nodes"].to_numpy(dtype=float)
    summed = np.isfinite(nodes)
    scores["itercast"]["kendall_tau"] = float(kendalltau(guess, measured).statistic)
    if summed.any():
        scores["nodes summed"] = errors(nodes[summed], measured[summed])
        scores["itercast, same rows"] = errors(guess[summed], measured[summed])
    for metric, target in line.targets.items():
        yield LineResult(
            line=line.name,
            part=line.part,
            metric=metric,
            target=target,
            known_best=line.known_best,
            rows=len(rows),
            seconds=seconds,
            scores=scores,
        )


def coverage(line: ModelLine, rows: Rows) -> dict[str, float]:
    """The share in % of measured steps within their 80 % interval; nothing for another part."""
    if line.part != "step" or not len(rows):
        return {}
    low, high = (rows[name].to_numpy(dtype=float) for name in INTERVAL)
    measured = rows[MEASURED["step"]].to_numpy(dtype=float)
    return {COVERAGE: 100 * float(np.mean((low <= measured) & (measured <= high)))}


def judged(line: ModelLine, rows: Rows) -> Rows:
    """The rows that judge a line: without those that calibrate it or that its host is fitted to."""
    if line.fits_hosts:
        return rows[~line.fits(rows)].reset_index(drop=True)
    if not line.calibrated:
        return rows
    chosen = _sample(rows["case"])
    known = rows[chosen]
    ratio = np.exp(np.median(np.log(known[MEASURED[line.part]] / known[line.part])))
    scaled = [line.part, *(INTERVAL if line.part == "step" else ())]
    return rows[~chosen].assign(**{name: rows.loc[~chosen, name] * ratio for name in scaled})


def _sample(cases: pd.Series) -> np.ndarray:
    """Mask of the rows of CALIBRATED_ON models drawn at random, at most half of all models."""
    names = np.random.default_rng(0).permutation(np.unique(cases.astype(str)))
    return np.isin(cases.astype(str), names[: min(CALIBRATED_ON, len(names) // 2)])
