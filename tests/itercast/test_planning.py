"""`itercast plan` as a user meets it, with a bundle that knows no family: roofline throughout."""

import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from plan_case import GPU, forecast_of, legal_plans, search_of
from typed_commands import answer_to, typed
from typer.testing import CliRunner, Result

from itercast.command_line import app
from itercast.commands.plan import plans_table
from itercast.commands.script_case import model_lines
from itercast.compose.plan_search.search import best_plans
from itercast.learners.bundle import Bundle

run = CliRunner()


@pytest.fixture
def bundle(tmp_path: Path) -> str:
    Bundle(models={}, gpus={GPU.name: GPU}).save(tmp_path / "bundle")
    return str(tmp_path / "bundle")


def asked(bundle: str, gpus: int, *more: str) -> Result:
    """What `plan` answers for a small GPT."""
    words = ["plan", "gpt-s", "--gpu", GPU.name, "--gpus", str(gpus), "--bundle", bundle]
    return typed(*words, *more)


TRAINING = """
import sys, torch
width = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width))
optimizer = torch.optim.AdamW(model.cuda().parameters())
rollout = torch.nn.Linear(1, 1).cuda()
while True:
    rollout(torch.ones(1, 1).cuda())
    for epoch in range(2):
        torch.nn.functional.mse_loss(model(torch.randn(16, width).cuda()), torch.ones(1)).backward()
        optimizer.step()
"""


def test_the_plans_of_a_script(
    bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged: 8 processes of it have 16 samples each, and 2 * 4 * 64**2 weights, 5 * 64 biases.

    An iteration is two updates, of each of which the model's step is told. The second time its
    process is not started: all captures are kept.
    """
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "cache"))
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    words = ["plan", str(script), "--gpu", GPU.name, "--gpus", "8", "--bundle", bundle, "--json"]
    found = answer_to(*words, "--", "64")
    assert found["script"]["parameters"] == 8 * 64**2 + 5 * 64 and found["global_batch"] == 8 * 16
    assert found["plans"][0]["world_size"] == 8 and found["command"].endswith("-- 64")
    assert "for each of 2 updates" in model_lines(found["script"])[1]
    assert found["script"]["model_us"] == pytest.approx(found["script"]["script_us"], rel=0.15)
    monkeypatch.setattr("subprocess.Popen", None)
    again = json.loads(run.invoke(app, [*words, "--", "64"]).stdout.splitlines()[-1])
    assert again["plans"] == found["plans"]
    (same,) = (p for p in found["plans"] if p["plan"] == "dp=8")
    what_if = ["run", *words[2:], "--plan", "dp=8", str(script), "64"]
    told = json.loads(run.invoke(app, what_if).stdout.splitlines()[-1])
    assert told["iteration_us"] == same["iteration_us"] and told["script"]["model"] == "Sequential"
    what_if[what_if.index("8")] = "16"
    wrong = typed(*what_if, rc=2)
    assert "plan 'dp=8' is of 8 GPUs, not of 16" in wrong.stderr
    assert "No such option: --gpuz" in typed("plan", "gpt-s", "--gpuz", "8", rc=2).stderr
    refused = typed(*words[:1], "gpt-s", *words[2:], "--", "64", rc=2)
    assert "are of a script, not of gpt-s" in refused.stderr


def test_a_script_gets_the_options_that_commands_do_not_know(tmp_path: Path) -> None:
    """As behind ``--``, in ``plan`` and ``explain`` anywhere; in ``run`` all behind it are its."""
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    for command in (("plan", "--gpus=8"), ("explain",)):
        words = (*command, "--gpu=h100-sxm-80gb")
        told = typed(*words, str(script), "--width", "8", "--seq", "4", rc=2).stderr
        assert "exits with '--width 8'" in told
        told = typed(*words, str(script), "--width", "8", "--", "--seq", "4", rc=2).stderr
        assert "exits with '--width 8 --seq 4'" in told
    for between in ((), ("--",)):
        words = ("run", "--gpu=h100-sxm-80gb", str(script), *between, "--seq", "4", "--", "5")
        assert "exits with '--seq 4 -- 5'" in typed(*words, rc=2).stderr


def test_the_best_plans_are_printed_and_logged(
    bundle: str, mlflow_store: str, tmp_path: Path
) -> None:
    """Mixed precision is part of every plan: its weights in fp32 take more memory than bf16."""
    from mlflow.tracking import MlflowClient

    result = asked(bundle, 2, "--json", "--dtype", "bf16")
    assert result.stderr.splitlines()[-1].startswith("logged to MLflow at sqlite:///")
    assert "INFO" not in result.stderr
    plans = json.loads(result.stdout.splitlines()[-1])["plans"]
    times = [p["iteration_us"] for p in plans]
    assert 1 < len(times) <= 10 and times == sorted(times)
    assert {p["world_size"] for p in plans} == {2}
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("plans")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    logged = {r.data.params["plan"] for r in runs if "plan" in r.data.params}
    assert logged == {p["plan"] for p in plans}
    bytes_of = {p["plan"]: p["memory_bytes"] for p in plans}
    prices = tmp_path / "prices.yaml"
    prices.write_text(f"{GPU.name}: 3.6\n")  # 0.001 USD a second
    words = ["--json", "--dtype", "bf16", "--amp", "--prices", str(prices)]
    mixed = json.loads(asked(bundle, 2, *words).stdout.splitlines()[-1])["plans"]
    usd = [p["price"]["usd_per_step"] for p in mixed]
    assert usd == pytest.approx([2e-3 * p["iteration_us"] / 1e6 for p in mixed])
    more = {p["plan"]: p["memory_bytes"] for p in mixed}
    both = [(bytes_of[p], more[f"{p},amp"]) for p in bytes_of if f"{p},amp" in more]
    assert both and all("amp" in p for p in more) and all(one < other for one, other in both)


def test_a_page_shows_all_plans_tried_and_the_simplest_is_marked(
    bundle: str, mlflow_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table fits 80 columns, with a line for each plan."""
    monkeypatch.setenv("COLUMNS", "80")
    page = tmp_path / "plans.html"
    told = asked(bundle, 4, "--report", str(page)).stdout
    above, *lines = told.splitlines()
    last_of_text = next(i for i, line in enumerate(lines) if line.startswith("  bundle "))
    assert max(map(len, lines[last_of_text + 1 :])) <= 80
    assert "fp32 throughout" in above
    assert " *" in told and "the simplest plan that may be as good" in told
    text = page.read_text()
    for part in ("All plans tried", "Where the time of the best plans goes", "Memory over a step"):
        assert part in text
    found = json.loads(asked(bundle, 4, "--json").stdout.splitlines()[-1])
    plans = [line.split()[0] for line in lines if line.strip().startswith("dp=")]
    assert plans == [p["plan"] for p in found["plans"]] and found["simplest"] in plans
    assert f'<td class=words data-head="plan">{found["simplest"]}</td>' in text


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        (("too close", "does not fit", "fits", "fits"), "surely fits: dp=2,tp=4, 3.0 ms"),
        (("too close", "too close"), "none of these plans surely fits"),
        (("fits", "too close"), ""),
    ],
)
def test_the_fastest_plan_that_surely_fits_is_said_where_the_first_may_not(
    verdicts: tuple[str, ...], said: str
) -> None:
    """Steps of 1, 2, 3... ms."""
    facts = {"case": "x", "gpus": 8, "gpu": "a10", "objective": "time", "considered": 9}
    facts |= {"simulated": 9, "seconds": 1.0}
    found = [
        forecast_of(plan=f"dp={n},tp=4,node=y", iteration_us=1e3 * (n + 1), **_memory(verdict))
        for n, verdict in enumerate(verdicts)
    ]
    caption = str(plans_table(facts, found, [{}] * len(found)).caption)
    assert said in caption and ("surely" in caption) == bool(said)


def _memory(verdict: str) -> dict[str, object]:
    return {"memory_verdict": verdict, "fits": verdict != "does not fit"}


def test_a_configuration_is_planned(bundle: str, mlflow_store: str, tmp_path: Path) -> None:
    """Eight samples on each of two GPUs."""
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 2, "n_layer": 2}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps({**config, "vocab_size": 100, "n_positions": 32}))
    words = ["plan", "--gpu", GPU.name, "--gpus", "2", "--bundle", bundle, "--json"]
    size = ["--hf-config", str(path), "--batch", "8", "--seq", "32"]
    found = answer_to(*words, *size)
    assert (found["case"], found["global_batch"], found["seq"]) == ("tiny", 16, 32)
    assert any("dp=2" in p["plan"] for p in found["plans"])


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(("gpus", "least", "moved"), [(2, 20e9, True), (4, 10e9, False)])
def test_adapters_of_a_model_in_four_bits_are_planned(
    mlflow_store: str, tmp_path: Path, gpus: int, least: float, moved: bool
) -> None:
    """QLoRA of 70 billion weights on GPUs of 25.8 GB: half of them do not fit beside a batch.

    Shards are in host memory on two GPUs alone. ``predict`` says the same of a plan. Weights in 4
    bits are not cut by tp, which is not proposed.
    """
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA_70B))
    step = ["--hf-config", str(path), "--lora", "rank=64,layers=all-linear,weights=nf4-dq"]
    step += ["--seq", "2048", "--batch", "1", "--dtype", "bf16", "--gpu", "rtx-4090", "--json"]
    found = answer_to("plan", *step, "--gpus", str(gpus))
    assert found["lora"] in found["command"] and not any("tp=" in p["plan"] for p in found["plans"])
    best = found["plans"][0]
    assert best["fits"] and ("offload=parameters" in best["plan"]) == moved
    assert (best["host_memory_bytes"] > least) == moved
    plan, batch = best["plan"], gpus // int(best["plan"].removeprefix("dp=").partition(",")[0])
    step[step.index("--batch") + 1] = str(batch)
    told = json.loads(run.invoke(app, ["predict", *step, "--plan", plan]).stdout.splitlines()[-1])
    assert told["iteration_us"] == best["iteration_us"]
    assert told["memory_bytes"] == best["memory_bytes"]


def test_an_interrupted_search_keeps_what_it_has_found(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at the third plan of the list: the best of the first three are simulated."""
    told: list[int] = []

    def stop(count: int, best: object) -> None:
        told.append(count)
        if told == [1, 2, 3]:
            raise KeyboardInterrupt

    found = best_plans(search_of(), 2, "time", on_plan=stop)
    assert found.stopped and found.considered == 3
    listed = itertools.islice(legal_plans(search_of(), 2, "time").listed, 3)
    assert 0 < len(found.best) <= 3 and {s.plan for s in found.best} <= set(listed)
    assert not best_plans(search_of(), 2, "time").stopped
    name = "itercast.compose.plan_search.search.best_plans"
    monkeypatch.setattr(name, lambda *asked, on_plan: found)
    words = ["plan", "gpt-s", "--gpu", GPU.name, "--gpus", "2", "--bundle", bundle]
    done = run.invoke(app, words)
    assert done.exit_code == 130 and "3 plans considered" in done.stdout
    assert done.stderr.endswith("itercast: stopped; the plans are the best so far\n")


def test_plans_are_printed_where_mlflow_is_out_of_reach(
    bundle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer, then one warning, of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        words = ["plan", "gpt-s", "--gpu", GPU.name, "--gpus", "2", "--bundle", bundle, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "itercast", *words], capture_output=True, text=True
        )
    assert done.returncode == 0 and json.loads(done.stdout)["plans"]
    (warning,) = [line for line in done.stderr.splitlines() if "MLflow" in line]
    assert warning.startswith(f"not logged to MLflow at http://127.0.0.1:{port}: ")


def test_a_cluster_of_unlike_gpus_is_planned(tmp_path: Path, mlflow_store: str) -> None:
    """As one of several plans, and a stated one, whose groups may have unequal shares."""
    path = tmp_path / "both.yaml"
    groups = "groups: {a: {gpu: h100-sxm-80gb, count: 1}, b: {gpu: a100-sxm-80gb, count: 1}}\n"
    path.write_text(groups + "links: [{between: [a, b], bytes_per_s: 1e9}]\n")
    words = ["plan", "gpt-s", "--cluster", str(path), "--batch", "2"]
    result = typed(*words)
    assert "gpt-s on 2 x both" in result.output
    found = typed("predict", "gpt-s", "--cluster", str(path), "--plan", "dp=2")
    assert "in equal shares" in found.output
