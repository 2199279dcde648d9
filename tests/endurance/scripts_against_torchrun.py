"""Real scripts under torchrun over gloo, two processes, beside ``itercast run`` of the same.

``python tests/endurance/scripts_against_torchrun.py --bundle BUNDLE [--only NAME]``. Scripts whose
packages are missing are skipped. Each runs twice; the time of a step is the median of those from
one optimizer step to the next. Prints a table; the retest is one run against the other.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import typer

HERE = Path(__file__).parent / "scripts"
FEATURES = {  # of parallel_features.py; its context parallelism has no CPU kernels in torch
    "DDP": "ddp",
    "DDP, bf16 autocast": "ddp_bf16",
    "DDP, GRU and convolutions": "ddp_gru_and_convolutions",
    "DDP, four micro-batches": "ddp_no_sync",
    "ZeroRedundancyOptimizer": "zero_redundancy_optimizer",
    "FSDP2 of each block": "fsdp2_fp32",
    "FSDP2, compiled blocks, bf16": "fsdp2_bf16_compiled",
    "HSDP": "hsdp",
    "tensor parallel": "tensor_parallel_blocks",
    "pipeline, 1F1B": "pipeline_1f1b",
    "experts over all_to_all": "experts_over_all_to_all",
}
GPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
SIZES = {"vocabulary": 2048, "length": 96, "width": 192, "layers": 4, "heads": 6, "batch": 4}
SMALL = [f"--{name}={size}" for name, size in SIZES.items()]
SCRIPTS: dict[str, tuple[Path, list[str], str]] = {  # script, its arguments, a package it needs
    "examples/train_gpt.py": (GPT, SMALL, "torch"),
    "FSDP2": (HERE / "fsdp_gpt.py", [], "torch"),
    "HF Trainer": (HERE / "hf_trainer.py", [], "accelerate"),
    "Lightning": (HERE / "lightning_fit.py", [], "lightning"),
    **{
        name: (Path(__file__).with_name("parallel_features.py"), [feature], "torch")
        for name, feature in FEATURES.items()
    },
}
RANKS, STEPS, WARM_UP = 2, 30, 5


def measured_us(script: Path, arguments: list[str], folder: Path) -> float:
    """Median time of a step under torchrun."""
    out = folder / "steps.json"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    clocked = [HERE / "clocked.py", out, STEPS, script, *arguments, f"--steps={2 * STEPS}"]
    command = [sys.executable, *launch, *map(str, clocked)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if not out.is_file():
        raise RuntimeError(done.stderr[-2000:])
    times = json.loads(out.read_text())
    out.unlink()
    return statistics.median(times[WARM_UP:])


def forecast_us(script: Path, arguments: list[str], bundle: str) -> tuple[float, float]:
    """What ``itercast run`` says, and the share of it that no model covers."""
    options = ["--gpu=cpu", f"--gpus={RANKS}", "--json", *[f"--bundle={bundle}"] * bool(bundle)]
    command = [sys.executable, "-m", "itercast", "run", *options, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout)
    return found["iteration_us"], found["unmodelled_frac"]


def main(bundle: str = "", only: str = "") -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (script, arguments, package) in SCRIPTS.items():
            if only not in name or find_spec(package) is None:
                continue
            forecast, no_model = forecast_us(script, arguments, bundle)
            first, again = (measured_us(script, arguments, Path(folder)) for _ in range(2))
            real = (first * again) ** 0.5
            print(
                f"{name}: {real / 1e3:.2f} ms, forecast {forecast / 1e3:.2f} ms "
                f"{100 * (forecast / real - 1):+.1f} %, retest {100 * (again / first - 1):+.1f} %, "
                f"no model {100 * no_model:.1f} %",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
