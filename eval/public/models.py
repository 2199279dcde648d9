"""Run lines of the public benchmark about whole models: forecast published iterations, score."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from compose.target import find_target
from eval.compare import ASKED, console, stated_rows, step_of
from eval.progress import progress_bar
from eval.public.benchmark import Rows
from eval.public.measured_nodes import node_sums_us
from eval.public.table import WORKERS
from eval.results import LineResult
from learners.train import errors

Answer = tuple[float, float] | str  # us of a step and of its backward pass, or the error message
CALIBRATED_ON = 32
EXAMPLES = {
    "DLRM": ("dlrm-criteo",),
    "Transformer-XL base": ("transformer-xl-base",),
    "Transformer-XL large": ("transformer-xl-large",),
    "BERT": ("BERT", "bert_base_squad", "bert_large_squad"),
    "ResNet-50": ("resnet50", "resnet50v1.5"),
    "SSD300": ("ssd300",),
}
SYNCHRONISED = ("BERT", "ResNet-50", "SSD300")
DRAWN = 96  # models drawn at random of those that only timm can build


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """One line of the benchmark about whole iterations: which rows, and targets by metric.

    ``part`` is what is compared: "step" or "backward". A target of None: the metric is reported
    without one. ``calibrated``: forecasts are scaled by the median ratio of CALIBRATED_ON models.
    """

    name: str
    known_best: str
    choose: Callable[[Rows], np.ndarray]
    targets: Mapping[str, float | None]
    part: str = "step"
    calibrated: bool = False


def labels(gpu: str, *modes: str) -> Callable[[Rows], np.ndarray]:
    """Selects NeuSight's measured models on one GPU: not compiled, without a plan."""

    def choose(rows: Rows) -> np.ndarray:
        mine = (rows["source"] == "neusight") & (rows["gpu"] == gpu) & rows["mode"].isin(modes)
        return np.asarray(mine & ~rows["compile"].astype(bool) & (rows["plan"] == ""))

    return choose


def of(*sources: str) -> Callable[[Rows], np.ndarray]:
    """Selects the rows of these published sources."""
    return lambda rows: np.asarray(rows["source"].isin(sources))


def timm_in_transformers(rows: Rows) -> np.ndarray:
    """Selects timm's models that transformers can build as well."""
    stated = rows["hf_config"].str.contains('"architectures"', na=False)
    return np.asarray(of("timm")(rows) & stated)


def timm_alone(rows: Rows) -> np.ndarray:
    """Selects DRAWN of timm's other models at random; forecasting them needs timm installed."""
    others = rows["case"].where(of("timm")(rows) & ~timm_in_transformers(rows), "").astype(str)
    names = np.random.default_rng(0).permutation(sorted(set(others) - {""}))
    return np.asarray(others.isin(names[:DRAWN]))


def examples(*cases: str, several: bool = False) -> Callable[[Rows], np.ndarray]:
    """Selects runs of NVIDIA's DeepLearningExamples on one GPU, or on ``several`` of a node."""
    theirs = of("lambda-deeplearning-benchmark", "nvidia-dle")
    return lambda rows: np.asarray(
        theirs(rows) & rows["case"].isin(cases) & ((rows["world_size"] > 1) == several)
    )


def megatron(experts: bool) -> Callable[[Rows], np.ndarray]:
    """Selects runs of Megatron-Core: either those under expert parallelism, or all others."""
    all_of_it = of("nemo-launcher", "nemo-docs", "megatron-bridge")
    spread = re.compile(r"(^|,)ep=")
    return lambda rows: (
        all_of_it(rows) & np.array([bool(spread.search(p)) == experts for p in rows["plan"]])
    )


def model_lines() -> list[ModelLine]:
    """All lines about whole models, in the order of the table."""
    return [*neusight_lines(), *cluster_lines(), *timm_lines()]


def neusight_lines() -> list[ModelLine]:
    """Lines about NeuSight's measured models, in fp32."""
    a100 = labels("a100-pcie-80gb", "train")
    nodes = "NeuSight 7.6; nodes summed 6.5"
    return [
        ModelLine(
            name="NeuSight labels, A100-80GB train",
            known_best=nodes,
            choose=a100,
            targets={"mape_pct": 7.0},
        ),
        ModelLine(
            name="NeuSight labels, A100-80GB train",
            known_best=nodes,
            choose=a100,
            targets={"mape_pct": 5.0},
            part="backward",
        ),
        ModelLine(
            name="NeuSight labels, V100",
            known_best="NeuSight 5.9-8.9; nodes summed 7.6",
            choose=labels("v100-pcie-32gb", "train", "infer"),
            targets={"mape_pct": 5.0},
        ),
    ]


def cluster_lines() -> list[ModelLine]:
    """Lines about MPT under FSDP, Megatron-Core, and NVIDIA's DeepLearningExamples."""
    choices = {
        "Megatron-Core, dense models in fp8": megatron(False),
        "Megatron-Core, mixtures of experts": megatron(True),
    }
    for name, cases in EXAMPLES.items():
        choices[f"{name} on one GPU"] = examples(*cases)
    for name in SYNCHRONISED:
        choices[f"{name} under DDP"] = examples(*EXAMPLES[name], several=True)
    mpt = ModelLine(
        name="MPT under FSDP on A100",
        known_best="none published",
        choose=of("llm-foundry"),
        targets={"geomean_ape_pct": 8.0, "mape_pct": 12.0},
    )
    others = [
        ModelLine(
            name=name,
            known_best="none published",
            choose=choose,
            targets={"geomean_ape_pct": None, "mape_pct": None},
        )
        for name, choose in choices.items()
    ]
    return [mpt, *others]


def timm_lines() -> list[ModelLine]:
    """Lines about timm's benchmark on an RTX 3090, calibrated on some of its models."""
    return [
        ModelLine(
            name=f"timm{which} on RTX 3090, calibrated on {CALIBRATED_ON}",
            known_best="none published",
            choose=choose,
            targets={"kendall_tau": 0.85, "mape_pct": 15.0},
            calibrated=True,
        )
        for which, choose in (("", timm_in_transformers), (" (by itself)", timm_alone))
    ]


def run_models(public: Path, only: str, bundle: Path) -> list[LineResult]:
    """Results of the lines whose name contains ``only``; each configuration is forecast once."""
    lines = [line for line in model_lines() if only in line.name]
    if not lines:
        return []
    rows, nodes = read_iterations(public), node_sums_us(public / "NeuSight")
    results: list[LineResult] = []
    known: dict[Any, Answer] = {}
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for line in lines:
            start = time.monotonic()
            mine = rows[line.choose(rows)].reset_index(drop=True)
            found = add_forecasts(mine, bundle, known, pool)
            found["nodes"] = [nodes.get(str(o), {}).get(line.part, np.nan) for o in found["origin"]]
            results += judge(line, found, time.monotonic() - start)
    return results


def read_iterations(public: Path) -> Rows:
    """Published iterations whose model can be built, from NeuSight and the iteration tables."""
    from microbench.importers import neusight
    from microbench.importers.published import iterations

    parts = [
        neusight.read(public / "NeuSight").rows["iteration"],
        iterations.read(public / "iterations").rows["iteration"],
    ]
    rows = pd.concat(parts, ignore_index=True)
    return stated_rows(rows[rows["status"] == "ok"])


def add_forecasts(rows: Rows, bundle: Path, known: dict[Any, Answer], pool: Executor) -> Rows:
    """Rows with their forecasts ``step`` and ``backward`` in us.

    Rows that cannot be forecast are left out, counted by reason and printed. ``known`` keeps the
    forecasts of earlier lines.
    """
    names = [*(c for c in ASKED if c in rows), "hf_config", "backward_us"]
    asked = rows[names].to_dict("records")
    keys = [tuple(map(str, values.values())) for values in asked]
    new = {k: v for k, v in zip(keys, asked, strict=True) if k not in known}
    answers = pool.map(partial(_answer, bundle), new.values())
    with progress_bar() as bar:
        tracked = bar.track(answers, total=len(new), description="forecast")
        known.update(zip(new, tracked, strict=True))
    found = [known[k] for k in keys]
    for reason, count in Counter(f for f in found if isinstance(f, str)).most_common():
        console.print(f"{count} not forecast: {reason}")
    times = [(np.nan, np.nan) if isinstance(f, str) else f for f in found]
    step, backward = np.array(times).reshape(-1, 2).T
    rows = rows.assign(step=step, backward=backward)
    return pd.DataFrame(rows[np.isfinite(step)].reset_index(drop=True))


def _answer(bundle: Path, asked: Mapping[str, Any]) -> Answer:
    """Forecast a row's step and its backward pass in us; an error message where that fails.

    backward = step - forward in eval mode, so dropout counts as backward; it is small beside the
    products. It is 0 under a plan and where no backward time was published.
    """
    from compose.target import forecast_step

    try:
        target = find_target(str(asked["gpu"]), str(asked["plan"]), bundle)
        whole_us = forecast_step(step_of(asked, target.plan), target).iteration_us
        if asked["plan"] or asked["mode"] == "infer" or not np.isfinite(asked["backward_us"]):
            return whole_us, 0.0
        ahead = forecast_step(step_of({**asked, "mode": "infer"}, target.plan), target)
    except ValueError as exc:
        return str(exc)[:120]
    return whole_us, whole_us - ahead.iteration_us


def judge(line: ModelLine, rows: Rows, seconds: float) -> Iterator[LineResult]:
    """Score a line; yields a result for each of its targets.

    The baseline is the sum of measured nodes, on the rows that have them.
    """
    if not len(rows):
        return
    measured = rows["time_us" if line.part == "step" else "backward_us"].to_numpy(dtype=float)
    guess = rows[line.part].to_numpy(dtype=float)
    if line.calibrated:
        chosen, line = _sample(rows["case"]), replace(line, name=f"{line.name} models")
        guess = guess * np.exp(np.median(np.log(measured[chosen] / guess[chosen])))
        guess, measured, rows = guess[~chosen], measured[~chosen], rows[~chosen]
    nodes = rows["nodes"].to_numpy(dtype=float)
    summed = np.isfinite(nodes)
    scores = {"itercast": errors(guess, measured)}
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


def _sample(cases: pd.Series) -> np.ndarray:
    """Mask of the rows of CALIBRATED_ON models drawn at random, at most half of all models."""
    names = np.random.default_rng(0).permutation(np.unique(cases.astype(str)))
    return np.isin(cases.astype(str), names[: min(CALIBRATED_ON, len(names) // 2)])
