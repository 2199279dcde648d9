"""What a new user meets: nothing left behind, names completed, wrong input in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.compose.capture_model import capture
from itercast.compose.predict import predict
from itercast.compose.pricing.priced_op import priceable
from itercast.microbench.cache_folder import cache_folder
from itercast.microbench.opcall import OpCall

ROOT = Path(__file__).parents[2]
run = CliRunner()

MODELS = """
import sys
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

def leaves():
    sys.exit(3)

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
        done = run.invoke(app, words)
        assert done.exit_code == 0, done.output
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
    done = subprocess.run(
        [sys.executable, "-c", "from itercast.__main__ import app; app(prog_name='itercast')"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
    )
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


def test_a_models_prints_do_not_spoil_json(here: Path) -> None:
    (here / "talking.py").write_text(MODELS)
    done = run.invoke(app, ["predict", "--model", "talking:talks", "--json"])
    assert json.loads(done.stdout)["case"] == "talking:talks"
    assert "forward of my model" in done.stderr and "built" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "--model", "wrong:leaves"], "the model fails without data: SystemExit: 3"),
        (
            ["predict", "--model", "wrong:picks"],
            "depends on data in aten.nonzero.default (wr",
        ),
        (["predict", "--model", "broken:model"], "model 'broken:model': SyntaxError"),
        (["predict", "mlp-s", "--trace", "nodir/x.json"], "'nodir/x.json': no such folder"),
        (["explain", "mlp-s", "--picture", "nodir/x.png"], "'nodir/x.png': no such folder"),
        (["predict", "mlp-s", "--gpu", "a10", "--stack", "torch-9"], "unknown stack 'torch-9'"),
        (["predict", "mlp-s", "--plan", "dp=3000000000"], "dp is an integer from 1 to 99999999"),
        (["ui", "--port", "99999"], "'--port': Input should be less than or equal to 65535"),
        (["train", "--data", "data", "--out", "wrong.py"], "'--out': dir 'wrong.py' is a file"),
        (["predict", "mlp-s", "--gpu", "slow.yaml"], "hbm_bytes_per_s is in bytes per second"),
        (["predict", "mlp-s", "--gpu", "few.yaml"], "few.yaml: missing keys ['sm_count']"),
    ],
)
def test_wrong_input_is_one_line_and_makes_nothing(
    words: list[str], message: str, here: Path
) -> None:
    (here / "wrong.py").write_text(MODELS)
    (here / "broken.py").write_text("def model(:\n")
    (here / "data").mkdir()
    facts = "peak_flops_per_s: {fp32: 60e12}\nhbm_bytes: 80e9\n"
    (here / "slow.yaml").write_text(f"{facts}sm_count: 132\nhbm_bytes_per_s: 3.35\n")
    (here / "few.yaml").write_text(f"{facts}hbm_bytes_per_s: 3.35e12\n")
    before = sorted(here.iterdir())
    done = run.invoke(app, words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not done.stdout
    assert [p for p in sorted(here.iterdir()) if p.name != "__pycache__"] == before


def test_the_line_of_the_users_code_is_named(here: Path) -> None:
    (here / "picking.py").write_text(MODELS)
    line = 1 + MODELS.splitlines().index("        return y[y > 0].sum()")
    done = run.invoke(app, ["predict", "--model", "picking:picks"])
    assert f"(picking.py:{line})" in done.stderr


def test_a_dtype_without_units_is_told_in_one_line() -> None:
    """A V100 has tensor cores for fp16 alone."""
    words = ["predict", "mlp-s", "--gpu", "v100-pcie-32gb", "--json", "--dtype"]
    told = run.invoke(app, [*words, "bf16"])
    assert told.exit_code == 0 and json.loads(told.stdout)
    assert told.stderr.startswith("itercast: v100-pcie-32gb has no bf16 units")
    assert len(told.stderr.splitlines()) == 1
    assert not run.invoke(app, [*words, "fp16"]).stderr
