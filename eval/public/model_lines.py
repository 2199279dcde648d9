"""Lines of the public benchmark about whole iterations: their rows, what is compared, targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from itercast.eval.public.benchmark import Rows

EXAMPLES = {
    "DLRM": ("dlrm-criteo",),
    "Transformer-XL base": ("transformer-xl-base",),
    "Transformer-XL large": ("transformer-xl-large",),
    "BERT": ("BERT", "bert_base_squad", "bert_large_squad"),
    "ResNet-50": ("resnet50", "resnet50v1.5"),
    "SSD300": ("ssd300",),
}
SYNCHRONISED = ("BERT", "ResNet-50", "SSD300")
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
    known_best: str
    choose: Callable[[Rows], np.ndarray]
    targets: Mapping[str, float | None]
    folder: str = "iterations"
    part: str = "step"
    calibrated: bool = False
    fits_hosts: Callable[[Rows], np.ndarray] | None = None


def labels(gpu: str, *modes: str) -> Callable[[Rows], np.ndarray]:
    """Returns a filter: NeuSight's models on one GPU, not compiled, without a plan."""

    def choose(rows: Rows) -> np.ndarray:
        mine = (rows["source"] == "neusight") & (rows["gpu"] == gpu) & rows["mode"].isin(modes)
        return np.asarray(mine & ~rows["compile"].astype(bool) & (rows["plan"] == ""))

    return choose


def of(*sources: str) -> Callable[[Rows], np.ndarray]:
    """Returns a filter that keeps the rows of these published sources."""
    return lambda rows: np.asarray(rows["source"].isin(sources))


def timm_in_transformers(rows: Rows) -> np.ndarray:
    """Selects timm's models that transformers can build as well."""
    stated = rows["hf_config"].str.contains('"architectures"', na=False)
    return np.asarray(of("timm")(rows) & stated)


def timm_alone(rows: Rows) -> np.ndarray:
    """Selects DRAWN of the timm models that transformers cannot build, at random.

    Forecasting them needs timm installed.
    """
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
    return [
        *neusight_lines(),
        *cluster_lines(),
        *timm_lines(),
        *h100_lines(),
        vtrain_line(),
        *golden_lines(),
        *mlperf_lines(),
        *kernelbench_lines(),
        lora_line(),
        *layer_lines(),
    ]


def neusight_lines() -> list[ModelLine]:
    """Lines about NeuSight's measured models, in fp32."""
    a100 = labels("a100-pcie-80gb", "train")
    nodes = "NeuSight 7.6; nodes summed 6.5"
    return [
        ModelLine(
            name="NeuSight labels, A100-80GB train",
            known_best=nodes,
            choose=a100,
            folder="NeuSight",
            targets={"mape_pct": 7.0},
        ),
        ModelLine(
            name="NeuSight labels, A100-80GB train",
            known_best=nodes,
            choose=a100,
            folder="NeuSight",
            targets={"mape_pct": 5.0},
            part="backward",
        ),
        ModelLine(
            name="NeuSight labels, V100",
            known_best="NeuSight 5.9-8.9; nodes summed 7.6",
            choose=labels("v100-pcie-32gb", "train", "infer"),
            folder="NeuSight",
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


def h100_lines() -> list[ModelLine]:
    """Lines about the published iterations on H100: MPT under FSDP, and Lambda's networks."""
    mpt, networks = of("llm-foundry"), of("lambda-deeplearning-benchmark")
    choices: dict[str, Callable[[Rows], np.ndarray]] = {
        "H100 iterations": lambda rows: np.ones(len(rows), dtype=bool),
        "H100 iterations: MPT under FSDP": mpt,
        "H100 iterations: networks on one GPU": lambda rows: networks(rows) & alone(rows),
        "H100 iterations: networks under DDP": lambda rows: networks(rows) & ~alone(rows),
    }
    return [
        ModelLine(
            name=name,
            known_best="none published",
            choose=choose,
            folder="iterations-h100",
            targets={"mape_pct": 10.0, "bias_pct": 4.0},
        )
        for name, choose in choices.items()
    ]


def alone(rows: Rows) -> np.ndarray:
    """Selects the runs on a single GPU."""
    return np.asarray(rows["world_size"] == 1)


def vtrain_line() -> ModelLine:
    """The line about vTrain's iterations of GPT on 2 and 4 A100 under tp, dp and pp."""
    return ModelLine(
        name="vTrain, GPT on 2 and 4 A100",
        known_best="vTrain 8.37 on 8 A100",
        choose=lambda rows: np.ones(len(rows), dtype=bool),
        folder="vtrain",
        targets={"mape_pct": 8.0, "bias_pct": 3.0},
    )


def golden_lines() -> list[ModelLine]:
    """Lines about Megatron-LM's golden values: wide models, launch-bound ones, peak memory."""
    choices = {
        "models >= 1024 wide": (lambda rows: np.asarray(rows["d_model"] >= WIDE), 12.0),
        "launch-bound models": (lambda rows: np.asarray(rows["d_model"] < WIDE), 25.0),
    }
    steps = [
        ModelLine(
            name=f"Megatron golden values, {which}",
            known_best="none published",
            choose=choose,
            folder="megatron-lm",
            targets={"median_ape_pct": target},
        )
        for which, (choose, target) in choices.items()
    ]
    with_host = [
        replace(
            line,
            name=f"{line.name}, host from {CALIBRATED_ON} steps",
            choose=beside(line.choose, launch_bound_sample),
            fits_hosts=launch_bound_sample,
        )
        for line in steps
    ]
    memory = ModelLine(
        name="Megatron golden values, peak memory",
        known_best="none published",
        choose=lambda rows: np.asarray(rows["memory_bytes"].notna()),
        folder="megatron-lm",
        targets={"mape_pct": 8.0},
        part="memory",
    )
    return [*steps, *with_host, memory]


def beside(*chosen: Callable[[Rows], np.ndarray]) -> Callable[[Rows], np.ndarray]:
    """Returns a filter that keeps what any of these filters keeps."""
    return lambda rows: np.asarray(np.any([choose(rows) for choose in chosen], axis=0))


def launch_bound_sample(rows: Rows) -> np.ndarray:
    """Selects one in five launch-bound tests of Megatron-LM by its name, with all of its runs."""
    drawn = [crc32(name.encode()) % 5 == 0 for name in rows["case"].astype(str)]
    return np.asarray(np.array(drawn, dtype=bool) & (rows["d_model"] < WIDE).to_numpy())


def mlperf_lines() -> list[ModelLine]:
    """Lines about MLPerf Training: dense models, by benchmark too, and recommenders."""

    def cases(*names: str) -> Callable[[Rows], np.ndarray]:
        return lambda rows: np.asarray(rows["case"].isin(names))

    choices = {"": cases("bert", "resnet"), ", BERT-large": cases("bert")}
    choices[", ResNet-50"] = cases("resnet")
    recommenders = ModelLine(
        name="DLRM, MLPerf",
        known_best="none published",
        choose=cases("dlrm-mlperf", "dlrm-dcnv2"),
        folder="mlperf-training",
        targets={"mape_pct": None, "median_ape_pct": None, "bias_pct": None},
    )
    lines = [
        ModelLine(
            name=f"MLPerf Training{which}",
            known_best="none published",
            choose=choose,
            folder="mlperf-training",
            targets={"mape_pct": 12.0},
        )
        for which, choose in choices.items()
    ]
    return [*lines, recommenders]


def lora_line() -> ModelLine:
    """The line about LoRA on Llama-3.2-3B on an L40S, at the mean length of its samples."""
    return ModelLine(
        name="LoRA on Llama-3.2-3B, L40S",
        known_best="none published",
        choose=of("peft"),
        folder="peft",
        targets={"mape_pct": None, "bias_pct": None},
    )


def kernelbench_lines() -> list[ModelLine]:
    """Lines about one forward of KernelBench's modules, by how they are launched.

    Half of those that one machine ran under CUDA graphs measure its host alone: a line takes the
    host from what the same machine ran eagerly.
    """

    def launched(engine: str) -> Callable[[Rows], np.ndarray]:
        return lambda rows: np.asarray(rows["engine"] == engine)

    engines = {"eager": ("eager", 15.0), "CUDA graphs": ("eager+graph", 12.0)}
    engines |= {"compiled": ("compile", 0), "compiled, CUDA graphs": ("compile+graph", 0)}
    lines = [
        ModelLine(
            name=f"KernelBench level 1, {name}",
            known_best="none published",
            choose=launched(engine),
            folder="kernelbench",
            targets={"median_ape_pct": target or None},
        )
        for name, (engine, target) in engines.items()
    ]
    with_host = replace(
        lines[1], name=f"{lines[1].name}, host from eager calls", choose=beside_eager_calls
    )
    return [*lines, replace(with_host, fits_hosts=launched("eager"))]


def beside_eager_calls(rows: Rows) -> np.ndarray:
    """Selects what machines ran under torch.compile's CUDA graphs, and what these ran eagerly."""
    graphs = rows["engine"] == "eager+graph"
    machines = set(rows.loc[graphs, "machine"])
    return np.asarray(graphs | (rows["engine"].eq("eager") & rows["machine"].isin(machines)))


def layer_lines() -> list[ModelLine]:
    """Lines about single layers, each priced as the torch ops it consists of."""

    def layers(direction: str, engine: str) -> Callable[[Rows], np.ndarray]:
        def choose(rows: Rows) -> np.ndarray:
            mine = ((rows["direction"] == direction) & (rows["engine"] == engine)).to_numpy()
            drawn = np.random.default_rng(0).permutation(np.flatnonzero(mine))[:DRAWN_LAYERS]
            return np.isin(np.arange(len(rows)), drawn)

        return choose

    kinds = [
        ("Layers of LLMServingSim", "llmservingsim", "step", "eager"),
        ("Layers of Liger, eager", "liger-kernel", "step", "eager"),
        ("Layers of Liger, eager", "liger-kernel", "backward", "eager"),
        ("Layers of Liger, compiled", "liger-kernel", "step", "compile"),
    ]
    return [
        ModelLine(
            name=name,
            known_best="none published",
            choose=layers(direction, engine),
            folder=folder,
            targets={"median_ape_pct": None, "bias_pct": None},
            part=direction,
        )
        for name, folder, direction, engine in kinds
    ]
