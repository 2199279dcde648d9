"""`itercast throughput` and `replay`: cells equal forecasts, files are Gavel's and Sia's."""

import csv
import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_case import GPU
from typed_commands import typed

from itercast.api import predict
from itercast.extras.schedulers.table import spread
from itercast.learners.bundle import Bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that knows no family, of a GPU with a power limit of 200 W."""
    folder = tmp_path_factory.mktemp("bundle") / "b"
    slow = replace(GPU, name="slow-gpu", peak_flops_per_s={"fp32": 1e11})
    gpus = (replace(GPU, power_w=200.0), slow)
    Bundle(models={}, gpus={gpu.name: gpu for gpu in gpus}).save(folder)
    return folder


def answer(command: str, *words: str, rc: int = 0) -> Any:
    done = typed(command, "gpt-s", *words, rc=rc)
    return json.loads(done.stdout) if rc < 2 else done.stderr


throughput = partial(answer, "throughput")


def test_cells_are_forecasts(bundle: Path, tmp_path: Path) -> None:
    """Two GPUs, 1 and 2 of them, batches 2 and 4: eight cells, each as `predict` answers."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("toy-gpu: 3.6\nslow-gpu: 0\n")
    words = ["--gpu", "toy-gpu,slow-gpu", "--gpus", "1,2", "--batch", "2,4", "--json"]
    words += ["--bundle", str(bundle), "--prices", str(prices), "--out", str(tmp_path / "out")]
    cells = throughput(*words)["cells"]
    kinds = list(product(("toy-gpu", "slow-gpu"), (1, 2), (2, 4)))
    assert [(c["gpu"], c["gpus"], c["batch"]) for c in cells] == kinds
    for cell in cells:
        plan = f"dp={cell['gpus']}"
        found = predict("gpt-s", gpu=cell["gpu"], plan=plan, batch=cell["batch"], bundle=bundle)
        assert cell["plan"] == plan and cell["status"] == "ok"
        for key in ("iteration_us", "samples_per_s", "tokens_per_s", "memory_bytes"):
            assert cell[key] == getattr(found, key)
    one = cells[0]  # 3.6 USD an hour are 0.001 a second; 200 W are 200 J a second
    assert one["usd_per_sample"] == pytest.approx(1e-3 / one["samples_per_s"])
    assert one["energy_j_per_sample"] == pytest.approx(200 / one["samples_per_s"])
    assert cells[-1]["usd_per_sample"] == 0 and cells[-1]["energy_j_per_sample"] is None
    check_files(tmp_path / "out", cells)


def test_predict_says_what_a_step_costs(bundle: Path, tmp_path: Path) -> None:
    """3.6 USD an hour are 0.001 a second of a GPU, 0.002 of two."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("toy-gpu: 3.6\n")
    rest = ["--gpu", "toy-gpu", "--bundle", str(bundle), "--json", "--prices"]

    one = answer("predict", *rest, str(prices))
    second = 1e-3
    assert one["price"]["usd_per_step"] == pytest.approx(second * one["iteration_us"] / 1e6)
    tokens = one["price"]["usd_per_billion_tokens"]
    assert tokens == pytest.approx(1e9 * second / one["tokens_per_s"])
    two = answer("predict", "--plan", "dp=2", *rest, str(prices))
    usd = two["price"]["usd_per_million_samples"]
    assert usd == pytest.approx(1e6 * 2 * second / two["samples_per_s"])
    prices.write_text("l4: 1\n")
    assert "no price of 'toy-gpu'; it has l4" in answer("predict", *rest, str(prices), rc=2)


def check_files(out: Path, cells: list[dict[str, Any]]) -> None:
    """The same numbers in three forms: CSV, steps/s for Gavel, seconds of a step for Sia."""
    table = list(csv.DictReader((out / "throughput.csv").open()))
    assert [float(r["iteration_us"]) for r in table] == [c["iteration_us"] for c in cells]
    gavel = json.loads((out / "gavel.json").read_text())
    for cell in cells:
        job = f"('gpt-s (batch size {cell['batch']})', {cell['gpus']})"
        assert gavel[cell["gpu"]][job] == {"null": pytest.approx(1e6 / cell["iteration_us"])}
    placed = list(csv.DictReader((out / "sia/toy-gpu/gpt-s/placements.csv").open()))
    assert [(r["placement"], r["local_bsz"]) for r in placed] == list(product("12", "24"))
    assert float(placed[2]["step_time"]) == pytest.approx(cells[2]["iteration_us"] * 1e-6)
    assert 0 < float(placed[2]["sync_time"]) < float(placed[2]["step_time"])
    assert float(placed[0]["sync_time"]) == 0  # one GPU sends nothing
    scaled = list(csv.DictReader((out / "sia/toy-gpu/gpt-s/scalability.csv").open()))
    assert [(r["num_nodes"], r["num_replicas"]) for r in scaled[1:3]] == [("1", "1"), ("1", "2")]


def test_marks_say_what_the_marked_gpus_hold(bundle: Path) -> None:
    """124 M parameters with their state take 16 * 124 M = 2 GB: one GPU has 2 GB, the other 16."""
    small = bundle.parent / "small.yaml"
    small.write_text(yaml.safe_dump(replace(GPU, name="small", hbm_bytes=2e9).to_dict()))
    words = ["throughput", "gpt2-small", "--gpu", f"{small},toy-gpu", "--gpus", "1", "--batch", "1"]
    told = typed(*words, "--bundle", bundle).stdout
    found = predict("gpt2-small", gpu=str(small), batch=1, bundle=bundle)
    room = f"{found.memory_room_bytes / 1e9:.1f}"
    assert f"!: more than the {room} GB that a GPU has left for tensors" in told


def test_plans_are_spread_over_the_gpus() -> None:
    """Eight GPUs at tp=2 leave four replicas; three GPUs do not divide."""
    assert spread("tp=2,zero=1", 8) == "dp=4,tp=2,zero=1"
    assert spread("", 3) == "dp=3"
    with pytest.raises(ValueError, match="3 GPUs do not divide by 2"):
        spread("tp=2", 3)


def test_a_number_stated_twice_is_one_row(bundle: Path) -> None:
    """Two numbers of GPUs and one batch: two cells."""
    place = ["--gpu", "toy-gpu,toy-gpu", "--bundle", str(bundle), "--json"]
    cells = throughput(*place, "--gpus", "1,2,1", "--batch", "2,2")["cells"]
    assert [(cell["gpus"], cell["batch"]) for cell in cells] == [(1, 2), (2, 2)]


def test_a_forbidden_cell_has_a_reason(bundle: Path) -> None:
    """ZeRO needs two replicas: one GPU has no forecast, two have."""
    place = ["--gpu", "toy-gpu", "--bundle", str(bundle), "--json", "--batch", "2"]
    one, two = throughput(*place, "--gpus", "1,2", "--plan", "zero=3", rc=1)["cells"]
    assert (one["status"], one["iteration_us"]) == ("unsupported", None)
    assert "zero=3 needs dp > 1" in one["reason"] and two["status"] == "ok"
    assert "zero=3 needs dp > 1" in throughput(*place, "--gpus", "1", "--plan", "zero=3", rc=2)


def trace_line(kind: str, steps: int, gpus: int, arrival_s: float) -> str:
    fields = (kind, "python train.py", "--steps", 0, steps, gpus, 1, -1, arrival_s)
    return "\t".join(map(str, fields)) + "\n"


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    """Job a: 1 step/s on slow, 10 on fast; b: 1 and 2; c fits fast only."""
    path = tmp_path / "gavel.json"
    table = {
        "slow": {"('a', 1)": {"null": 1.0}, "('b', 1)": {"null": 1.0}, "('c', 1)": {"null": 0}},
        "fast": {"('a', 1)": {"null": 10.0}, "('b', 1)": {"null": 2.0}, "('c', 1)": {"null": 1}},
    }
    path.write_text(json.dumps(table))
    return path


def replay(rates: Path, trace: Path, rc: int = 0, gpus: str = "slow=1,fast=1") -> Any:
    done = typed("replay", trace, "--throughputs", rates, "--gpus", gpus, "--json", rc=rc)
    return {r["policy"]: r for r in json.loads(done.stdout)} if rc < 2 else done.stderr


def test_a_table_tells_the_scheduler_where_jobs_are_fast(rates: Path, tmp_path: Path) -> None:
    """Job a has 100 steps, b 20, both arrive at 0.

    Without the table a takes slow (100 s), b takes fast (10 s): a mean of 55 s. With it a takes
    fast (10 s), and b ends at 20 s on either: a mean of 15 s.
    """
    trace = tmp_path / "jobs.trace"
    trace.write_text(trace_line("a", 100, 1, 0) + trace_line("b", 20, 1, 0))
    found = replay(rates, trace)
    assert found == replay(tmp_path, trace)  # a folder of tables
    blind, best = found["fifo"], found["fifo, best GPU"]
    assert (blind["mean_completion_s"], blind["makespan_s"]) == (55, 100)
    assert (best["mean_completion_s"], best["makespan_s"]) == (15, 20)
    assert blind["gpu_hours"] == pytest.approx(110 / 3600)


def test_short_jobs_first(rates: Path, tmp_path: Path) -> None:
    """c (50 s) then c (10 s) on the one fast GPU: (50 + 60) / 2, shortest first (10 + 60) / 2."""
    trace = tmp_path / "jobs.trace"
    trace.write_text(trace_line("c", 50, 1, 0) + trace_line("c", 10, 1, 0))
    found = replay(rates, trace)
    assert found["fifo"]["mean_completion_s"] == 55
    assert found["shortest first, best GPU"]["mean_completion_s"] == 35


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b\n", "line 1: 9 fields separated by tabs, got 1"),
        (trace_line("a", 0, 1, 0), "steps and GPUs are 1 or more"),
        (trace_line("a", 0, 1, 0), "got 0, 1 and 0 s"),
        (trace_line("d", 1, 1, 0), "'d' on 1 GPUs; the tables have those of ['a', 'b', 'c']"),
        (trace_line("a", 1, 3, 0), "no throughput of 'a' on 3 GPUs; the tables have those on [1]"),
        (trace_line("c", 1, 1, float("nan")), "the arrival is 0 or later"),
        ("", "no jobs"),
    ],
)
def test_a_bad_trace_is_one_line(rates: Path, tmp_path: Path, line: str, message: str) -> None:
    trace = tmp_path / "jobs.trace"
    trace.write_text(line)
    told = replay(rates, trace, rc=2)
    assert message in told and len(told.strip().splitlines()) == 1


def test_tables_that_fit_no_job_are_one_line(rates: Path, tmp_path: Path) -> None:
    trace = tmp_path / "jobs.trace"
    trace.write_text(trace_line("c", 1, 1, 0))
    assert "fits none of slow" in replay(rates, trace, rc=2, gpus="slow=1")
    assert "each kind once as NAME=COUNT" in replay(rates, trace, rc=2, gpus="slow=1,slow=2")
    for text, message in (
        ('{"slow": {"x": {"null": 1}}}', "a job is ('TYPE', GPUS), got 'x'"),
        ("[1]", "expected an object: steps/s by GPU and by job"),
    ):
        rates.write_text(text)
        assert message in replay(rates, trace, rc=2)
