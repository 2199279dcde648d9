"""What ``itercast run`` says of memory, messages and numbers of GPUs, in words."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from itercast.command_line import app

pytestmark = pytest.mark.usefixtures("own_cache")


def run(script: Path, *words: str, gpus: str = "1") -> tuple[int, str, str]:
    asked = ["run", "--gpu=h100-sxm-80gb", f"--gpus={gpus}", str(script), *words]
    done = CliRunner().invoke(app, asked)
    return done.exit_code, done.stdout, done.stderr


WIDE = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
rows, width = map(int, sys.argv[1:])
model = torch.nn.Linear(width, width, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
pairs, _ = dist.new_subgroups(min(2, dist.get_world_size()))
for _ in range(9):
    model(torch.randn(rows, width, device="cuda")).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=pairs)
        dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


LEFT = r"does not fit [\d.]+ GB are left for tensors"


@pytest.mark.parametrize(
    ("rows", "width", "told"),
    [
        (1, 150_000, f"{LEFT}; too much even without a batch"),  # 90 GB of weights
        (12_000_000, 1024, f"{LEFT}; at least 0.83 times its batch would fit"),  # two of 49 GB each
        (4_000_000, 1024, "fits at least 2.5 times its batch would fit"),  # two of 16 GB each
        (8, 1024, "fits over 100 times its batch would fit"),
    ],
)
def test_how_many_batches_fit_is_said_in_words(
    tmp_path: Path, rows: int, width: int, told: str
) -> None:
    (script := tmp_path / "train.py").write_text(WIDE)
    code, out, _ = run(script, str(rows), str(width))
    assert code == 0 and re.search(told, " ".join(out.replace("│", " ").split()))
    assert "messages of a rank" not in out  # there is no other


def test_messages_say_among_how_many_they_are(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(WIDE)
    code, out, _ = run(script, "8", "1024", gpus="8")
    assert code == 0 and "all_reduce of 8.39 MB, among 2 or 8 ranks" in out


def test_a_script_for_cuda_is_told_to_name_a_gpu(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("import torch\ntorch.nn.Linear(8, 8).cuda()\n")
    done = CliRunner().invoke(app, ["run", str(script)])
    assert done.exit_code == 2 and "name the GPU that it would run on: --gpu" in done.stderr


@pytest.mark.parametrize("count", ["100000000", "0", "-8", "8.5", "1e3", ""])
def test_a_number_of_gpus_that_nobody_has_is_refused(tmp_path: Path, count: str) -> None:
    (script := tmp_path / "train.py").write_text(WIDE)
    code, _, said = run(script, gpus=count)
    assert code == 2 and said.count("\n") == 1
    assert f"gpus {count!r}: {count!r} is no whole number from 1 to 99,999,999" in said


LAZY = """
import sys, types, torch
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise ImportError(name)
sys.modules["lazy"] = Lazy("lazy")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_module_that_cannot_be_imported_later_does_no_harm(tmp_path: Path) -> None:
    """Such are SpeechBrain's integrations of packages that are not installed."""
    (tmp_path / "train.py").write_text(LAZY)
    done = CliRunner().invoke(app, ["run", "--gpu=h100-sxm-80gb", str(tmp_path / "train.py")])
    assert done.exit_code == 0, done.output
