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
from itercast.compose.measured_step import Measured, MeasuredStep
from itercast.compose.target import Target, find_target, forecast_step
from itercast.eval.iteration_parts import parts_us
from itercast.eval.progress import progress_bar
from itercast.eval.ranking import ranking_lines
from itercast.eval.results import CaseResult, by_source, in_words, over_sources, records, totals
from itercast.eval.tables import beside_output, headed
from itercast.learners.bundle import Bundle
from itercast.learners.features.machine_speed import iterations_at_reference_us
from itercast.learners.models.compared import BLEND
from itercast.learners.train import digest_of
from itercast.microbench.hardware.stack import asked_stack
from itercast.microbench.ops import find_family
from itercast.microbench.store import Facts, Row, read_rows

DEFAULT_SETTINGS: Row = {
    "plan": "",
    "seq": 0,
    "attn": "sdpa",
    "loss": "default",
    "mode": "train",
    "engine": "eager",
    "memory_format": "",
    "attention_kernel": "",
    "amp": False,
    "stack": "",
    "lora": "",
    "timing": SYNCHRONISED,  # as ``collect`` timed all steps before rows said so; importers say it
}
CAPTURE_OPTIONS = ("mode", "loss", "optimizer", "dtype", "attn", "amp")
SETTING_COLUMNS = ["gpu", "case", "batch", "seq", "plan", *CAPTURE_OPTIONS, "engine"]
SETTING_COLUMNS += ["memory_format", "attention_kernel", "stack", "lora", "timing"]
MEDIANS_OF_DISTURBED = 3.0  # 3 medians of |x| are 2 standard deviations of a normal x


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
    """Rows whose model can be built (a case, or a Hugging Face configuration), with defaults.

    How many rows are left out is printed. For rows with ``zero=`` the setting ``amp`` moves into
    the plan, as FSDP casts what it gathers; other rows run under autocast.
    """
    is_known_model = rows["case"].isin(case_names())
    if "hf_config" in rows:
        is_known_model |= rows["hf_config"].notna()
    if (~is_known_model).any():
        beside_output().print(
            f"{(~is_known_model).sum()} rows left out: no case and no configuration of that name"
        )
    rows = rows[is_known_model].copy()
    for name, default in DEFAULT_SETTINGS.items():
        rows[name] = rows[name].where(rows[name].notna(), default) if name in rows else default
    amp, sharded = rows["amp"].astype(bool), rows["plan"].str.contains("zero=").astype(bool)
    plans = rows["plan"].where(~(amp & sharded), rows["plan"] + ",amp")
    return rows.assign(amp=amp & ~sharded, plan=plans)


def compare_all(rows: pd.DataFrame, folder: Path | None) -> list[CaseResult]:
    """Forecast every measured iteration; rows with equal settings are rounds of one iteration.

    ``folder`` is the bundle; None takes the one that ``predict`` would take for each GPU.
    Rows that cannot be forecast are counted by reason and printed.
    """
    columns = [c for c in (*SETTING_COLUMNS, "hf_config") if c in rows]
    rows = rows.assign(quiet=quiet_rounds(rows, columns))
    iterations = list(rows.groupby(columns, dropna=False, sort=False))
    results, rows_by_reason = [], Counter[str]()
    may_vary = [c for c in columns if c not in ("case", "batch", "plan", "hf_config")]
    varied = {
        str(case): [c for c in may_vary if rows_of_case[c].nunique() > 1]
        for case, rows_of_case in rows.groupby("case")
    }
    with progress_bar() as bar:
        for key, rounds in bar.track(iterations, description="forecast"):
            try:
                settings = dict(zip(columns, key, strict=True))
                results.append(_compare(settings, rounds, folder, varied[str(settings["case"])]))
            except ValueError as exc:
                rows_by_reason[str(exc)] += 1
    for reason, count in rows_by_reason.most_common():
        beside_output().print(f"{count} not forecast: {reason}")
    return results


def quiet_rounds(rows: pd.DataFrame, columns: Sequence[str]) -> np.ndarray:
    """Mask of the rows that other processes did not disturb while they were timed.

    Rows alike in ``columns`` are rounds of one iteration. ``anchor_us`` is the time of a fixed task
    beside each; its slowdown is log(anchor_us / the smallest of the iteration's rounds). A round is
    disturbed if its slowdown > MEDIANS_OF_DISTURBED * median of all slowdowns > 0; none is without
    anchors.
    """
    if "anchor_us" not in rows:
        return np.ones(len(rows), dtype=bool)
    quietest_us = rows.groupby(list(columns), dropna=False)["anchor_us"].transform("min")
    slowdown = np.log(rows["anchor_us"]) - np.log(quietest_us)
    usual = slowdown[slowdown > 0].median()
    return np.asarray(~(slowdown > MEDIANS_OF_DISTURBED * usual))


def _compare(
    settings: Facts, rounds: pd.DataFrame, folder: Path | None, varied: Sequence[str]
) -> CaseResult:
    """Compare one iteration (its median over undisturbed rounds) with its forecast.

    ``varied``: columns that differ between rows of the same case; their values become part of the
    model's name.
    """
    rounds = rounds.sort_values("repeat") if "repeat" in rounds else rounds
    target = _target(settings, folder)
    if target.gpu.kind == "cpu":
        target = replace(target, threads=int(rounds["threads"].iloc[0]))
    step = step_of(settings, target.plan)
    forecast = forecast_step(step, target)
    logs = np.log(list(_at_reference_us(rounds, target.bundle, forecast, step)))
    median_us = float(np.exp(np.median(logs[rounds["quiet"].to_numpy()])))
    halves_us = [float(np.exp(np.median(half))) for half in np.array_split(logs, 2) if len(half)]
    case, plan = str(settings["case"]), str(settings["plan"])
    model = " ".join([case, *(str(settings[column]) for column in varied)])
    return replace(
        _result(forecast, target, median_us, case=case, plan=plan, model=model),
        samples=int(settings["batch"]) * target.plan.dp,
        rounds_us=tuple(halves_us),
        retest_ape_pct=100 * abs(halves_us[-1] / halves_us[0] - 1) if len(logs) > 1 else None,
    )


def compare_steps(steps: Mapping[str, Sequence[Measured]]) -> list[CaseResult]:
    """Forecast steps that users measured, by source, each with its own options."""
    results, pairs = [], [(source, step) for source, own in steps.items() for step in own]
    with progress_bar() as bar:
        for source, measured in bar.track(pairs, description="forecast"):
            target = measured.target
            forecast = measured.forecast(target)
            samples_per_s = forecast.samples_per_s
            length = round(samples_per_s and forecast.tokens_per_s / samples_per_s)
            name, engine = measured.name, measured.engine
            model = f"{name} x {length} ({engine}) on {target.gpu.name}"
            names = {"case": name, "plan": measured.plan, "model": model, "source": source}
            results.append(_result(forecast, target, measured.time_us, **names))
    return results


def step_rows(steps: Mapping[str, Sequence[Measured]]) -> pd.DataFrame:
    """Measured steps as a table for reports and MLflow, a row each."""
    return pd.DataFrame(
        {
            "source": source,
            "case": step.name,
            "plan": step.plan,
            "gpu": step.target.gpu.name,
            "stack": step.target.stack,
            "time_us": step.time_us,
        }
        for source, own in steps.items()
        for step in own
    )


def _result(forecast: Forecast, target: Target, measured_us: float, **names: str) -> CaseResult:
    """A forecast beside a time measured once; ``names``: case, plan, model, source."""
    return CaseResult(
        ranks=forecast.world_size,
        samples=round(forecast.samples_per_s * forecast.iteration_us / 1e6),
        predicted_us=forecast.iteration_us,
        predicted_us_p10=forecast.iteration_us_p10,
        predicted_us_p90=forecast.iteration_us_p90,
        measured_us=measured_us,
        rounds_us=(measured_us,),
        retest_ape_pct=None,
        by_family_us=dict(forecast.by_family_us),
        unmodelled_frac=forecast.unmodelled_frac,
        gpu=target.gpu.name,
        parts_us=parts_us(forecast),
        assumed_frac=forecast.assumed_frac,
        **names,
    )


def _target(row: Facts, folder: Path | None) -> Target:
    """The GPU, plan, bundle and software that a measured row is forecast for."""
    gpu, plan, case = (str(row[column]) for column in ("gpu", "plan", "case"))
    return find_target(gpu, plan, folder, stack=asked_stack(row.get("stack")), model=case)


def measured_steps(rows: pd.DataFrame, folder: Path | None) -> list[MeasuredStep]:
    """Iterations of these rows as steps that a host can be fitted to; ``folder``: the bundle."""
    rows = rows[rows["family"] == "iteration"]
    needed = [c for c in (*SETTING_COLUMNS, "time_us") if c not in DEFAULT_SETTINGS]
    missing = [c for c in needed if c not in rows]
    if not len(rows) or missing:
        got = f"without the column {missing[0]!r}" if len(rows) else "rows of others"
        raise ValueError(f"a host is found from rows of family host or iteration, got {got}")
    steps = []
    for row in records(stated_rows(rows)):
        target = _target(row, folder)
        steps.append(
            MeasuredStep(
                name=str(row["case"]),
                time_us=float(row["time_us"]),
                step=step_of(row, target.plan),
                target=target,
                phases_us=_host_us(row) if target.gpu.kind != "cpu" else None,
            )
        )
    if not steps:
        raise ValueError("a host is found from iterations of known cases, got none")
    return steps


def _host_us(row: Facts) -> float | None:
    """The host's time of forward, loss and backward; None unless eager and one process."""
    phases = [float(row.get(f"{phase}_us", np.nan)) for phase in ("forward", "loss", "backward")]
    one_eager_process = not row["plan"] and row["engine"] == "eager"
    return sum(phases) if one_eager_process and not np.isnan(phases).any() else None


def step_of(row: Facts, plan: ParallelPlan) -> StepCapture:
    """Capture the step that a measured row describes, under the plan's micro-batches.

    The row states model, sizes, settings, engine, memory format, attention kernel, and whether the
    host waited for the device after each step when they were timed.
    """
    model = model_of(row)
    size = micro_size(model, plan, int(row["batch"]), int(row["seq"]))
    options = {name: row[name] for name in CAPTURE_OPTIONS if name in row}
    step = capture(model, **size, **options, lora=row.get("lora", ""))
    step = with_engine(step, str(row.get("engine", "eager")))
    step = with_memory_format(step, str(row.get("memory_format", "")))
    step = with_attention_kernel(step, str(row.get("attention_kernel", "")))
    return replace(step, synchronised=row.get("timing") == SYNCHRONISED)


def model_of(row: Facts) -> str | Path:
    """The model of a measured row: the name of a case, or a file with the row's configuration."""
    config = row.get("hf_config")
    if not isinstance(config, str):
        return str(row["case"])
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    path = cache_folder("configs") / digest / "config.json"
    if not path.is_file():
        write_atomic(path, config.encode())
    return path


def _at_reference_us(
    rows: pd.DataFrame, bundle: Bundle, forecast: Forecast, step: StepCapture
) -> Iterator[float]:
    """Measured times in us by repeat, scaled to the machine speed at which ops were learned."""
    families = (family for family, _ in map(find_family, as_launched(step).calls))
    calls = Counter(family.name for family in families if family is not None)
    yield from iterations_at_reference_us(
        rows,
        bundle.anchors if "threads" in rows else {},
        forecast.by_family_us,
        {**calls, "host": sum(step.host.values())},
        {name: model.sensitivity for name, model in bundle.models.items()},
    )


def compared_facts(
    rows: pd.DataFrame, data: Path | None, bundle: Path | None, source: str
) -> dict[str, str]:
    """Facts of a comparison for MLflow; ``data``: the dataset's folder, ``source``: the command."""
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

    Below it the mean errors by source, or by kind of plan. Long plans wrap on a narrow terminal.
    """
    title = "predicted against measured training iterations, ms"
    texts, look = ("case", "plan"), {"pad_edge": False, "show_edge": False}
    numbers = ("samples", "predicted", "measured", "error\n%", "retest\n%", "without\nmodel %")
    table = headed(title, *texts, *numbers, texts=texts, box=box.SIMPLE_HEAD, **look)
    for result in results:
        table.add_row(result.name, result.plan, f"{result.samples:,}", *result.cells)
    sources = by_source(results)
    several = len(sources) > 1
    groups = sources if several else totals(results)
    lines = [f"{name}: {in_words(group)}" for name, group in groups.items()]
    lines += [over_sources(sources)] if several else []
    table.caption = "\n".join([*lines, *ranking_lines(results)])
    return table
