"""Fits hosts to published rows: `python -m itercast.eval.public.hosts PUBLIC [FOLDER]`.

Prints each host's slowdown, and errors under the usual host with the row's source left out; writes
host files where a folder is given. Also prints the ratios of assumption host.call_launches.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from itercast.compose.capture_model import capture
from itercast.compose.host_fit import MeasuredStep, fit_host
from itercast.compose.target import find_target
from itercast.eval.compare import measured_steps
from itercast.eval.public.readers import read_iterations
from itercast.eval.public.sources.timm_models import timm_config
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import REFERENCE, HostMachine, host_yaml, usual_host
from itercast.microbench.opcall import StepCapture

ROWS = 16  # of a source that has many
COMMAND = "python -m itercast.eval.public.hosts PUBLIC"
POINTWISE: tuple[str, ...] = (
    "add",
    "mul",
    "add_",
    "mul_",
    "sub",
    "div",
    "gelu",
    "relu",
    "clamp_min",
    "silu",
    "neg",
)
POINTWISE += ("threshold_backward", "pow", "rsqrt")
CALLS = {  # ops of a trace by the entry of call_launches
    "gemm": ("mm", "addmm", "bmm"),
    "conv": ("cudnn_convolution",),
    "attention": ("_flash_attention_forward",),
    "norm": ("native_layer_norm",),
    "norm.batch": ("cudnn_batch_norm",),
    "reduction": ("sum", "mean", "_log_softmax", "_softmax"),
}
console = Console()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSource:
    """A host of published rows: the folder of its source, its machine, and its rows."""

    source: str
    cpu: str
    rows: Callable[[Path], Iterator[MeasuredStep]]


# One forward of KernelBench's small problems, written here after their descriptions. Rows of the
# 16 x 16384 inputs (128 x 4096 of losses), which later problems enlarged.
def _problems() -> Mapping[str, tuple[Callable[..., Any], tuple[tuple[int, int], ...]]]:
    import torch  # lazy: the rest needs no torch

    one, two = ((16, 16384),), ((128, 4096), (128, 4096))
    return {
        "19_ReLU.py": (torch.relu, one),
        "21_Sigmoid.py": (torch.sigmoid, one),
        "22_Tanh.py": (torch.tanh, one),
        "25_Swish.py": (lambda x: x * torch.sigmoid(x), one),
        "30_Softsign.py": (lambda x: x / (1 + torch.abs(x)), one),
        "38_L1Norm_.py": (lambda x: x / torch.sum(torch.abs(x), dim=1, keepdim=True), one),
        "94_MSELoss.py": (lambda a, b: torch.mean((a - b) ** 2), two),
        "100_HingeLoss.py": (lambda a, b: torch.mean(torch.clamp(1 - a * b, min=0)), two),
    }


def kernelbench(*parts: tuple[str, str]) -> Callable[[Path], Iterator[MeasuredStep]]:
    """Return a reader of KernelBench's times of eager PyTorch; ``parts``: (folder, GPU) pairs."""

    def rows(public: Path) -> Iterator[MeasuredStep]:
        table = pd.read_csv(public / "kernelbench" / "timing_all_history.csv.gz")
        for folder, gpu in parts:
            mine = table[table["file"] == f"{folder}/baseline_time_torch.json"]
            target = find_target(gpu, bundle=SHIPPED)
            for problem, (function, shapes) in _problems().items():
                times_ms = mine.loc[mine["problem"] == problem, "mean_ms"]
                step = _forward(function, shapes)
                label = f"{folder} {problem}"
                yield MeasuredStep(
                    label=label, time_us=1e3 * times_ms.median(), step=step, target=target
                )

    return rows


def _forward(function: Callable[..., Any], shapes: Sequence[tuple[int, int]]) -> StepCapture:
    """The captured forward of a module that calls this function."""
    import torch  # lazy, as above

    class Problem(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return function(*tensors)

    return capture(Problem(), tuple(torch.rand(*shape) for shape in shapes), mode="infer")


def torchvision(folder: str) -> Callable[[Path], Iterator[MeasuredStep]]:
    """Return a reader of published inference times of small networks on an RTX 2080 Ti.

    fp16, batch 12; source: pytorch-gpu-benchmark, ``folder`` names the machine's results.
    """
    networks = {"resnet18": "resnet18", "resnet34": "resnet34", "mobilenet_v2": "mobilenetv2_100"}

    def rows(public: Path) -> Iterator[MeasuredStep]:
        table = pd.read_csv(public / "pytorch-gpu-benchmark" / "tidy.csv")
        wanted = (table["folder"] == folder) & (table["gpus"] == 1) & (table["precision"] == "half")
        table = table[wanted & (table["mode"] == "inference")].set_index("model")
        target = find_target("rtx-2080-ti", bundle=SHIPPED)
        for name, timm in networks.items():
            step = _configured(timm_config(timm, 224), batch=12, dtype="fp16", mode="infer")
            time_us = 1e3 * float(table["median_ms"][name])
            yield MeasuredStep(label=f"{folder} {name}", time_us=time_us, step=step, target=target)

    return rows


def imported(
    folder: str, choose: Callable[[pd.DataFrame], Any]
) -> Callable[[Path], Iterator[MeasuredStep]]:
    """Some of the iterations of a source, as its importer states them."""

    def rows(public: Path) -> Iterator[MeasuredStep]:
        table = read_iterations(public, folder)
        if table is None:
            raise ValueError(f"{str(public)!r} has no folder {folder}")
        table = table[choose(table)].sort_values(["plan", "time_us"]).assign(family="iteration")
        yield from measured_steps(table.iloc[:: max(1, len(table) // ROWS)], SHIPPED)

    return rows


def _configured(config: str, **how: Any) -> StepCapture:
    """The captured step of a Hugging Face configuration."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(config)
        return capture(path, **how)


MODAL: tuple[tuple[str, str], ...] = (
    ("A100-80GB_modal", "a100-sxm-80gb"),
    ("A100_modal", "a100-sxm-40gb"),
    ("L4_modal", "l4"),
    ("T4_modal", "t4"),
)
HOSTS: Mapping[str, HostSource] = {
    "modal": HostSource(
        source="kernelbench", cpu="cloud instances of Modal, 2025", rows=kernelbench(*MODAL)
    ),
    "together-h100": HostSource(
        source="kernelbench",
        cpu="H100 nodes of Together AI, 2025",
        rows=kernelbench(("H100_together", "h100-sxm-80gb")),
    ),
    "one-rtx-2080-ti": HostSource(
        source="pytorch-gpu-benchmark",
        cpu="not stated, one RTX 2080 Ti",
        rows=torchvision("results/2080TI"),
    ),
    "four-rtx-2080-ti": HostSource(
        source="pytorch-gpu-benchmark",
        cpu="not stated, four RTX 2080 Ti",
        rows=torchvision("results/2080ti(2)"),
    ),
    "dgx-a100": HostSource(
        source="megatron-lm",
        cpu="two AMD EPYC 7742, DGX A100, under the tests of Megatron-LM",
        rows=imported("megatron-lm", lambda table: table["d_model"] < 1024),
    ),
    "vtrain-a100": HostSource(
        source="vtrain",
        cpu="not stated, four A100",
        rows=imported("vtrain", lambda table: table["plan"].str.contains("tp=")),
    ),
}


def call_launches(public: Path) -> dict[str, float]:
    """Host time of a call over that of a pointwise op in the same trace, the median of traces."""
    files = sorted((public / "kineto-traces").glob("ops_*.csv.gz"))
    table = pd.concat([pd.read_csv(file) for file in files])
    table = table[(table["host_us_median"] > 0) & (table["kernels"] >= 1)]
    table["op"] = table["op"].str.removeprefix("aten::")
    found: dict[str, list[float]] = {name: [] for name in CALLS}
    for _, trace in table.groupby("trace"):
        usual_us = trace.loc[trace["op"].isin(POINTWISE), "host_us_median"].median()
        by_op = trace.groupby("op")["host_us_median"].median() / usual_us
        for name, ops in CALLS.items():
            found[name] += [float(by_op[op]) for op in ops if op in by_op]
    return {name: round(float(np.median(ratios)), 1) for name, ratios in found.items()}


def main() -> None:
    """Read the command line and fit; bad input is one line and exit code 2."""
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m itercast.eval.public.hosts", description=about)
    parser.add_argument("public", type=Path, help="folder of published measurements")
    parser.add_argument("out", type=Path, nargs="?", help="folder for host files")
    asked = parser.parse_args()
    if not asked.public.is_dir():
        parser.error(f"public {str(asked.public)!r}: no such folder")
    fit_all(asked.public, asked.out)


def fit_all(public: Path, out: Path | None = None) -> None:
    """Fit every host, print errors before and after, and write host files to a folder."""
    console.print(f"host time of a call over a pointwise one: {call_launches(public)}")
    rows, hosts = dict[str, list[MeasuredStep]](), dict[str, HostMachine]()
    for name, source in HOSTS.items():
        rows[name] = list(source.rows(public))
        what = f"{COMMAND}, {len(rows[name])} rows of {source.source}; launches as slow as events"
        facts = {"source": what, "cpu": source.cpu, "fitted_on": source.source}
        hosts[name] = fit_host(name, rows[name], **facts)
        if out is not None:
            (out / f"{name}.yaml").write_text(host_yaml(hosts[name]))
    for name, source in HOSTS.items():
        console.print(f"{name}: {len(rows[name])} rows of {source.source}, median error and bias")
        usual = usual_host([h for h in hosts.values() if source.source not in h.sources])
        for kind, host in {
            "reference": REFERENCE,
            "left out": usual,
            "fitted": hosts[name],
        }.items():
            pct = 100 * np.expm1([row.log_error(host) for row in rows[name]])
            median, bias = np.median(np.abs(pct)), np.median(pct)
            slow = f"{kind}, slowdown {host.slowdown:.2f}"
            console.print(f"  {slow}: {median:.0f} %, {bias:+.0f} %")


if __name__ == "__main__":
    main()
