"""Measured steps of a user's own script, as anchors of its forecasts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from itercast.anchors import measured_steps
from itercast.command_line import app
from itercast.extras.anchors.infer_machine import infer_machine
from itercast.options import Question

GPU = "a100-sxm-80gb"
TRAINING = """
import sys
import torch
import torch.distributed as dist
width = int(sys.argv[1])
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(9):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.randn(1024, width, device="cuda")).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("script")
    (path / "train.py").write_text(TRAINING)
    return path


def write(folder: Path, **more: Any) -> Path:
    """An anchor file of one step of the script on 8 GPUs."""
    facts = {"script": "train.py", "arguments": "4096", "gpu": GPU, "node": "dgx-a100", "gpus": 8}
    path = folder / "steps.yaml"
    path.write_text(yaml.safe_dump([facts | more]))
    return path


def forecast_us(folder: Path, gpus: int, *more: str) -> dict[str, float]:
    """A forecast of ``itercast run``, as JSON."""
    where = ["--gpu", GPU, "--gpus", str(gpus), "--node", "dgx-a100", "--json", *more]
    done = CliRunner().invoke(app, ["run", *where, str(folder / "train.py"), "4096"])
    assert done.exit_code == 0, done.stderr
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


def test_a_slow_step_of_a_script_makes_its_other_forecasts_slower(folder: Path) -> None:
    """1.3 times as long on 8 GPUs: both forecasts grow, by less than that, and are surer.

    Of the network, which 64 GPUs need and 8 do not, the step on 8 says nothing.

    A step exactly as long as its forecast moves none.
    """
    before = {gpus: forecast_us(folder, gpus) for gpus in (8, 64)}
    right_ms = before[8]["step_us"] / 1e3
    same = forecast_us(folder, 64, "--anchor", str(write(folder, step_ms=right_ms)))
    assert same["step_us"] == pytest.approx(before[64]["step_us"], rel=1e-6)
    file = str(write(folder, step_ms=1.3 * right_ms))
    for gpus, least in ((8, 1.1), (64, 1.05)):
        after = forecast_us(folder, gpus, "--anchor", file)
        assert least < after["step_us"] / before[gpus]["step_us"] < 1.3
        widths = [x["iteration_us_p90"] / x["iteration_us_p10"] for x in (after, before[gpus])]
        assert widths[0] < widths[1]
    assert any("times as long as with a typical" in line for line in after["machine"])


def test_of_several_numbers_of_gpus_the_one_to_measure_next_is_named(folder: Path) -> None:
    """Of 1, 8 and 16 GPUs 8 were measured; one sends no messages, 16 are what is asked for."""
    file = str(write(folder, step_ms=forecast_us(folder, 8)["step_us"] / 1e3))
    where = ["--gpu", GPU, "--node", "dgx-a100", "--anchor", file, "--gpus"]
    for gpus, words in (("1,8,16", "measure next: train.py on 1 GPU; the 80 %"), ("8,16", "")):
        done = CliRunner().invoke(app, ["run", *where, gpus, str(folder / "train.py"), "4096"])
        assert done.exit_code == 0 and words in " ".join(done.stdout.split()), done.output
        assert ("measure next" in done.stdout) == bool(words)


def test_a_rate_of_a_script_tells_its_time(folder: Path) -> None:
    """8 ranks x 1,024 rows; at 1e6 samples a second a step takes 8.192 ms."""
    (one,) = measured_steps(write(folder, samples_per_s=1e6), Question)
    assert one.time_us == pytest.approx(8192)
    assert one.label == "train.py on 8 GPUs as it is"
    assert one.forecast(one.target).world_size == 8


def test_another_script_of_the_same_name_is_another_model(folder: Path, tmp_path: Path) -> None:
    """So is a script with other arguments: its own deviation on a machine is not theirs.

    The same script in another folder is the same model.
    """
    (other := tmp_path / "other").mkdir()
    (tmp_path / "train.py").write_text(TRAINING)
    (other / "train.py").write_text(f"# another one{TRAINING}")
    places = (folder, tmp_path, other)
    first, same, third = (measured_steps(write(at, step_ms=10.0), Question)[0] for at in places)
    (fourth,) = measured_steps(write(folder, step_ms=10.0, arguments=["2048"]), Question)
    assert first.target.model == same.target.model
    assert len({one.target.model for one in (first, third, fourth)}) == 3


def test_a_run_of_a_script_counts_once(folder: Path) -> None:
    (one,) = measured_steps(write(folder, samples_per_s=1e6), Question)
    (two,) = measured_steps(write(folder, samples_per_s=1e6, gpus=16), Question)
    assert one.run != two.run
    with pytest.raises(ValueError, match="told of this run already"):
        infer_machine([one], infer_machine([one]))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"gpus": "many"},
            r"step 1: gpus, steps, limit from 1, .* got \('many', 3, 600\) and '4096'",
        ),
        ({"arguments": 4096}, r"arguments as text, got \(8, 3, 600\) and 4096"),
        ({"arguments": "'4096"}, "steps.yaml, step 1: No closing quotation"),
        ({"module": "train"}, "a script or a module, got both"),
        ({"bundle": "none"}, "none"),
        ({"batch": 8}, r"unknown \['batch'\]; known: script, module, arguments, gpu, gpus"),
        ({"script": "none.py"}, "none.py': no such file"),
    ],
)
def test_a_wrong_anchor_of_a_script_is_refused(
    folder: Path, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        measured_steps(write(folder, step_ms=10.0, **more), Question)


def test_steps_of_scripts_are_a_kind_of_their_own(folder: Path) -> None:
    file = write(folder, step_ms=10.0)
    where = ["evaluate", "--measured", str(file), "--out", str(folder / "report")]
    done = CliRunner().invoke(app, where)
    assert done.exit_code == 0, done.stderr
    assert "\nscripts: " in done.stdout
