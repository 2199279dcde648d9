"""Bad input of every command: one line that names what is wrong, exit code 2, nothing written."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from plan_case import GPU
from typer.testing import CliRunner

from itercast.__main__ import GROUPS, app
from itercast.capture.cases.registry import case
from itercast.eval.progress import LINE_EVERY_S, progress_bar
from itercast.learners.bundle import SHIPPED_CPU, Bundle

SEQ = case("gpt-s").seq
PLANNED = f"plan gpt-s --gpu {GPU.name} --bundle bundle"
TOLD = f"predict gpt-s --gpu {GPU.name} --bundle bundle --lengths"
CELLS = f"throughput gpt-s --gpu {GPU.name} --bundle bundle --gpus"
FACTS = "peak_flops_per_s: {fp32: 60e12}\nhbm_bytes: 80e9\n"
FILES = {
    "wrong.py": "import sys\ndef leaves():\n    sys.exit(3)\n",
    "broken.py": "def model(:\n",
    "slow.yaml": f"{FACTS}sm_count: 132\nhbm_bytes_per_s: 3.35\n",
    "few.yaml": f"{FACTS}hbm_bytes_per_s: 3.35e12\n",
    "config.json": '{"architectures": ["GPT2LMHeadModel"]}',
    "usual.yaml": "",
    "both.yaml": "groups: {a: {gpu: h100-sxm-80gb, count: 1}}\n",
    "tables.yaml": "batch: 64\ndim: 16\ntables: [{name: users, rows: 100, pooling: 2}]\n",
    "long.txt": f"5\n{SEQ + 1}",
    "short.txt": "0 5",
    "words.txt": "5 x",
    "none.txt": "",
    "other": "other: 1",
    "negative": f"{GPU.name}: -1",
    "nan": f"{GPU.name}: .nan",
    "twice": "h100: 1\nh100-sxm-80gb: 2",
    "listed": "[1]",
    "half": "a: [b",
}
IMPORTERS = ("neusight", "aiconfigurator", "vidur", "nccl-tests", "kineto", "iterations")
REFUSED = [
    ("list dogs", "cannot list 'dogs'; known: gpus, nodes, hosts, stacks, cases, families, bundle"),
    ("fly", "No such command 'fly'"),
    ("collect --device tpu", "device 'tpu': allowed are cpu and cuda"),
    ("collect --budget soon", "budget 'soon': expected a duration like 20ms, 90s"),
    ("collect --family gem", "unknown family 'gem'; known:"),
    ("predict", "a model is one of CASE, --hf-config and --model"),
    ("predict gpt-s --hf-config x.json", "a model is one of CASE, --hf-config and --model"),
    ("predict gpt-s --model a:b", "a model is one of CASE, --hf-config and --model"),
    ("predict gpt9", "unknown case 'gpt9'; known:"),
    ("predict gpt-s --colour red", "No such option: --colour"),
    ("predict gpt-s --batch -1", "'-1' is no whole number from 1 to 99,999,999"),
    ("predict gpt-s --plan dp=0", "dp is an integer from 1 to 99999999, got '0'"),
    ("predict gpt-s --plan dp=3000000000", "dp is an integer from 1 to 99999999"),
    ("predict gpt-s --plan pp=2,micro=2,layers=9+9", "are 18 layers, the model has"),
    ("predict gpt-s --bundle nowhere", "bundle 'nowhere': no readable bundle.json"),
    ("predict gpt-s --gpu a10 --host nuc", "unknown host 'nuc'; known: ['usual', "),
    ("predict gpt-s --host modal", "is a CPU, which is its own host"),
    ("predict gpt-s --gpu a10 --stack torch-9", "unknown stack 'torch-9'; known: ['cudnn'"),
    ("predict gpt-s --gpu slow.yaml", "hbm_bytes_per_s is in bytes per second"),
    ("predict gpt-s --gpu few.yaml", "few.yaml: missing keys ['sm_count']"),
    ("predict gpt-s --cluster no.yaml", "cluster file 'no.yaml': no such file"),
    ("predict gpt-s --cluster both.yaml --gpu a10", "--cluster goes without --gpu, --lengths"),
    ("predict gpt-s --trace nodir/x.json", "'nodir/x.json': no such folder"),
    ("predict --hf-config config.json", "--hf-config needs --batch"),
    ("predict --model wrong:other", "has no attribute"),
    ("predict --model wrong:leaves", "the model fails without data: SystemExit: 3"),
    ("predict --model broken:model", "model 'broken:model': SyntaxError"),
    (f"{TOLD} short.txt", f"a length is from 1 to the {SEQ} tokens of the context, got 0"),
    (f"{TOLD} long.txt", f"the {SEQ} tokens of the context, got {SEQ + 1}"),
    (f"{TOLD} words.txt", "invalid literal for int()"),
    (f"{TOLD} none.txt", "no numbers"),
    (f"{TOLD} nowhere.txt", "known are uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA and files"),
    (f"{TOLD} uniform:1:2000000", "of the context, got 2000000"),
    (f"{TOLD} uniform:0.6:4", "of the context, got 0.6"),
    (f"{TOLD} uniform:9:2", "HIGH is at least LOW"),
    (f"{TOLD} uniform:9", "uniform:LOW:HIGH has two positive numbers"),
    (f"{TOLD} lognormal:nan:1", "lognormal:MEDIAN:SIGMA has two positive numbers"),
    (f"{TOLD} uniform:2:4 --plan cp=2", "cp cuts sequences of one length"),
    (f"{TOLD} uniform:2:4 --packed --attn eager", "need fused attention"),
    ("predict gpt-s --packed", "packed sequences need --lengths"),
    ("explain", "a model is one of CASE"),
    ("explain no-such-case", "no-such-case"),
    ("explain mlp-s --plan tp=3,zz=1", "unknown key 'zz'"),
    ("plan gpt-s --gpus 2", "plan takes --gpu and --gpus, or --cluster"),
    ("plan gpt-s --cluster both.yaml --node dgx-h100", "--cluster goes without --gpu, --gpus, --n"),
    ("plan gpt-s --gpu a10 --gpus 0", "'--gpus': '0' is no whole number from 1"),
    ("plan --gpu a10 --gpus 2", "a model is one of CASE, --hf-config"),
    (
        "plan gpt-s --gpu a10 --gpus 2 --hf-config config.json",
        "a model is one of CASE, --hf-config",
    ),
    ("plan --gpu a10 --gpus 2 --hf-config config.json", "--hf-config and --model need --batch"),
    (f"{PLANNED} --gpus 2 --objective speed", "objective 'speed': allowed are time, cost"),
    (f"{PLANNED} --gpus 2 --node dgx-h100", "node 'dgx-h100' holds h100-sxm-80gb, not toy-gpu"),
    (f"{PLANNED} --gpus 7 --global-batch 4", "no legal plan of gpt-s for 7 GPUs"),
    (f"{PLANNED} --gpus 2 --amp --dtype fp32", "amp: dtype is bf16 or fp16, got 'fp32'"),
    (f"{CELLS} 1,x", "--gpus takes positive integers below 10^8 like 1,2,4, got 'x'"),
    (f"{CELLS} 0", "like 1,2,4, got '0'"),
    (f"{CELLS} ''", "--gpus is a list separated by commas, got ''"),
    (f"{CELLS} 1 --batch ,", "--batch is a list separated by commas, got ','"),
    (f"{CELLS} 1 --gpu ' '", "--gpu is a list separated by commas, got ' '"),
    (f"{CELLS} 2 --plan dp=2", "dp follows from --gpus"),
    (f"{CELLS} 2 --plan pt=2", "unknown key 'pt'"),
    (f"{CELLS} 1 --plan zero=3", "zero=3 needs dp > 1"),
    (f"{CELLS} 1 --node dgx-h100", "node 'dgx-h100' holds none of toy-gpu"),
    (f"{CELLS} 1 --prices other", "no price of 'toy-gpu'; it has other"),
    (f"{CELLS} 1 --prices negative", "the price of 'toy-gpu' is a number"),
    (f"{CELLS} 1 --prices nan", "the price of 'toy-gpu' is a number"),
    (f"{CELLS} 1 --prices twice", "has two prices, state one"),
    (f"{CELLS} 1 --prices listed", "(GPU: USD per hour of one)"),
    (f"{CELLS} 1 --prices half", "while parsing"),
    ("shard tables.yaml --gpu h900 --gpus 2", "h900"),
    ("shard tables.yaml --gpu l4 --gpus 2 --sharding nowhere.json", "nowhere.json"),
    ("shard tables.yaml --gpu l4 --gpus 2 --node nowhere", "nowhere"),
    ("run none.py", "none.py': no such file"),
    ("run --gpus=0 wrong.py", "gpus '0': allowed are numbers of at least 1"),
    ("run --trace=nodir/x.json wrong.py", "no such folder"),
    ("train --data nowhere --out x", "data 'nowhere': no such folder"),
    ("train --data data --out wrong.py", "'--out': dir 'wrong.py' is a file"),
    ("train --out x --storage sqlite:///t.db", "it needs --trials, 1 or more"),
    ("price no.parquet --out x", "rows 'no.parquet': no such file"),
    ("calibrate no.parquet --out x", "rows 'no.parquet': no such file"),
    ("calibrate rows.parquet", "writes a bundle (--out), a host (--host) or a machine file"),
    ("calibrate rows.parquet --host usual.yaml", "allowed is NAME.yaml"),
    ("calibrate rows.parquet --host mine.yaml", "from rows of family host or iteration"),
    ("check --device tpu", "device 'tpu': allowed are cpu and cuda"),
    ("check --budget soon", "budget 'soon'"),
    (f"check --bundle {SHIPPED_CPU} --measured data", "rows of one device are judged, got []"),
    ("compare bundle bundle", "keeps no held-out rows; name measured rows with --data"),
    ("compare bundle bundle --data none", "none': no such folder"),
    ("evaluate --measured nowhere", "measured 'nowhere': no such folder"),
    ("report --reports none", "run `itercast demo`"),
    ("gpu-report nowhere", "data 'nowhere': no such folder"),
    ("ui --port 99999", "'--port': Input should be less than or equal to 65535"),
    ("import habitat data", "unknown source 'habitat'; known:"),
    ("import vidur none", "no such file or folder"),
    ("import kineto data --gpu tpu", "unknown gpu 'tpu'; known:"),
    *((f"import {name} data", "looked for") for name in IMPORTERS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files to be refused, an empty folder, and a bundle that knows no family."""
    made = tmp_path_factory.mktemp("here")
    for name, text in FILES.items():
        (made / name).write_text(text)
    (made / "data").mkdir()
    Bundle(models={}, gpus={GPU.name: GPU}).save(made / "bundle")
    product = {"family": "gemm", "gpu": "a10", "op": "mm", "time_us": np.float64(9)}
    pd.DataFrame([product]).to_parquet(made / "rows.parquet")
    return made


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_bad_input_is_one_line_and_makes_nothing(
    command: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 2, done.output
    assert message in done.stderr and not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert [p for p in sorted(folder.rglob("*")) if "__pycache__" not in p.parts] == before


def test_lists() -> None:
    for what, name in (
        ("", "gpus"),
        ("cases", "gpt-s"),
        ("families", "gemm"),
        ("nodes", "dgx-h100"),
    ):
        assert name in CliRunner().invoke(app, ["list", *what.split()]).output.split()


WITHOUT_JSON = {  # they serve, or write pages, or print the tables of a campaign
    *("ui", "report", "demo", "fleet", "gpu-report", "explore"),
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


def test_the_help_imports_nothing_slow() -> None:
    code = "import sys; sys.argv[1:] = ['--help']\n"
    code += "from itercast.start import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not set(done.stdout.split()) & {"torch", "pandas", "numpy", "xgboost", "scipy", "mlflow"}


def test_ctrl_c_while_it_imports_is_one_line() -> None:
    """Raised by the first import of the command line, as the signal does."""
    code = "import sys, builtins; real = builtins.__import__\n"
    code += "def stop(name, *rest):\n    if name == 'typer': raise KeyboardInterrupt\n"
    code += "    return real(name, *rest)\n"
    code += "builtins.__import__ = stop\nfrom itercast.start import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "itercast: stopped\n")


def test_progress_is_told_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A line now and then: none in the first ten seconds."""
    with progress_bar() as bar:
        task = bar.add_task("train", total=4)
        bar.update(task, description="train gemm", completed=1)
        assert not capsys.readouterr().err
        bar.told_s -= LINE_EVERY_S  # type: ignore[attr-defined]
        bar.update(task, description="train conv", completed=2)
    assert capsys.readouterr().err == "train conv 50 % (0 s)\n"
