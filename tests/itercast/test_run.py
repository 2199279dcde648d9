"""``itercast run`` forecasts a script in a process of its own, and leaves nothing behind."""

import json
import os
import re
import signal
import sys
import time
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kill_scripts import kill_once, marked
from small_scripts import TRAINING
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.compose.programs.scripts import _reason, module_file

EXAMPLE = Path(__file__).parents[2] / "examples/train_gpt.py"
SMALL = ("--layers=1", "--width=64", "--heads=2", "--vocabulary=500", "--length=16")
PARAMETERS = 2 * 500 * 64 + 16 * 64 + 12 * 64**2 + 9 * 64 + 3 * 2 * 64  # tables, block, norms


pytestmark = pytest.mark.usefixtures("own_cache")


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["run", *words])
    return done.exit_code, done.stdout, done.stderr


def test_a_script_on_64_gpus_and_its_trace(own_cache: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    asked = ("--gpu=h100-sxm-80gb", "--gpus=64", "--node=dgx-h100", "--json", f"--trace={trace}")
    code, out, _ = run(*asked, str(EXAMPLE), *SMALL)
    found = json.loads(out)
    assert code == 0 and found["case"] == "train_gpt.py" and found["world_size"] == 64
    assert found["command"].endswith(f"--steps 3 --limit 600 {EXAMPLE} {' '.join(SMALL)}")
    assert found["question"]["batch"] == 8 and found["sent_bytes"]["all_reduce"] > 0
    assert found["tokens_per_s"] == pytest.approx(16 * found["samples_per_s"])
    held = 16 * PARAMETERS  # fp32 weights, AdamW's two moments, DDP's bucket of gradients
    held += 2 * 8 * 16 * 500  # the last logits in bf16
    times = (found["memory_room_bytes"] - held) / (found["memory_bytes"] - held)
    assert found["batches_that_fit"] == pytest.approx(times, rel=0.001)
    parts = found["compute_us"] + found["exposed_comm_us"] + found["idle_us"]
    assert found["iteration_us"] == pytest.approx(parts) and found["loading_us"] > 0
    assert found["samples_per_s"] == pytest.approx(64 * 8 / found["iteration_us"] * 1e6)
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten.addmm.default", "launch aten.addmm.default", "all_reduce"} <= names
    (kept,) = (own_cache / "programs").glob("*.json.gz")
    written = kept.stat().st_mtime_ns
    assert json.loads(run(*asked, str(EXAMPLE), *SMALL)[1])["loading_us"] == found["loading_us"]
    assert kept.stat().st_mtime_ns == written  # read again, not captured again


IN_WORKERS = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.zeros(8)
model = torch.nn.Linear(8192, 8192).cuda()
optimizer = torch.optim.SGD(model.parameters())
for x in torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1):
    model(torch.randn(2048, 8192, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_the_table_says_how_many_workers_hide_a_loader(tmp_path: Path) -> None:
    """How many depends on what a batch takes here; tests/extras/input counts it."""
    script = tmp_path / "train.py"
    script.write_text(IN_WORKERS)
    code, out, _ = run("--gpu=h100-sxm-80gb", str(script))
    told = " ".join(out.replace("│", " ").split())
    hidden = r"DataLoader 1 worker; (\d+ would be enough on the 12 cores of a rank|more are no)"
    assert code == 0 and re.search(hidden, told)
    alone, loading, waits = (
        float(re.findall(rf"{row} ([\d.]+) ms", told)[0])
        for row in (
            "without waits for batches",
            "loading its batches",
            "waits for its batches",
        )
    )
    assert waits == pytest.approx(max(0, loading - alone), abs=0.3 * loading)
    bound = re.search(r"bound by .*waits for its batches (\d+) %", told)
    assert bound and int(bound[1]) == pytest.approx(100 * waits / (alone + waits), abs=1)
    total, *parts = (float(ms) for ms in re.findall(r"│ (?:iteration|  .*) +│ ([\d.]+) ms", out))
    assert len(parts) >= 3 and sum(parts) == pytest.approx(total, abs=0.01 * len(parts))


MANY_WORKERS = """
import os, sys, torch
from io import BytesIO
from pathlib import Path
class Seen(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        Path(sys.argv[1], str(os.getpid())).touch()
        return torch.ones(8)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
options = {"num_workers": 32, "multiprocessing_context": "spawn", "persistent_workers": True}
for x in torch.utils.data.DataLoader(Seen(), batch_size=2, **options):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def test_of_many_workers_one_is_started_and_stands_for_all(tmp_path: Path) -> None:
    """Of 32; the step alone is told beside the iteration."""
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(MANY_WORKERS)
    seen.mkdir()
    code, out, said = run("--gpu=h100-sxm-80gb", "--json", str(script), str(seen))
    assert code == 0, said
    assert len(list(seen.iterdir())) == 1
    found = json.loads(out)
    assert 0 < found["step_us"] <= found["iteration_us"] and found["loading_us"] > 0


def test_a_script_that_takes_too_much_memory_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("itercast.compose.programs.scripts.MOST_MEMORY", 1e-6)
    endless = tmp_path / "endless.py"
    endless.write_text("while True: pass\n")
    code, _, said = run(str(endless))
    assert code == 2 and re.search(r"endless.py takes \d+\.\d GB of memory; allowed are", said)


@pytest.mark.parametrize(("how", "sent"), [("workers", "SIGKILL"), ("ranks", "SIGTERM")])
def test_a_run_that_is_killed_leaves_no_process(how: str, sent: str) -> None:
    """While its script is busy in workers that ignore SIGTERM in sessions of theirs."""
    mark = f"{os.getpid()}.{how}.{sent}"

    def all_there() -> None:
        end = time.monotonic() + 60
        while len(marked(mark)) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        assert len(marked(mark)) >= 2

    assert kill_once(how, signal.Signals[sent], mark, all_there) == []


READS = """
import json, os, sys, tempfile, torch
folder = tempfile.mkdtemp()
open(f"{folder}/made", "w").close()
open(f"{folder}/made").close()
print(folder, file=open(f"{sys.argv[1]}.left", "w"))
width = json.load(open(sys.argv[1]))["width"] * int(os.environ.get("TIMES", "1"))
print([name for name, value in os.environ.items() if name == "NOBODY"])
if len(sys.argv) > 2:
    torch.cuda.get_device_name()
    assert torch.cuda.get_device_capability() >= (8, 0)
model = torch.nn.Linear(width, width).cuda()
optimizer = torch.optim.SGD(model.parameters())
for i in range(3):
    model(torch.randn(4, width, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_capture_holds_while_the_script_would_find_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text, files and variables that it read, facts of its GPU; not what it did not ask.

    Its temporary files are none of them, and gone.
    """
    script, settings = tmp_path / "train.py", tmp_path / "settings.json"
    script.write_text(READS)

    def found(*words: str, gpu: str = "h100-sxm-80gb") -> tuple[bool, float]:
        told = json.loads(run(f"--gpu={gpu}", "--json", *words)[1])
        return told["from_cache"], told["memory_bytes"]

    settings.write_text('{"width": 256}')
    asked = (str(script), str(settings))
    first = found(*asked)[1]
    assert found(*asked) == (True, first) and found(*asked, gpu="a100-sxm-80gb") == (True, first)
    assert not Path(Path(f"{settings}.left").read_text().strip()).exists()
    monkeypatch.setenv("NOBODY_READS_IT", "1")
    assert found(*asked)[0] and not found("--no-cache", *asked)[0]
    monkeypatch.setenv("TIMES", "2")
    kept, twice = found(*asked)
    assert not kept and twice > 2 * first
    monkeypatch.delenv("TIMES")
    assert found(*asked) == (True, first)
    settings.write_text('{"width": 512}')
    assert found(*asked) == (False, twice)
    script.write_text(READS.replace("(4, width", "(8, width"))
    assert not found(*asked)[0]
    assert not found(*asked, "name")[0] and found(*asked, "name")[0]
    assert not found(*asked, "name", gpu="a100-sxm-80gb")[0]


RUNS_ONCE = """
import pickle
import torch, torch.distributed as dist
assert not hasattr(pickle, "in_use"), "GlobalHydra is already initialized"  # as Hydra and absl are
pickle.in_use = True
class Shape:
    def __init__(self, *sizes):
        self.sizes = sizes
dist.init_process_group("nccl")
model, first = torch.nn.Linear(8, 8).cuda(), dist.get_rank() == 0
optimizer = torch.optim.SGD(model.parameters())
told = [Shape(4, 8) if first else None]
dist.send_object_list(told, 1) if first else dist.recv_object_list(told, 0)
for step in range(5):
    x = torch.ones(told[0].sizes, device="cuda")
    if not first:
        dist.recv(x, 0)
    y = model(x)
    if first:
        dist.send(y.detach(), 1)
    y.sum().backward()
    optimizer.step()
"""


def test_each_rank_of_a_pipeline_runs_in_a_process_where_no_script_ran(tmp_path: Path) -> None:
    """Its second rank runs twice: until it waits for the object, and once that was sent.

    A message of 4 x 8 numbers in fp32.
    """
    script = tmp_path / "train.py"
    script.write_text(RUNS_ONCE)
    code, out, error = run("--gpu=h100-sxm-80gb", "--gpus=2", "--json", str(script))
    assert code == 0, error
    assert json.loads(out)["sent_bytes"] == {"send": 4 * 8 * 4}


def test_rates_of_a_script_without_a_loader_are_of_rows(tmp_path: Path) -> None:
    """Four of them are given to the model in each step, which has no tokens."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n    model(torch.randn(4, 8).cuda()).sum().backward()\n"
        "    optimizer.step()\n"
    )
    found = json.loads(run("--gpu=a100-sxm-80gb", "--json", str(script))[1])
    assert found["samples_per_s"] == pytest.approx(4 / (found["iteration_us"] * 1e-6))
    assert found["tokens_per_s"] is None


def test_several_gpus_and_numbers_of_them_make_a_table(own_cache: Path) -> None:
    """Ranks take samples each; those between the ends need no capture, nor does another GPU."""
    code, out, _ = run("--gpu=a100-sxm-80gb", "--gpus=2,6,8", "--json", str(EXAMPLE), *SMALL)
    rows = json.loads(out)
    assert code == 0 and [r["world_size"] for r in rows] == [2, 6, 8]
    assert len({r["sent_bytes"]["all_reduce"] for r in rows}) == 1
    two, six, eight = (r["comm_us"] for r in rows)
    assert two < six < eight
    kept = {
        p.name: p.with_suffix(".asked").read_text() for p in (own_cache / "programs").glob("*.gz")
    }
    assert len(kept) == 2, json.dumps(kept)  # of 2 and 8
    assert all(
        r["samples_per_s"] == pytest.approx(r["world_size"] * 8 / r["iteration_us"] * 1e6)
        for r in rows
    )
    code, out, _ = run("--gpu=h100-sxm-80gb,a100-sxm-80gb", "--gpus=2", str(EXAMPLE), *SMALL)
    assert code == 0 and re.findall(r"(h100|a100)-sxm-80gb ", out) == ["h100", "a100"]
    told = " ".join(out.replace("│", " ").split())
    assert len(re.findall(r" \d+ %, [A-Za-z ]+ \d+ %", told)) == 2
    line, assumed, *_ = out.splitlines()
    assert line.startswith("a step of train_gpt.py as one of 2 ranks: 8 samples a rank, 16 in all")
    assert line.endswith("; matrix products in bf16, eager launches") and "host usual" in assumed
    code, out, _ = run("--explain-assumptions", "--gpu=a100-sxm-80gb", str(EXAMPLE), *SMALL)
    assert code == 0 and "most on host.event_us.launch" in out
    assert re.search(r"│ host.event_us.launch +│ +[\d.]+ │", out.split("forecast rests on")[1])
    assert rows[0]["assumes"].startswith(
        "assumes software torch-2.11 (--stack), host usual (--host), no "
    )
    code, _, said = run("--gpus=2,none", str(EXAMPLE))
    assert code == 2 and "gpus '2,none': 'none' is no whole number from 1 to 99,999,999" in said


REFUSES = """
import os, torch
if os.environ["WORLD_SIZE"] != "1":
    raise SystemExit("for one GPU: pip install transformers[torch]")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
"""


def test_a_table_with_cells_that_fail_says_so_by_its_exit_code(tmp_path: Path) -> None:
    """1 for some, 2 for all, as for one; what could be forecast is printed, an error once."""
    script = tmp_path / "train.py"
    script.write_text(REFUSES)
    code, out, _ = run("--gpu=a100-sxm-80gb", "--gpus=1,2", "--json", str(script))
    found, why = json.loads(out)
    assert code == 1 and found["world_size"] == 1 and "exits with 'for one GPU: pip" in why
    code, out, _ = run("--gpu=a100-sxm-80gb", "--gpus=2,4", str(script))
    said = " ".join(out.split())
    assert code == 2 and "2 x a100-sxm-80gb, 4 x a100-sxm-80gb: train.py exits" in said
    assert said.count("transformers[torch]") == 1


ALONE = """
import torch
model = torch.nn.Linear(8, 8).cuda()
{}
optimizer = torch.optim.SGD(model.parameters())
for x in torch.utils.data.DataLoader(torch.zeros(400, 8), batch_size=4):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "counted"), [("", 1), ("torch.distributed.init_process_group('nccl')", 64)]
)
def test_rates_of_a_script_without_a_process_group_are_of_one_process(
    tmp_path: Path, line: str, counted: int
) -> None:
    """Nothing says that 64 of them would share the work; with a group ranks may."""
    script, words = tmp_path / "train.py", ("--gpu=h100-sxm-80gb", "--gpus=64")
    script.write_text(ALONE.format(line))
    found = json.loads(run(*words, "--json", str(script))[1])
    assert found["samples_per_s"] == pytest.approx(counted * 4 / found["iteration_us"] * 1e6)
    assert ("256 in all" in found["forecast_of"]) == (counted == 64)
    assert found["notes"][0].startswith("64 ranks, no message seen: each makes a step of its own")
    told = " ".join(run(*words, str(script))[1].split())
    assert (" of one process │" in told) == found["notes"][0].endswith("one process")
    assert (" of one process │" in told) == (counted == 1)


ADAPTED = """
import torch
base = torch.nn.Linear(2048, 2048, bias=False).bfloat16().requires_grad_(False).cuda()
down, up = (torch.nn.Linear(*s, bias=False).cuda() for s in ((2048, {0}), ({0}, 2048)))
optimizer = torch.optim.SGD([*down.parameters(), *up.parameters()])
for i in range(9):
    x = torch.randn(512, 2048, device="cuda")
    (base(x.bfloat16()) + up(down(x))).sum().backward()
    optimizer.step()
"""


def test_tensor_cores_are_idle_where_most_time_of_products_is_in_fp32(tmp_path: Path) -> None:
    """A product of 2,048^2 weights in bf16, five of 8 or 64 x 2,048 in fp32 at 1/15 of its rate."""
    script = tmp_path / "train.py"
    for text, dtypes, idle in (
        (ADAPTED.format(8), "bf16 and fp32", False),
        (ADAPTED.format(64), "fp32 and bf16", True),
    ):
        script.write_text(text)
        found = json.loads(run("--gpu=h100-sxm-80gb", "--json", str(script))[1])
        assert f"products in {dtypes}, eager" in found["forecast_of"]
        assert [note.startswith("fp32 leaves") for note in found["unusual"]] == [True] * idle


def test_a_script_that_exits_says_what_it_wrote_last(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse\np = argparse.ArgumentParser()\n")
    with script.open("a") as more:
        more.write("p.add_argument('--width', required=True)\np.parse_args()")
    code, _, said = run(str(script))
    assert code == 2 and "exits with 2 after 0 steps" in said
    assert said.strip().endswith("error: the following arguments are required: --width")
    wrote = BytesIO(
        b"KeyError: 7\nmore: set DEBUG=1\nitercast: train.py exits with 1 after 0 steps"
    )
    assert _reason(wrote, 2, script) == "train.py exits with 1 after 0 steps: KeyError: 7"
    boxed = "╭─ Error ─╮\n│ Unknown: --widht │\n╰─────────╯\nitercast: train.py exits with 2"
    assert _reason(BytesIO(boxed.encode()), 2, script).endswith("with 2: Unknown: --widht")


def test_a_script_that_writes_its_error_and_goes_on_to_its_end_says_it(tmp_path: Path) -> None:
    """As what loguru's ``logger.catch`` wraps does, of which YOLOX's ``main`` is."""
    (script := tmp_path / "train.py").write_text(
        "import traceback\n"
        "try:\n    raise FileNotFoundError('no annotations')\n"
        "except OSError:\n    traceback.print_exc()\nprint('done')\n"
    )
    code, _, said = run(str(script))
    assert code == 2 and "train.py ends after 0 steps" in said
    assert said.endswith(": FileNotFoundError: no annotations\n")


def test_what_torch_warns_a_script_of_is_a_note(tmp_path: Path) -> None:
    """A checkpoint of what has no gradient; what the script itself warns of is its own."""
    warned = "    import warnings; warnings.warn('mine')\n    from torch.utils import checkpoint\n"
    warned += "    checkpoint.checkpoint(torch.sin, torch.ones(3), use_reentrant=True)\n    model("
    (tmp_path / "train.py").write_text(TRAINING.replace("    model(", warned, 1))
    code, out, told = run("--gpu=h100-sxm-80gb", "--json", str(tmp_path / "train.py"))
    assert not code, told
    (note,) = (note for note in json.loads(out)["notes"] if "checkpoint.py:" in note)
    assert note.startswith("torch/utils/checkpoint.py:") and "mine" not in out
    assert "None of the inputs have requires_grad=True" in note


def test_a_script_that_takes_too_long_says_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is over a second after it runs; meanwhile its line is shown as progress."""
    runs, endless = tmp_path / "runs", tmp_path / "endless.py"
    line = f"import time, pathlib; pathlib.Path({str(runs)!r}).touch(); time.sleep(900)"
    endless.write_text(line)

    def late_s() -> float:
        return 900 * (time.time() - runs.stat().st_mtime) if runs.exists() else 0.0

    clock = SimpleNamespace(sleep=time.sleep, monotonic=late_s)
    monkeypatch.setattr("itercast.compose.programs.scripts.time", clock)
    monkeypatch.setattr("itercast.eval.progress.FIRST_LINE_S", 0.0)
    code, _, said = run("--limit=1000", str(endless))
    doing = f"no step of an optimizer yet (endless.py:1: {line})\n"
    assert code == 2 and said.endswith(f"made too few steps within 1000 s (--limit): {doing}")
    assert "running endless.py as rank 0 of 1: no step of an optimizer yet" in said


def test_a_module_runs_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``python -m pack.train``; the package is in no path of this process."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/other.py").write_text(TRAINING)
    (tmp_path / "pack/train.py").write_text("import pack.other")
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("--gpu=h100-sxm-80gb", "--json", "-m", "pack.train")
    found = json.loads(out)
    assert code == 0 and sum(found["limits_frac"].values()) == pytest.approx(1)
    code, _, said = run("-m", "pack.none")
    assert code == 2 and "module 'pack.none': no such module in this folder" in said
    (tmp_path / "pack/parts/cli").mkdir(parents=True)  # folders without ``__init__.py``
    (tmp_path / "pack/parts/cli/sft.py").write_text("")
    assert module_file("pack.parts.cli.sft") == tmp_path / "pack/parts/cli/sft.py"


def test_modules_are_found_beside_the_script_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``python train.py``: in its own folder, and not in the current one."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/nearby.py").write_text("")
    (tmp_path / "train.py").write_text("import nearby")
    monkeypatch.chdir(tmp_path / "here")
    code, _, said = run(str(tmp_path / "train.py"))
    assert code == 2 and "No module named 'nearby'" in said and sys.executable in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os; os._exit(0)", "train.py: no program was captured"),
        ("import os; os.kill(os.getpid(), 11)", "train.py ended by SIGSEGV"),
        (
            "import os, time, torch\nclass Slow(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 9\n"
            "    def __getitem__(self, i): return time.sleep(900 * (i > 0)) or i\n"
            "loader = iter(torch.utils.data.DataLoader(Slow(), num_workers=1))\n"
            "next(loader)\nos._exit(3)",
            "train.py ended with 3",  # while its worker sleeps
        ),
        (
            "import torch\nclass Slow(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 9\n    def __getitem__(self, i): return i\n"
            "loader = iter(torch.utils.data.DataLoader(Slow(), num_workers=2))\n"
            "next(loader)\nraise SystemExit(5)",
            "exits with 5 after 0 steps",
        ),
    ],
)
def test_nothing_is_left_of_hostile_scripts(tmp_path: Path, text: str, message: str) -> None:
    """One line, code 2, and no process that has the script's name in its arguments."""
    script = tmp_path / "train.py"
    script.write_text(text)
    code, _, said = run("--limit=120", str(script))
    assert code == 2 and message in said.strip().splitlines()[-1]
    commands = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists()]
    assert not any(str(tmp_path).encode() in command for command in commands)


def test_a_program_is_captured_and_forecast_from_python() -> None:
    """DDP of 67 MB on two nodes: their network is twice as fast as the one assumed for others."""
    from itercast.api import capture, predict

    def program() -> Any:
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(4096, 4096, bias=False))
        x = torch.randn(8, 4096)
        return lambda: model(x).sum().backward()

    step = capture(program, world_size=16)
    one, two = (predict(step, gpu="h100-sxm-80gb", plan=plan) for plan in ("", "node=dgx-h100"))
    assert one.world_size == 16 and one.comm_us > two.comm_us > 0
    with pytest.raises(ValueError, match=r"plan 'dp=2': a program brings its own"):
        predict(step, gpu="h100-sxm-80gb", plan="dp=2")
    with pytest.raises(ValueError, match="a program is a function without arguments"):
        capture("gpt2-small", world_size=2)
