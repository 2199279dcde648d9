"""Compare forecasts with measured iterations: select rows, forecast each, make the table."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from rich import box
from rich.table import Table

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.base.files import write_atomic
from itercast.capture.cases.registry import case_names
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.step import SYNCHRONISED
from itercast.compose.capture_model import capture, micro_size
from itercast.compose.forecast import Forecast
from itercast.compose.graph.attention_kernels import with_attention_kernel
from itercast.compose.graph.cuda_variants import with_memory_format
from itercast.compose.graph.launch_modes import as_launched, with_engine
from itercast.compose.measured_step import MeasuredStep
from itercast.compose.target import Target, find_target, forecast_step
from itercast.eval.iteration_parts import parts_us
from itercast.eval.progress import progress_bar
from itercast.eval.ranking import ranking_lines
from itercast.eval.results import CaseResult, by_source, in_words, over_sources, records, totals
from itercast.eval.tables import beside_output
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import iterations_at_reference_us
from itercast.learners.models.compared import BLEND
from itercast.learners.train import digest_of
from itercast.microbench.hardware.stack import asked_stack
from itercast.microbench.ops import find_family
from itercast.microbench.store import Facts, Row, read_rows

OPTIONAL: Row = {
    "plan": "",
    "seq": 0,
    "attn": "sdpa",
    "loss": "default",
    "mode": "train",
}
OPTIONAL |= {
    "engine": "eager",
    "memory_format": "",
    "attention_kernel": "",
    "amp": False,
    "stack": "",
    "lora": "",
    "timing": SYNCHRONISED,  # as ``collect`` timed all steps before rows said so; importers say it
}
ASKED = ["gpu", "case", "batch", "seq", "plan", "mode", "loss", "optimizer", "dtype", "attn"]
ASKED += ["amp", "engine", "memory_format", "attention_kernel", "stack", "lora", "timing"]
FAR = 3.0  # no assumption: over the median of normal differences, two standard deviations
SETTINGS = ("mode", "optimizer", "loss", "dtype", "attn", "amp")


def measured_rows(root: Path, names: Sequence[str] | None) -> pd.DataFrame:
    """Rows of measured iterations under a dataset root whose model can be built.

    ``names`` restricts them to these cases. ValueError where there are none.
    """
    if not root.is_dir():
        raise ValueError(f"measured {str(root)!r}: no such folder")
    rows = read_rows([root], "iteration")
    if len(rows):
        rows = rows[rows["status"] == "ok"]
        rows = rows[rows["case"].isin(names)] if names else rows
    if not len(rows):
        raise ValueError(f"measured {str(root)!r}: no measured iteration of these cases there")
    return stated_rows(rows)


def stated_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows whose model can be built: a known case, or one with a configuration.

    How many others are left out is printed.
    Missing settings get their defaults. Mixed precision under FSDP, which casts the weights that
    it gathers, is the plan's; other rows with ``amp`` run under autocast.
    """
    known = rows["case"].isin(case_names())
    if "hf_config" in rows:
        known |= rows["hf_config"].notna()
    if (~known).any():
        beside_output().print(
            f"{(~known).sum()} rows left out: no case and no configuration of that name"
        )
    rows = rows[known].copy()
    for c, default in OPTIONAL.items():
        rows[c] = rows[c].where(rows[c].notna(), default) if c in rows else default
    amp, sharded = rows["amp"].astype(bool), rows["plan"].str.contains("zero=").astype(bool)
    plans = rows["plan"].where(~(amp & sharded), rows["plan"] + ",amp")
    return rows.assign(amp=amp & ~sharded, plan=plans)


def compare_all(rows: pd.DataFrame, folder: Path | None) -> list[CaseResult]:
    """Forecast every measured iteration; no model is trained on iterations.

    ``folder`` is the bundle; None takes the one that ``predict`` would take for each GPU.
    Rows that cannot be forecast are counted by reason and printed.
    """
    asked = [c for c in (*ASKED, "hf_config") if c in rows]
    rows = rows.assign(quiet=quiet_rounds(rows, asked))
    groups = list(rows.groupby(asked, dropna=False, sort=False))
    results, refused = [], Counter[str]()
    settings = [n for n in asked if n not in ("case", "batch", "plan", "hf_config")]
    by_case = rows.groupby("case")
    varied = {str(c): [n for n in settings if mine[n].nunique() > 1] for c, mine in by_case}
    with progress_bar() as bar:
        for key, group in bar.track(groups, description="forecast"):
            try:
                named = dict(zip(asked, key, strict=True))
                results.append(_compare(named, group, folder, varied[str(named["case"])]))
            except ValueError as exc:
                refused[str(exc)] += 1
    for reason, count in refused.most_common():
        beside_output().print(f"{count} not forecast: {reason}")
    return results


def quiet_rounds(rows: pd.DataFrame, asked: Sequence[str]) -> np.ndarray:
    """Rounds that other processes did not disturb, as the anchors timed beside them say: a mask.

    Rows alike in the columns ``asked`` are rounds of one iteration. A round was disturbed if its
    anchor took longer than that of the quietest one by more than FAR times what is usual, the
    median over all rounds. Without anchors none was.
    """
    if "anchor_us" not in rows:
        return np.ones(len(rows), dtype=bool)
    logs = rows.assign(slow=np.log(rows["anchor_us"])).groupby(list(asked), dropna=False)["slow"]
    longer = np.log(rows["anchor_us"]) - logs.transform("min")
    return np.asarray(~(longer > FAR * longer[longer > 0].median()))


def _compare(
    asked: Facts, rows: pd.DataFrame, folder: Path | None, varied: Sequence[str]
) -> CaseResult:
    """Compare one iteration, measured once or several times, with its forecast.

    Of several rounds the median counts, without those that were disturbed.

    ``varied`` are settings that differ between rows of the same case; they become part of the
    model's name.
    """
    rows = rows.sort_values("repeat") if "repeat" in rows else rows
    target = _target(asked, folder)
    if target.gpu.kind == "cpu":
        target = replace(target, threads=int(rows["threads"].iloc[0]))
    step = step_of(asked, target.plan)
    found = forecast_step(step, target)
    times = list(_at_reference_us(rows, target.bundle, found, step))
    quiet = rows["quiet"].to_numpy()
    first, last = times[0], times[-1]
    apart = [str(asked[n]) for n in varied]
    return replace(
        _result(found, target, float(np.exp(np.median(np.log(times)[quiet])))),
        case=str(asked["case"]),
        plan=str(asked["plan"]),
        model=" ".join([str(asked["case"]), *apart]),
        samples=int(asked["batch"]) * target.plan.dp,
        rounds_us=(first, last) if len(times) > 1 else (first,),
        retest_ape_pct=100 * abs(last / first - 1) if len(times) > 1 else None,
    )


def compare_steps(steps: Mapping[str, Sequence[MeasuredStep]]) -> list[CaseResult]:
    """Forecast steps that users measured, by source, each with its own options."""
    results, every = [], [(source, one) for source, mine in steps.items() for one in mine]
    with progress_bar() as bar:
        for source, one in bar.track(every, description="forecast"):
            found = forecast_step(one.step, one.target)
            length = round(found.samples_per_s and found.tokens_per_s / found.samples_per_s)
            model = f"{one.name} x {length} ({one.step.engine}) on {one.target.gpu.name}"
            result = _result(found, one.target, one.time_us)
            result = replace(result, case=one.name, plan=one.plan, model=model, source=source)
            results.append(result)
    return results


def step_rows(steps: Mapping[str, Sequence[MeasuredStep]]) -> pd.DataFrame:
    """What reports and MLflow say of the measurements: a row of each step."""
    return pd.DataFrame(
        {
            "source": source,
            "case": one.name,
            "plan": one.plan,
            "gpu": one.target.gpu.name,
            "stack": one.target.stack,
            "time_us": one.time_us,
        }
        for source, mine in steps.items()
        for one in mine
    )


def _result(found: Forecast, target: Target, measured_us: float) -> CaseResult:
    """A forecast beside a time measured once; the caller names its case."""
    return CaseResult(
        case="",
        plan="",
        model="",
        ranks=target.plan.world_size,
        samples=round(found.samples_per_s * found.iteration_us / 1e6),
        predicted_us=found.iteration_us,
        predicted_us_p10=found.iteration_us_p10,
        predicted_us_p90=found.iteration_us_p90,
        measured_us=measured_us,
        rounds_us=(measured_us,),
        retest_ape_pct=None,
        by_family_us=dict(found.by_family_us),
        unmodelled_frac=found.unmodelled_frac,
        gpu=target.gpu.name,
        parts_us=parts_us(found),
        assumed_frac=found.assumed_frac,
    )


def _target(asked: Facts, folder: Path | None) -> Target:
    """What a measured row ran on."""
    stack = asked_stack(asked.get("stack"))
    gpu, plan, name = (str(asked[key]) for key in ("gpu", "plan", "case"))
    return find_target(gpu, plan, folder, stack=stack, model=name)


def measured_steps(rows: pd.DataFrame, folder: Path | None) -> list[MeasuredStep]:
    """Iterations of these rows as steps that a host can be fitted to."""
    rows = rows[rows["family"] == "iteration"]
    missing = [c for c in (*ASKED, "time_us") if c not in rows and c not in OPTIONAL]
    if not len(rows) or missing:
        wanted = f"without the column {missing[0]!r}" if len(rows) else "rows of others"
        raise ValueError(f"a host is found from rows of family host or iteration, got {wanted}")
    found = []
    for row in records(stated_rows(rows)):
        target = _target(row, folder)
        step = step_of(row, target.plan)
        found.append(
            MeasuredStep(
                name=str(row["case"]),
                time_us=float(row["time_us"]),
                step=step,
                target=target,
                phases_us=_host_us(row) if target.gpu.kind != "cpu" else None,
            )
        )
    if not found:
        raise ValueError("a host is found from iterations of known cases, got none")
    return found


def _host_us(row: Facts) -> float | None:
    """The host's time of forward, loss and backward of an eager step of one process."""
    phases = [float(row.get(f"{phase}_us", np.nan)) for phase in ("forward", "loss", "backward")]
    alone = not row["plan"] and row["engine"] == "eager"
    return sum(phases) if alone and not np.isnan(phases).any() else None


def step_of(asked: Facts, plan: ParallelPlan) -> StepCapture:
    """Capture the step that a measured row describes.

    Its model, sizes and settings, the engine that launches it, its memory format, its attention
    kernel, and whether steps were synchronised one by one when they were timed.
    """
    model = model_of(asked)
    size = micro_size(model, plan, int(asked["batch"]), int(asked["seq"]))
    options = {n: asked[n] for n in SETTINGS if n in asked} | {"lora": asked.get("lora", "")}
    step = with_engine(capture(model, **size, **options), str(asked.get("engine", "eager")))
    step = with_memory_format(step, str(asked.get("memory_format", "")))
    step = with_attention_kernel(step, str(asked.get("attention_kernel", "")))
    return replace(step, synchronised=asked.get("timing") == SYNCHRONISED)


def model_of(asked: Facts) -> str | Path:
    """The model of a measured row: the name of a case, or a file with the row's configuration."""
    config = asked.get("hf_config")
    if not isinstance(config, str):
        return str(asked["case"])
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    path = cache_folder("configs") / digest / "config.json"
    if not path.is_file():
        write_atomic(path, config.encode())
    return path


def _at_reference_us(
    rows: pd.DataFrame, bundle: Bundle, found: Forecast, step: StepCapture
) -> Iterator[float]:
    """Measured times in us by repeat, scaled to the machine speed at which ops were learned."""
    families = (family for family, _ in map(find_family, as_launched(step).calls))
    calls = Counter(family.name for family in families if family is not None)
    yield from iterations_at_reference_us(
        rows,
        bundle.anchors if "threads" in rows else {},
        found.by_family_us,
        {**calls, "host": sum(step.host.values())},
        {name: model.sensitivity for name, model in bundle.models.items()},
    )


def compared_facts(
    rows: pd.DataFrame, data: Path | None, bundle: Path | None, source: str
) -> dict[str, str]:
    """What a comparison of measured rows says of itself in MLflow."""
    return {
        "bundle": str(bundle or "shipped"),
        "data": str(data or ""),
        "digest": digest_of(rows),
        "stack": ", ".join(sorted(set(rows["stack"].astype(str)))),
        "learner": BLEND,
        "source": source,
    }


def results_table(results: Sequence[CaseResult]) -> Table:
    """A table of predicted and measured times with signed error and retest error.

    On a narrow terminal plans go on in the next line.
    """
    title = "predicted against measured training iterations, ms"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for head in ("case", "plan"):
        table.add_column(head, overflow="fold")
    for head in ("predicted", "measured", "error\n%", "retest\n%", "no model\n%"):
        table.add_column(head, justify="right", no_wrap=True)
    for r in results:
        table.add_row(r.case, r.plan, *r.cells)
    sources = by_source(results)
    several = len(sources) > 1
    groups = sources if several else totals(results)
    lines = [f"{name}: {in_words(group)}" for name, group in groups.items()]
    lines += [over_sources(sources)] if several else []
    table.caption = "\n".join([*lines, *ranking_lines(results)])
    return table
