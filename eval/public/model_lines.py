"""Lines of the public benchmark about whole iterations: their rows, what is compared, targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np

from itercast.eval.public.benchmark import Rows

Choose = Callable[[Rows], np.ndarray]
CALIBRATED_ON = 32
WIDE = 1024  # hidden size from which Megatron-LM's tests are not launch-bound
DRAWN = 96  # models drawn at random of those that only timm can build
DRAWN_LAYERS = 300  # layers of a line, drawn at random


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLine:
    """One line of the benchmark about whole iterations: which rows, and targets by metric.

    ``folder`` holds the published rows that ``choose`` selects from. ``part`` is what is compared:
    "step", "backward" or "memory". A target of None: the metric is reported without one.
    ``calibrated``: forecasts are scaled by the median ratio of CALIBRATED_ON models.
    ``fits_hosts``: selects rows that are not judged. On the fastest run of each of
    CALIBRATED_ON cases, those that a machine ran fastest, its host is fitted.
    """

    name: str
    choose: Choose
    targets: Mapping[str, float | None]
    known_best: str = "none published"
    folder: str = "iterations"
    part: str = "step"
    calibrated: bool = False
    fits_hosts: Choose | None = None


def where(**wanted: Any) -> Choose:
    """Returns a filter: rows whose columns are one of these values, or pass these tests."""

    def choose(rows: Rows) -> np.ndarray:
        kept = np.ones(len(rows), dtype=bool)
        for name, value in wanted.items():
            values = value if isinstance(value, tuple) else (value,)
            passed = value(rows[name]) if callable(value) else rows[name].isin(values)
            kept &= np.asarray(passed, dtype=bool)
        return kept

    return choose


def several(column: Rows) -> Rows:
    """Whether runs are on more than one GPU, by their number."""
    return column > 1


def drawn(choose: Choose, column: str, most: int) -> Choose:
    """Returns a filter: of the rows of a filter those of ``most`` values of a column, at random."""

    def some(rows: Rows) -> np.ndarray:
        mine = rows[column].where(choose(rows), "").astype(str)
        names = np.random.default_rng(0).permutation(sorted(set(mine) - {""}))
        return np.asarray(mine.isin(names[:most]))

    return some


def launch_bound_sample(rows: Rows) -> np.ndarray:
    """Selects one in five launch-bound tests of Megatron-LM by its name, with all of its runs."""
    some = [crc32(name.encode()) % 5 == 0 for name in rows["case"].astype(str)]
    return np.asarray(np.array(some, dtype=bool) & (rows["d_model"] < WIDE).to_numpy())


def beside_eager_calls(rows: Rows) -> np.ndarray:
    """Selects what machines ran under torch.compile's CUDA graphs, and what these ran eagerly."""
    graphs = rows["engine"] == "eager+graph"
    machines = set(rows.loc[graphs, "machine"])
    return np.asarray(graphs | (rows["engine"].eq("eager") & rows["machine"].isin(machines)))


def with_host(line: ModelLine, name: str, fits: Choose, choose: Choose) -> ModelLine:
    """The line with its machine's host fitted on rows that are not judged."""
    return replace(line, name=f"{line.name}, host from {name}", choose=choose, fits_hosts=fits)


def model_lines() -> list[ModelLine]:
    """All lines about whole models, in the order of the table."""
    return [
        *neusight_lines(),
        *cluster_lines(),
        *timm_lines(),
        *h100_lines(),
        ModelLine(
            name="vTrain, GPT on 2 and 4 A100",
            known_best="vTrain 8.37 on 8 A100",
            choose=where(),
            folder="vtrain",
            targets={"mape_pct": 8.0, "bias_pct": 3.0},
        ),
        *golden_lines(),
        *mlperf_lines(),
        *kernelbench_lines(),
        ModelLine(
            name="LoRA on Llama-3.2-3B, L40S",
            choose=where(source="peft"),
            folder="peft",
            targets={"mape_pct": None, "bias_pct": None},
        ),
        *layer_lines(),
    ]


def neusight_lines() -> list[ModelLine]:
    """Lines about NeuSight's measured models, in fp32, not compiled and without a plan."""

    def line(gpu: str, modes: tuple[str, ...], **facts: Any) -> ModelLine:
        plain: dict[str, Any] = {"compile": lambda column: ~column.astype(bool), "plan": ""}
        rows = where(source="neusight", gpu=gpu, mode=modes, **plain)
        return ModelLine(choose=rows, folder="NeuSight", **facts)

    a100 = {"name": "NeuSight labels, A100-80GB train"}
    a100["known_best"] = "NeuSight 7.6; nodes summed 6.5"
    v100 = {"name": "NeuSight labels, V100"}
    v100["known_best"] = "NeuSight 5.9-8.9; nodes summed 7.6"
    return [
        line("a100-pcie-80gb", ("train",), targets={"mape_pct": 7.0}, **a100),
        line("a100-pcie-80gb", ("train",), targets={"mape_pct": 5.0}, part="backward", **a100),
        line("v100-pcie-32gb", ("train", "infer"), targets={"mape_pct": 5.0}, **v100),
    ]


def lines_of(
    choices: Mapping[str, Choose], targets: Mapping[str, float | None], folder: str = "iterations"
) -> list[ModelLine]:
    """A line for each name and filter, with the same targets."""
    return [
        ModelLine(name=name, choose=choose, targets=targets, folder=folder)
        for name, choose in choices.items()
    ]


def cluster_lines() -> list[ModelLine]:
    """Lines about MPT under FSDP, Megatron-Core, and NVIDIA's DeepLearningExamples."""
    bert = ("BERT", "bert_base_squad", "bert_large_squad")
    resnet = ("resnet50", "resnet50v1.5")
    examples = {
        "DLRM": "dlrm-criteo",
        "Transformer-XL base": "transformer-xl-base",
        "Transformer-XL large": "transformer-xl-large",
        "BERT": bert,
        "ResNet-50": resnet,
        "SSD300": "ssd300",
    }
    core = ("nemo-launcher", "nemo-docs", "megatron-bridge")
    theirs = ("lambda-deeplearning-benchmark", "nvidia-dle")
    spread = r"(?:^|,)ep="
    choices = {
        "Megatron-Core, dense models in fp8": where(
            source=core, plan=lambda column: ~column.str.contains(spread)
        ),
        "Megatron-Core, mixtures of experts": where(
            source=core, plan=lambda column: column.str.contains(spread)
        ),
    }
    for name, cases in examples.items():
        choices[f"{name} on one GPU"] = where(
            source=theirs, case=cases, world_size=lambda column: ~several(column)
        )
    for name in ("BERT", "ResNet-50", "SSD300"):
        choices[f"{name} under DDP"] = where(source=theirs, case=examples[name], world_size=several)
    mpt = {"MPT under FSDP on A100": where(source="llm-foundry")}
    return [
        *lines_of(mpt, {"geomean_ape_pct": 8.0, "mape_pct": 12.0}),
        *lines_of(choices, {"geomean_ape_pct": None, "mape_pct": None}),
    ]


def timm_lines() -> list[ModelLine]:
    """Lines about timm's benchmark on an RTX 3090, calibrated on some of its models.

    Of the models that only timm can build, which must be installed then, some are drawn.
    """

    def stated(column: Any) -> Any:
        return column.str.contains('"architectures"', na=False).astype(bool)

    alone = where(source="timm", hf_config=lambda column: ~stated(column))
    choices = {
        "timm": where(source="timm", hf_config=stated),
        "timm (by itself)": drawn(alone, "case", DRAWN),
    }
    named = {f"{k} on RTX 3090, calibrated on {CALIBRATED_ON}": v for k, v in choices.items()}
    lines = lines_of(named, {"kendall_tau": 0.85, "mape_pct": 15.0})
    return [replace(line, calibrated=True) for line in lines]


def h100_lines() -> list[ModelLine]:
    """Lines about the published iterations on H100: MPT under FSDP, and Lambda's networks."""
    networks = "lambda-deeplearning-benchmark"
    choices = {
        "H100 iterations": where(),
        "H100 iterations: MPT under FSDP": where(source="llm-foundry"),
        "H100 iterations: networks on one GPU": where(source=networks, world_size=1),
        "H100 iterations: networks under DDP": where(source=networks, world_size=several),
    }
    return lines_of(choices, {"mape_pct": 10.0, "bias_pct": 4.0}, "iterations-h100")


def golden_lines() -> list[ModelLine]:
    """Lines about Megatron-LM's golden values: wide models, launch-bound ones, peak memory."""
    wide = where(d_model=lambda column: column >= WIDE)
    narrow = where(d_model=lambda column: column < WIDE)
    name, folder = "Megatron golden values", "megatron-lm"
    steps = [
        *lines_of({f"{name}, models >= 1024 wide": wide}, {"median_ape_pct": 12.0}, folder),
        *lines_of({f"{name}, launch-bound models": narrow}, {"median_ape_pct": 25.0}, folder),
    ]
    sample, both = launch_bound_sample, (beside(wide, launch_bound_sample), narrow)
    hosts = [
        with_host(line, f"{CALIBRATED_ON} steps", sample, choose)
        for line, choose in zip(steps, both, strict=True)
    ]
    stated = where(memory_bytes=lambda column: column.notna())
    (memory,) = lines_of({f"{name}, peak memory": stated}, {"mape_pct": 8.0}, folder)
    return [*steps, *hosts, replace(memory, part="memory")]


def beside(*chosen: Choose) -> Choose:
    """Returns a filter that keeps what any of these filters keeps."""
    return lambda rows: np.asarray(np.any([choose(rows) for choose in chosen], axis=0))


def mlperf_lines() -> list[ModelLine]:
    """Lines about MLPerf Training: dense models, by benchmark too, and recommenders."""
    dense = {
        "MLPerf Training": where(case=("bert", "resnet")),
        "MLPerf Training, BERT-large": where(case="bert"),
        "MLPerf Training, ResNet-50": where(case="resnet"),
    }
    clicks = {"DLRM, MLPerf": where(case=("dlrm-mlperf", "dlrm-dcnv2"))}
    reported = {"mape_pct": None, "median_ape_pct": None, "bias_pct": None}
    return [
        *lines_of(dense, {"mape_pct": 12.0}, "mlperf-training"),
        *lines_of(clicks, reported, "mlperf-training"),
    ]


def kernelbench_lines() -> list[ModelLine]:
    """Lines about one forward of KernelBench's modules, by how they are launched.

    Half of those that one machine ran under CUDA graphs measure its host alone: a line takes the
    host from what the same machine ran eagerly.
    """
    engines: Sequence[tuple[str, str, float | None]] = (
        ("eager", "eager", 15.0),
        ("CUDA graphs", "eager+graph", 12.0),
        ("compiled", "compile", None),
        ("compiled, CUDA graphs", "compile+graph", None),
    )
    lines = [
        ModelLine(
            name=f"KernelBench level 1, {name}",
            choose=where(engine=engine),
            folder="kernelbench",
            targets={"median_ape_pct": target},
        )
        for name, engine, target in engines
    ]
    eager = where(engine="eager")
    return [*lines, with_host(lines[1], "eager calls", eager, beside_eager_calls)]


def layer_lines() -> list[ModelLine]:
    """Lines about single layers, each priced as the torch ops it consists of."""
    kinds = (
        ("Layers of LLMServingSim", "llmservingsim", "step", "eager"),
        ("Layers of Liger, eager", "liger-kernel", "step", "eager"),
        ("Layers of Liger, eager", "liger-kernel", "backward", "eager"),
        ("Layers of Liger, compiled", "liger-kernel", "step", "compile"),
    )
    return [
        ModelLine(
            name=name,
            choose=drawn(where(direction=part, engine=engine), "origin", DRAWN_LAYERS),
            folder=folder,
            targets={"median_ape_pct": None, "bias_pct": None},
            part=part,
        )
        for name, folder, part, engine in kinds
    ]
