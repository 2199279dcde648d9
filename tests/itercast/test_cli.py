"""The command line as a whole: groups, lists, families, what it imports, how it stops."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner

import itercast
from itercast.command_line import GROUPS, app
from itercast.eval.progress import LINE_EVERY_S, progress_bar
from itercast.extras.programs import run_program
from itercast.names import KINDS

NAMED = {"gpus": "h100-sxm-80gb", "nodes": "dgx-h100", "hosts": "usual", "stacks": "torch-2.11"}
NAMED |= {"cases": "gpt-s", "keys": "tp", "families": "gemm", "sources": "kineto-traces"}


def test_each_kind_of_names_is_listed() -> None:
    assert {*NAMED, "bundles"} == {*KINDS}
    for kind, name in NAMED.items():
        assert name in CliRunner().invoke(app, ["list", kind]).output.split()
    assert "shipped" in CliRunner().invoke(app, ["list", "bundles"]).output
    assert {*KINDS} <= {*CliRunner().invoke(app, ["list"]).output.split()}


WITHOUT_JSON = {  # they serve, or write pages, or print the tables of a campaign
    *("ui", "report", "demo", "fleet", "gpu-report", "explore")
}


def test_commands_come_in_groups_and_report_as_json() -> None:
    """In the order in which a newcomer needs them."""
    known: Any = typer.main.get_command(app)
    groups = [command.rich_help_panel for command in known.commands.values()]
    assert list(dict.fromkeys(groups)) == [*GROUPS, "Extras"]
    assert next(iter(known.commands)) == "predict"
    without = {
        name
        for name, command in known.commands.items()
        if not any("--json" in option.opts for option in command.params)
    }
    assert without == WITHOUT_JSON
    assert json.loads(CliRunner().invoke(app, ["list", "nodes", "--json"]).stdout)


def test_several_families_are_named_at_once(tmp_path: Path) -> None:
    words = ["train", "--out", str(tmp_path / "b"), "--data", str(tmp_path), "--family"]
    for names in (["gemm,gems"], ["gemm", "--family", "gems"]):
        assert "unknown family 'gems'" in CliRunner().invoke(app, [*words, *names]).stderr


def test_the_version_is_told() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"itercast {itercast.__version__}\n"


def test_the_help_imports_nothing_slow() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\n"
    code += "from itercast.__main__ import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    slow = {"torch", "pandas", "numpy", "xgboost", "scipy", "mlflow", "asyncio", "http.server"}
    assert not set(done.stdout.split()) & slow


SCRIPT = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
"""
WATCHED = """
import atexit, gc, sys
full = []
gc.callbacks.append(lambda phase, info: full.append(1) if info["generation"] == 2 else None)
atexit.register(lambda: print(sum(full), gc.get_freeze_count() > 0, len(app.registered_commands)))
from itercast.__main__ import main
from itercast.command_line import app
main()
"""


@pytest.mark.parametrize("words", ["predict mlp-s --gpu a10", "run --gpu a10 train.py"])
def test_a_forecast_never_looks_through_all_objects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str
) -> None:
    """Nor when Python ends; and of all commands it makes its own."""
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT)
    asked = [sys.executable, "-c", WATCHED, *words.replace("train", f"{tmp_path}/train").split()]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 True 1", done.stderr


IMPORTING = """
import builtins
real = builtins.__import__
def stop(name, *rest):
    if name == 'typer': raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = stop
"""
BUILDING = """
import typer.main
def stop(app): raise KeyboardInterrupt
typer.main.get_command = stop
"""


@pytest.mark.parametrize("stopped", [IMPORTING, BUILDING])
def test_ctrl_c_before_there_is_a_command_is_one_line(stopped: str) -> None:
    """By the first import of the command line, or where typer makes the commands."""
    code = f"{stopped}\nfrom itercast.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "itercast: stopped\n")


def test_ctrl_c_in_a_command_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("itercast.command_line.listing", Mock(side_effect=KeyboardInterrupt))
    done = CliRunner().invoke(app, ["list", "gpus"])
    assert (done.exit_code, done.output) == (130, "itercast: stopped\n")


def test_progress_is_told_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line now and then: none in the first ten seconds."""
    with progress_bar() as bar:
        task = bar.add_task("train", total=4)
        bar.update(task, description="train gemm", completed=1)
        assert not capsys.readouterr().err
        bar.next_line_s -= LINE_EVERY_S  # type: ignore[attr-defined]
        bar.update(task, description="train conv", completed=2)
    assert capsys.readouterr().err == "train conv 50 % (0 s)\n"


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--count", "2"], 0, ""),
        (["--number", "2"], 2, "error: No such option: --number"),
        (["--count", "many"], 2, "error: Invalid value for '--count'"),
        (["--count", "3"], 2, "error: count 3 is odd"),
    ],
)
def test_programs_that_are_modules_tell_errors_in_one_line(
    words: list[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As ``python -m itercast.extras.recommenders`` does: no boxes, exit code 2."""

    def main(count: int = 0) -> None:
        if count % 2:
            raise ValueError(f"count {count} is odd")

    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as left:
        run_program(main)
    lines = capsys.readouterr().err.splitlines()
    assert (left.value.code or 0) == code and len(lines) == (code > 0)
    assert "".join(lines).startswith(told)
