"""`itercast predict`: what it prints, writes and imports, and what a new user meets."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typed_commands import typed
from typer.testing import CliRunner

from itercast.capture.base.cache_folder import cache_folder
from itercast.capture.opcall import OpCall
from itercast.command_line import app
from itercast.compose.capture_model import capture
from itercast.compose.predict import predict
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.target import find_target
from itercast.learners.bundle import SHIPPED_CPU, Bundle
from itercast.learners.known_bundles import LOCAL
from itercast.learners.train import TrainSettings, train_family
from itercast.microbench.hardware.machine import cpu_name
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import families, find_family
from itercast.microbench.sweep.captured_points import write_points

ROOT = Path(__file__).parent.parent.parent
KEYS = {
    *("case", "gpu", "plan", "bundle", "iteration_us", "iteration_us_p10", "iteration_us_p90"),
    *("host_us", "compute_us", "comm_us", "exposed_comm_us", "idle_us", "memory_bytes"),
    *("samples_per_s", "tokens_per_s", "mfu_frac", "unmodelled_frac", "assumed_frac"),
    *("by_family_us", "assumed_by_us"),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that knows products only, from made-up times."""
    folder = tmp_path_factory.mktemp("bundle") / "b"
    gpu = Gpu(name=cpu_name(), kind="cpu", sm_count=2, peak_flops_per_s={"fp32": 1e11})
    sweep = families()["gemm"].sweep()
    points = [next(sweep) for _ in range(60)]
    rows = pd.DataFrame([{k: getattr(p, k) for k in p.__slots__} for p in points])
    rows = rows.assign(gpu=gpu.name, threads=2, cache="warm", time_us=np.arange(60) + 10.0)
    _, model = train_family(rows, families()["gemm"], {gpu.name: gpu}, {}, TrainSettings(roots=[]))
    Bundle(models={"gemm": model}, gpus={gpu.name: gpu}).save(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of this file run, and keep their captures."""
    return tmp_path_factory.mktemp("here")


def asked(folder: Path, *words: str, rc: int = 0) -> Any:
    """What the command prints there: an object where it is asked for JSON, else its errors."""
    with contextlib.chdir(folder):
        done = typed("predict", *words, rc=rc)
    return json.loads(done.stdout) if rc == 0 and "--json" in words else done.stderr


def predict_in_a_process(folder: Path, *words: str) -> tuple[Any, set[str]]:
    """The object that a process of its own prints, and the names of all modules it imported."""
    code = "import sys; from itercast.command_line import app; sys.argv[0] = 'itercast'\n"
    code += "try: app()\nfinally: print(*sorted(sys.modules), file=open('modules', 'w'))"
    done = subprocess.run(
        [sys.executable, "-c", code, "predict", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), set((folder / "modules").read_text().split())


def test_a_cached_forecast_imports_neither_torch_nor_models(folder: Path) -> None:
    words = ("mlp-s", "--gpu", "h100-sxm-80gb", "--json")
    first, loaded = predict_in_a_process(folder, *words)
    assert loaded >= {"torch", "pandas", "xgboost"}
    assert set(first) >= KEYS
    assert first["iteration_us"] == pytest.approx(
        first["compute_us"] + first["exposed_comm_us"] + first["idle_us"]
    )
    again, loaded = predict_in_a_process(folder, *words)
    assert again == first
    assert not loaded & {
        "torch",
        "transformers",
        "pandas",
        "pyarrow",
        "xgboost",
        "scipy",
        "optuna",
        "mlflow",
        "pandera",
        "matplotlib",
        "sklearn",
        "asyncio",
    }


def test_importing_the_api_imports_nothing_slow() -> None:
    code = "import sys, itercast.api as api; print(*sys.modules); api.predict; import sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & {"torch", "pandas", "numpy", "xgboost", "sklearn"}


def test_a_trace_has_every_op_and_strict_names_what_has_no_model(
    folder: Path, bundle: Path
) -> None:
    words = ("mlp-s", "--bundle", str(bundle))
    asked(folder, *words, "--trace", "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [e["name"] for e in events]
    assert names.count("aten.addmm.default") == 3  # forward of three layers
    assert {e["ph"] for e in events} == {"X", "M", "C"}  # no flows: a CPU has no launches
    refused = asked(folder, *words, "--strict", rc=1)
    assert "has no learned model: " in refused
    assert "aten.relu.default" in refused
    assert "aten.mm.default" not in refused


def test_rows_of_a_dataset_root_correct_a_bundle(
    folder: Path, bundle: Path, mlflow_store: str
) -> None:
    before = asked(folder, "mlp-s", "--bundle", str(bundle), "--json")
    products = {p for f, p in map(find_family, capture("mlp-s").calls) if f and f.name == "gemm"}
    write_points(folder / "ops.json", {"gemm": [*products]})
    with contextlib.chdir(folder):
        typed("collect", "--points=ops.json", "--out=own", "--budget=6s")
        typed("calibrate", "own", "--bundle", bundle, "--out", "calibrated")
        refused = typed("calibrate", str(folder), "--out", "other", rc=2).stderr
    assert "no rows of a dataset root in this folder" in refused
    after = asked(folder, "mlp-s", "--bundle", "calibrated", "--json")
    assert after["by_family_us"]["gemm"] != before["by_family_us"]["gemm"]


def test_assumptions_are_explained_by_time_with_their_sources(folder: Path, bundle: Path) -> None:
    """The bundle knows products only: the host and all other ops are assumed."""
    words = ("mlp-s", "--bundle", str(bundle), "--json", "--explain-assumptions")
    found = asked(folder, *words)
    parts = found["assumptions"]
    times_us = [part["time_us"] for part in parts]
    assert times_us == sorted(times_us, reverse=True)
    assert sum(times_us) == pytest.approx(found["assumed_frac"] * found["iteration_us"])
    names = {part["name"] for part in parts}
    assert {"host.event_us.module_call", "price_book.roofline_overhead_us"} <= names
    assert all(part["source"] and part["value"] for part in parts)


def test_a_function_of_the_users_own(folder: Path, bundle: Path) -> None:
    (folder / "mine.py").write_text(
        "import torch\n"
        "def model(batch):\n"
        "    net = torch.nn.Linear(8, 4)\n"
        "    return net, torch.randn(batch, 8), lambda y: y.sum()\n"
    )
    words = ("--model", "mine:model", "--bundle", str(bundle), "--json")
    found = asked(folder, *words, "--batch", "6")
    assert found["case"] == "mine:model"
    assert found["samples_per_s"] == pytest.approx(6e6 / found["iteration_us"])


def test_replicas_of_a_graph_network_have_graphs_of_their_own(folder: Path) -> None:
    """A full graph is not cut among them: one line says what is forecast."""
    (folder / "graph.py").write_text(
        "import torch\n"
        "class Sum(torch.nn.Linear):\n"
        "    def forward(self, x, matrix):\n"
        "        return torch.sparse.mm(matrix, super().forward(x))\n"
        "def model():\n"
        "    inputs = torch.ones(30, 8), torch.eye(30).to_sparse_csr()\n"
        "    return Sum(8, 4), inputs, lambda y: y.sum()\n"
    )
    words = ("--model", "graph:model", "--gpu", "a100-sxm-80gb", "--json")
    told = "each of 2 replicas has a sparse matrix of its own, of 30 x 30 with 30 values; the plan"
    (note,) = asked(folder, *words, "--plan", "dp=2")["notes"]
    assert note.startswith(told)
    assert asked(folder, *words)["notes"] == []


def test_a_first_look_at_a_cpu_takes_the_bundle_that_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without bundles; the machine it forecasts is named."""
    monkeypatch.chdir(tmp_path)
    found = find_target("cpu")
    assert found.bundle_name.endswith("shipped-cpu")
    assert found.gpu.kind == "cpu" and found.gpu.name in found.bundle.gpus


def test_a_local_bundle_of_an_older_version_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundles/local").mkdir(parents=True)
    (tmp_path / "bundles/local/bundle.json").write_text('{"schema_version": 1}')
    assert find_target("h100-sxm-80gb").bundle_name.endswith("shipped")
    assert "local bundle ignored: bundle 'bundles/local': schema version 1" in caplog.text


def test_the_local_bundle_that_was_written_last_forecasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training after the demo, then a demo after the training."""
    monkeypatch.chdir(tmp_path)
    for folder in LOCAL:
        shutil.copytree(SHIPPED_CPU, folder)
    (gpu,) = Bundle.load(SHIPPED_CPU).gpus
    for last, other in (LOCAL, LOCAL[::-1]):
        os.utime(last / "bundle.json", (2, 2))
        os.utime(other / "bundle.json", (1, 1))
        assert find_target(gpu).bundle_name == str(last)


def test_a_forecast_says_for_which_software_it_is(folder: Path) -> None:
    """SDPA of torch 2.2 is flash 2 on Hopper, twice as slow as what today's torch takes."""
    words = ("gpt-s", "--batch", "4", "--seq", "256", "--gpu", "h100-sxm-80gb", "--dtype", "bf16")
    usual = asked(folder, *words, "--json")
    old = asked(folder, *words, "--json", "--stack", "torch-2.2.1+cu121")
    assert (usual["stack"], old["stack"]) == ("torch-2.11", "torch-2.2.1+cu121")
    attention = [found["by_family_us"]["attention"] for found in (usual, old)]
    assert attention[1] > 1.1 * attention[0]


run = CliRunner()

MODELS = """
import torch

class Talks(torch.nn.Linear):
    def forward(self, x):
        print("forward of my model")
        return super().forward(x)

class Picks(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0].sum()

def talks():
    print("built")
    return Talks(4, 2), torch.zeros(3, 4), lambda y: y.sum()

def picks():
    return Picks(4, 2), torch.zeros(3, 4), lambda y: y
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with a cache elsewhere."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(folder)
    return folder


def test_questions_leave_nothing_in_the_folder(here: Path) -> None:
    for words in (
        ["predict", "mlp-s", "--gpu", "a10"],
        ["explain", "mlp-s", "--gpu", "a10"],
        ["list", "cases"],
    ):
        typed(*words)
    assert list(here.iterdir()) == []
    assert list(cache_folder("captures").glob("*.json.gz"))


def test_the_cache_folder_is_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ITERCAST_CACHE")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/me")
    for platform, folder in (
        ("linux", "/xdg/itercast/a"),
        ("win32", "/local/itercast/a"),
        ("darwin", "/home/me/Library/Caches/itercast/a"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_folder("a") == Path(folder)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("a") == Path("/home/me/.cache/itercast/a")


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("itercast predict mlp", ["mlp-s", "mlp-m"]),
        ("itercast predict mlp-s --gpu h100-n", ["h100-nvl"]),
        ("itercast plan mlp-s --node dgx-a", ["dgx-a100"]),
        ("itercast collect --family emb", ["embedding", "embedding_bag"]),
        ("itercast predict mlp-s --stack torch-2.5.", ["torch-2.5.0", "torch-2.5.1"]),
        ("itercast list no", ["nodes"]),
    ],
)
def test_shells_complete_names(line: str, names: list[str]) -> None:
    asked = {"_ITERCAST_COMPLETE": "complete_bash", "COMP_WORDS": line}
    asked["COMP_CWORD"] = str(len(line.split()) - 1)
    done = run.invoke(app, env=asked, prog_name="itercast")
    assert set(names) <= set(done.stdout.split()), done.stderr


def images_of(calls: tuple[OpCall, ...]) -> list[OpCall]:
    return [call for call in calls if call.op.startswith("aten.convolution")]


def test_channels_last_is_captured_and_forecast() -> None:
    """Strides of (N, C, H, W) images in NHWC: the channel's is 1, that of a column is C."""
    for turned in (False, True):
        calls = images_of(capture("resnet-s", channels_last=turned, dtype="bf16").calls)
        assert [priceable(call).channels_last for call in calls] == [turned] * len(calls)
        for image in (call.tensors()[0] for call in calls if call.op.endswith("n.default")):
            channels = image.shape[1]
            assert (image.stride[1] == 1, image.stride[3] == channels) == (turned, turned)
    asked = {"gpu": "a100-sxm-80gb", "dtype": "bf16", "batch": 64}
    times = [
        predict("resnet-50", channels_last=turned, **asked).by_family_us["conv"]
        for turned in (False, True)
    ]
    assert times[1] < 0.95 * times[0]  # cuDNN's kernels on tensor cores read NHWC
    done = run.invoke(app, ["predict", "resnet-s", "--channels-last", "--gpu", "a10", "--json"])
    assert json.loads(done.stdout)["gpu"] == "a10"


def test_what_trainings_take_in_practice_stands_below_the_iteration() -> None:
    """1.39 times the step and its interval; a step of inference has no such row."""
    asked = ["predict", "resnet-s", "--gpu", "a10"]
    found = predict("resnet-s", gpu="a10")
    ms = [
        1.39e-3 * us for us in (found.iteration_us, found.iteration_us_p10, found.iteration_us_p90)
    ]
    row = re.search(
        r"in practice +│ ([\d.]+) ms, ([\d.]+) to ([\d.]+)", run.invoke(app, asked).stdout
    )
    assert row and list(map(float, row.groups())) == pytest.approx(ms, abs=0.006)
    assert "in practice" not in run.invoke(app, [*asked, "--mode", "infer"]).stdout


def test_a_models_prints_do_not_spoil_json(here: Path) -> None:
    (here / "talking.py").write_text(MODELS)
    done = run.invoke(app, ["predict", "--model", "talking:talks", "--json"])
    assert json.loads(done.stdout)["case"] == "talking:talks"
    assert "forward of my model" in done.stderr and "built" in done.stderr


def test_the_line_of_the_users_code_is_named(here: Path) -> None:
    (here / "picking.py").write_text(MODELS)
    line = 1 + MODELS.splitlines().index("        return y[y > 0].sum()")
    done = run.invoke(app, ["predict", "--model", "picking:picks"])
    assert f"(picking.py:{line})" in done.stderr


def test_a_dtype_without_units_is_told_in_one_line() -> None:
    """A V100 has tensor cores for fp16 alone."""
    words = ["predict", "mlp-s", "--gpu", "v100-pcie-32gb", "--json", "--dtype"]
    told = typed(*words, "bf16")
    assert json.loads(told.stdout)
    assert told.stderr.startswith("itercast: v100-pcie-32gb has no bf16 units")
    assert len(told.stderr.splitlines()) == 1
    assert not run.invoke(app, [*words, "fp16"]).stderr
