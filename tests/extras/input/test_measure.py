"""DataLoaders are measured for real, stage by stage; hostile ones end in one line."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from itercast.capture.input.files import FileGroup
from itercast.capture.input.lane import Batches, read_lane, write_lane
from itercast.command_line import app
from itercast.extras.input.measure import (
    file_groups,
    load,
    main,
    measure_lane,
    run_loader,
    with_workers,
)
from itercast.extras.input.process import measured_lane
from itercast.extras.rl.environment import measure_environment, measured_environment

MODULE = """
import os, time, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Items(Dataset):
    def __init__(self, act=None, transform=None):
        self.act, self.transform = act, transform
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        if self.act:
            self.act(i)
        x = torch.zeros(256)
        return self.transform(x) if self.transform else x

def busy(us):
    end = time.thread_time_ns() + 1000 * us
    while time.thread_time_ns() < end:
        pass

class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())

def slow(x):
    busy(2000)
    return x

def reads(i):  # a small file, and a large one that is waited for
    open(f"{i % 100}.txt").read()
    with open("large.bin", "rb") as file:
        time.sleep(0.002)

files = DataLoader(Items(reads), 4)
waits = DataLoader(Items(lambda i: time.sleep(0.002)), 4, num_workers=2)
works = DataLoader(Items(lambda i: busy(500), slow), 4)
dies = DataLoader(Items(lambda i: os._exit(7)), 4)
hangs = DataLoader(Items(lambda i: time.sleep(1000)), 4)
fails = DataLoader(Items(lambda i: [][i]), 4)
def fails_in_worker(i):
    if torch.utils.data.get_worker_info():
        raise KeyError("lost.jpg")
fails_later = DataLoader(Items(fails_in_worker), 4)
nothing = DataLoader(Nothing(), 4)
number = 3

class Space:
    def sample(self):
        return 0

class Game:  # 0.5 ms of computing, and 3 ms where an episode begins
    action_space = Space()
    at = 0
    def __init__(self, act=None):
        self.act = act
    def reset(self):
        busy(3000)
        return torch.zeros(64).numpy(), {}
    def step(self, action):
        self.at += 1
        if self.act:
            return self.act(self.at)
        busy(500)
        return torch.zeros(64).numpy(), 1.0, False, self.at % 10 == 0, {}

games = Game
games_die = lambda: Game(lambda at: os._exit(7))
games_fail = lambda: Game(lambda at: [][at])
games_none = lambda: None
games_of_old = lambda: Game(lambda at: (0, 1.0, False, {}))
def games_die_in_workers():
    if torch.multiprocessing.parent_process():
        return Game(lambda at: os._exit(7))
    return Game()
def makes():
    return DataLoader(Items(), 4)
"""


@pytest.fixture(autouse=True)
def loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of loaders beside the caller; its name is new for every test."""
    name = f"own_loaders_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    return name


def test_waiting_and_computing_are_told_apart(loaders: str) -> None:
    """4 items of 2 ms of sleep; 4 of 0.5 ms of computing and 2 ms of transform."""
    lane = measure_lane(f"{loaders}:waits", 0.6)
    assert lane.stages_us["waiting"] >= 8000 > lane.alone.mean_cpu_us
    assert lane.workers == 2 and lane.batch_samples == 4 and lane.batch_bytes == 4 * 1024
    lane = measure_lane(f"{loaders}:works", 0.6)
    assert lane.stages_us["transform"] >= 8000 and lane.alone.mean_cpu_us >= 10_000
    assert lane.stages_us["dataset"] >= 2000
    assert lane.worker.mean_us >= 10_000 and lane.receive_us > 0


def test_waits_are_those_of_the_files_that_were_opened(loaders: str, tmp_path: Path) -> None:
    """4 items of 2 ms of sleep behind the same file of 2,000 bytes; all files are seen again."""
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text("x" * 10)
    (tmp_path / "large.bin").write_bytes(bytes(2000))
    large, small = measure_lane(f"{loaders}:files", 1.0).files
    assert (large.kind, large.files, large.nbytes) == (".bin up to 10 kB", 1, 2000)
    assert (small.kind, small.nbytes) == (".txt up to 10 B", 10 * small.files)
    assert large.waiting_us >= 8000 > small.waiting_us
    half = file_groups([[(str(tmp_path / "large.bin"), 5.0)], []], 0.5)
    assert half == (FileGroup(kind=large.kind, files=2, nbytes=4000, waiting_us=2.5),)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "IndexError: list index out of range"),
        ("fails_later", "KeyError: 'lost.jpg' (in a worker)"),
        ("nothing", "yields no batch"),
        ("number", "is a int, allowed is a torch DataLoader"),
        ("absent", "AttributeError"),
        ("games_fail", "IndexError: list index out of range"),
        ("games_none", "returns a NoneType, which has no reset; allowed is an environment"),
        ("games_of_old", "step returns (0, 1.0, False, {}), allowed is (observation, reward, term"),
        ("games_die_in_workers", "a process that steps it died"),
    ],
)
def test_hostile_loaders_end_in_one_line(
    loaders: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", heard)
    order = json.dumps({"loader": f"{loaders}:{name}", "seconds": 0.5})
    what = ("environment", measure_environment) if name.startswith("games") else ()
    assert main(order, str(tmp_path / "lane.json"), *what) == 2
    assert said in heard.getvalue() and heard.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("name", "limit_s", "said"),
    [
        ("dies", 60.0, "its process ended with 7 after 0 batches"),
        ("hangs", 3.0, "yields no batch for 3 s, after 0 batches"),
    ],
)
def test_loaders_that_die_or_hang_end_in_one_line(
    loaders: str, name: str, limit_s: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        measured_lane(f"{loaders}:{name}", 1.0, limit_s)
    assert "\n" not in str(caught.value)


def test_steps_of_an_environment_alone_and_in_processes(loaders: str) -> None:
    """0.5 ms a step, every tenth with a reset of 3 ms: 0.8 on average; 64 numbers are seen."""
    lane = measured_environment(f"{loaders}:games", 1.5, 60)
    assert lane.alone.mean_us >= 700 and lane.alone.mean_cpu_us >= 700
    assert lane.worker.mean_cpu_us > 700 and lane.receive_us > 0
    assert lane.batch_bytes == 4 * 64 and lane.batch_samples == 1


def test_command_line_forecasts_rollouts_and_a_learner(loaders: str, tmp_path: Path) -> None:
    """Two replicas of 8 environments, 16 steps; 3 epochs of 2 updates; a lane that was kept."""

    def run(*words: str) -> tuple[int, str, str]:
        asked = ("ppo-vector", "--gpu=v100-sxm-16gb", "--horizon=16", "--epochs=3")
        done = CliRunner().invoke(app, ["rl", *words, *asked])
        return done.exit_code, done.stdout, done.stderr

    kept = f"--out={tmp_path / 'lane.json'}"
    code, out, _ = run(f"{loaders}:games", "--budget=1s", kept, "--json", "--plan=dp=2")
    found = json.loads(out)
    assert code == 0 and found["steps"] == 2 * 8 * 16
    own, apart, *workers = found["loops"]
    assert own["loop"]["updates"] == 3 * 2 and own["limit"] == "environments"
    assert own["iteration_us"] == pytest.approx(sum(own["stages_us"].values()))
    assert apart["iteration_us"] < own["iteration_us"] and apart["loop"]["weights_us"] > 0
    assert [one["loop"]["workers"] for one in workers][:2] == [0, 1]
    code, out, _ = run(str(tmp_path / "lane.json"), "--split", "--workers=2")
    assert code == 0 and "apart, weights one iteration old" in out and "limited by" in out
    for wrong in (("x:y",), ("2",), ("1ms", "--workers=9"), ("1ms", "--batch=4096")):
        code, out, said = run(*wrong)
        assert code == 2 and said.startswith("itercast: ") and said.count("\n") == 1, wrong


def test_a_function_that_returns_a_loader_and_the_epochs_of_a_short_one(loaders: str) -> None:
    """1,000 samples are 250 batches of 4; 400 are taken, over two epochs."""
    run = run_loader(with_workers(load(f"{loaders}:makes"), 0), 20.0, lambda: None)
    assert len(run.batches) == 399 and run.samples == 4  # without the first


def test_command_line_forecasts_and_its_file_feeds_predict(loaders: str, tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(app, list(words))
        return done.exit_code, done.stdout, done.stderr

    kept = str(tmp_path / "lane.json")
    code, out, _ = run("input", f"{loaders}:waits", "--budget=500ms", f"--out={kept}", "--json")
    assert code == 0 and json.loads(out)["workers"] == 2
    times, group = (
        Batches(wall_us=(8000.0,), cpu_us=(100.0,)),
        FileGroup(kind=".jpg", files=9, nbytes=2 * 10**9, waiting_us=6000.0),
    )
    known = replace(
        read_lane(Path(kept)), alone=times, worker=times, receive_us=50.0, cores=4, crowding=1.0
    )
    write_lane(replace(known, stages_us={"waiting": 6000.0}, files=(group,)), Path(kept))
    code, out, _ = run("input", kept, "--step=1ms", "--json")
    found = json.loads(out)
    assert code == 0 and found["own"]["input_bound"] and found["own"]["stage"] == "workers"
    assert found["own"]["iteration_us"] == pytest.approx(8000 / 2, rel=0.05)
    assert found["if_kept_us"]["files on a fast tier"] == pytest.approx(2000 / 2, rel=0.1)
    assert found["fewest"]["workers"] in (7, 8)  # 8 ms a batch, 1 ms a step
    code, out, _ = run("input", kept, "mlp-s", "--gpu=v100-sxm-16gb", "--batch=4", "--json")
    assert code == 0 and json.loads(out)["own"]["input_bound"]
    plain = json.loads(run("predict", "mlp-s", "--gpu=v100-sxm-16gb", "--batch=4", "--json")[1])
    code, out, _ = run(
        "predict", "mlp-s", "--gpu=v100-sxm-16gb", "--batch=4", "--json", f"--input={kept}"
    )
    fed = json.loads(out)
    late = fed["iteration_us"] - plain["iteration_us"]
    assert code == 0 and fed["idle_by_us"]["input"] == pytest.approx(late) and late > 1000
    assert fed["samples_per_s"] == pytest.approx(4e6 / fed["iteration_us"])
    assert "limited by workers" in run("input", kept)[1]
    code, out, _ = run("input", kept, "--step=1ms", "--tier-gb=1", "--json")
    told = json.loads(out)["if_kept_us"]
    assert code == 0 and told["1 GB: .jpg (50%)"] > told["files on a fast tier"]
    many = ("input", kept, "--step=1s", "--workers=1025")
    wrong = (("input", "nowhere.json"), ("input", "x"), ("input", kept, "mlp-s", "--step=1s"), many)
    for words in wrong:
        code, out, said = run(*words)
        assert code == 2 and said.startswith("itercast: ") and said.count("\n") == 1, words
    code, _, said = run("predict", "mlp-s", "--input=nowhere.json")
    assert code == 2 and "no such file" in said


def test_damaged_lanes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lane.json"
    for text in ("", "[]", "{}", '{"x": 1}', '{"loader": "a", "alone": {"wall_us": [-1]}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="no input lane"):
            read_lane(path)
    path.write_text('{"loader": "a", "workers": 0, "prefetch": 1, "batch_samples": 1}')
    with pytest.raises(ValueError, match=r"missing keys \['batch_bytes', 'cores'\]$"):
        read_lane(path)


def test_a_lane_is_read_as_it_was_written(loaders: str, tmp_path: Path) -> None:
    lane = measure_lane(f"{loaders}:makes", 0.3)
    write_lane(lane, tmp_path / "lane.json")
    assert read_lane(tmp_path / "lane.json") == lane
