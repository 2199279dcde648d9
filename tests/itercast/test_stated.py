"""Answers say what they are of: precision, sizes, what is unusual, and how to ask again."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from plan_case import GPU
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.commands.script_case import model_lines
from itercast.compose.predict import predict
from itercast.compose.programs.samples import Batch
from itercast.compose.target import step_dtype
from itercast.learners.bundle import Bundle
from itercast.microbench.hardware.spec import load_gpu
from itercast.stated import assumes, script_line

run = CliRunner()
ON_H100 = "--gpu h100-sxm-80gb"
REPEATED = [
    f"gpt-s {ON_H100}",
    f"gpt-s {ON_H100} --plan dp=2,zero=1,amp --global-batch 8 --seq 32",
    "resnet-s --gpu v100-sxm-16gb --plan amp --channels-last --optimizer sgd",
    "gpt-s --gpu a10 --dtype bf16 --compile --cuda-graph --attn eager --host modal",
    "gpt-s --mode infer --stack torch-2.2.1+cu121 --gpu a100-sxm-80gb",
    "gpt-s --gpu a10 --lengths uniform:4:64 --batch 16",
    "--model sized_model:sized --batch 2 --seq 4 --gpu a10",
    "mlp-s",
]
MINE = """
import torch
def sized(batch, seq):
    net = torch.nn.Embedding(10, 4)
    return net, torch.zeros(batch, seq, dtype=torch.long), lambda y: y.sum()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sized_model.py").write_text(MINE)
    return tmp_path


def asked(command: str) -> Any:
    done = run.invoke(app, [*shlex.split(command.removeprefix("itercast ")), "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("words", REPEATED)
def test_a_forecast_can_be_repeated_from_its_json(words: str, here: Path) -> None:
    """By the command line that it holds, in which no value is left to a default."""
    first = asked(f"predict {words}")
    again = asked(first["command"])
    assert again == first
    assert {"gpu", "bundle", "mode", "dtype", "optimizer", "plan", "stack"} <= {*first["question"]}


def test_mixed_precision_is_bf16_or_what_the_gpu_has(here: Path) -> None:
    """V100 has tensor cores for fp16 alone; a stated dtype stays."""
    h100, v100 = load_gpu("h100-sxm-80gb"), load_gpu("v100-sxm-16gb")
    assert step_dtype("", True, [h100]) == "bf16"
    assert step_dtype(None, True, [h100, v100]) == "fp16"
    assert step_dtype("fp16", True, [h100]) == "fp16"
    assert step_dtype("", False, [h100]) == ""
    times = [
        asked(f"predict gpt-s {ON_H100} --plan amp{d}")["iteration_us"]
        for d in ("", " --dtype bf16")
    ]
    assert times[0] == times[1]
    api = predict("gpt-s", gpu="h100-sxm-80gb", plan="amp")
    assert api.iteration_us == times[0]
    refused = run.invoke(app, shlex.split(f"predict gpt-s {ON_H100} --plan amp --dtype fp32"))
    assert refused.exit_code == 2 and "amp: dtype is bf16 or fp16" in refused.stderr


def test_batches_are_a_replicas_or_stated_for_all(here: Path) -> None:
    """Four samples on each of two replicas are eight in all."""
    each = asked(f"predict gpt-s {ON_H100} --plan dp=2 --batch 4")
    whole = asked(f"predict gpt-s {ON_H100} --plan dp=2 --global-batch 8")
    assert each["iteration_us"] == whole["iteration_us"]
    sizes = {"batch": 4, "replicas": 2, "global_batch": 8, "microbatches": 1, "seq": 64}
    assert each["step"] == whole["step"] == sizes
    for words, message in (
        ("--plan dp=2 --global-batch 7", "--global-batch 7 does not divide by dp=2"),
        ("--batch 4 --global-batch 8", "give one of them"),
    ):
        done = run.invoke(app, shlex.split(f"predict gpt-s {ON_H100} {words}"))
        assert done.exit_code == 2 and message in done.stderr


def test_a_search_takes_a_batch_of_each_gpu_or_of_all(here: Path, mlflow_store: str) -> None:
    Bundle(models={}, gpus={GPU.name: GPU}).save(here / "bundle")
    words = f"plan gpt-s --gpu {GPU.name} --gpus 2 --bundle bundle"
    found = asked(f"{words} --batch 4")
    assert found["global_batch"] == 8
    others = [asked(f"{words} --global-batch 8"), asked(found["command"])]
    times = [[one["iteration_us"] for one in some["plans"]] for some in (found, *others)]
    assert times[0] == times[1] == times[2]
    told = run.invoke(app, shlex.split(words)).stdout.splitlines()[0]
    assert told.startswith("train: 8 samples x 64 tokens over all GPUs, 4 a GPU; fp32 throughout")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            f"gpt-s {ON_H100} --plan dp=2,amp,node=dgx-h100",
            ["train: 4 samples x 64 tokens per replica, 8 in all; bf16 autocast, fp32 weights"],
        ),
        (f"gpt-s {ON_H100}", ["train: 4 sam", "note: fp32 leaves the tensor cores idle; usual is"]),
        (
            f"resnet-s {ON_H100}",
            [
                "train: ",
                "note: fp32 leaves the tensor",
                "note: convolutions are in fp32, too; torch",
            ],
        ),
        (
            f"gpt-s {ON_H100} --dtype bf16",
            ["train: ", "note: weights and optimizer state are in b"],
        ),
        (f"gpt-s {ON_H100} --dtype bf16 --mode infer", ["infer: 4 samples x 64 tokens"]),
        (f"gpt-s {ON_H100} --plan amp --attn eager", ["train: ", "note: attention is eager"]),
        (f"gpt-s {ON_H100} --plan amp,dp=2", ["train: "]),
        (
            f"gpt-s {ON_H100} --plan amp,pp=2,micro=1,node=dgx-h100",
            ["train: ", "note: 1 micro-batch for 2 stages"],
        ),
        ("mlp-s", ["train: 64 samples per replica; fp32 throughout, adamw, eager launches"]),
    ],
)
def test_a_line_above_the_answer_says_what_it_is_of(
    words: str, lines: list[str], here: Path
) -> None:
    """And a line for each thing that is unusual."""
    told = run.invoke(app, ["predict", *shlex.split(words)]).stdout.splitlines()
    *above, assumed = told[: 1 + next(i for i, line in enumerate(told) if "assumes" in line)]
    assert len(above) == len(lines)
    assert all(line.startswith(start) for line, start in zip(above, lines, strict=True))
    named = "host usual (--host), no node named (--node, or node= of --plan)"
    hint = f"{named}: a GPU has 450 GB/s nvlink among 2"
    assert assumed.endswith(hint) == ("dp=2" in words and "node=" not in words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "throughput gpt-s --gpu v100-sxm-16gb,a10 --gpus 1 --plan amp",
            "train: samples of 64 tokens, batch is a replica's; bf16 or fp16 autocast, fp32",
        ),
        ("explain mlp-s --gpu a10 --plan amp", "train: 64 samples per replica; bf16 autocast"),
        ("rl 3ms ppo-vector --gpu a10 --plan amp", "train: 64 samples per replica; bf16 autocast"),
    ],
)
def test_other_answers_begin_with_it(words: str, line: str, here: Path) -> None:
    done = run.invoke(app, shlex.split(words))
    assert done.stdout.startswith(line), done.output
    shares = r"\d+ % of the time rests on assumed numbers.* \(ops without a trained model: \d+ %\)"
    assert re.search(
        rf"\nassumes software torch-2.11 \(--stack\), [^;]*\n  (up to )?{shares}\n  b", done.stdout
    )


def test_a_table_of_throughput_says_the_command_that_repeats_it(here: Path) -> None:
    words = "throughput gpt-s --gpu v100-sxm-16gb,a10 --gpus 1,2 --plan amp --json"
    first = json.loads(run.invoke(app, shlex.split(words)).stdout)
    again = json.loads(run.invoke(app, [*shlex.split(first["command"])[1:], "--json"]).stdout)
    assert again == first and first["question"]["seq"] == 64
    assert first["assumes"].count("no node named") == 1  # of two networks
    assert [cell["batch"] for cell in first["cells"]] == [4] * 4  # the case's own


def test_a_node_is_told_once_for_forecasts_in_it_and_beyond() -> None:
    """One, 8 and 16 GPUs of a node of 8: the last tells what the others have, and the network."""
    plans = ("node=dgx-a100", "dp=8,node=dgx-a100", "dp=16,node=dgx-a100")
    told = assumes([predict("mlp-s", gpu="a100-sxm-80gb", plan=plan) for plan in plans])
    assert told.count("dgx-a100") == 1 and "nvlink among 8, 25 GB/s network beyond" in told


def test_tables_of_many_gpus_take_the_batch_of_a_replica(here: Path) -> None:
    done = run.invoke(app, shlex.split("throughput gpt-s --gpu a10 --gpus 1 --global-batch 8"))
    assert done.exit_code == 2 and "give --batch, that of a replica" in done.stderr


def test_a_model_found_in_a_script_is_told_with_what_plans_leave_out() -> None:
    facts = {"model": "Net", "batch": 8, "seq": 0, "micro": 2, "dtype": "fp32", "amp": False}
    facts |= {"parameters": 2_000_000, "optimizer": "sgd", "script_us": 1000.0, "model_us": 950.0}
    facts |= {"updates": 1, "recompute": False, "optimizer": "sgd+clip", "script_gpus": 1}
    facts |= {"notes": ["its optimizer Lion is taken to be adamw"]}
    found, step, note = model_lines(facts)
    size = "2.0 M parameters, 2 micro-batches of 8 samples a process"
    assert found == f"found Net: {size}, fp32, sgd+clip"
    whole, alone = step.split("; ")
    assert whole == "the whole script on one GPU: 1.00 ms"
    assert alone == "its model and loss alone, on which plans are based: 0.95 ms (-5.0 %)"
    assert note == "note: its optimizer Lion is taken to be adamw"
    found, step, _ = model_lines(facts | {"script_gpus": 4, "updates": 5, "recompute": True})
    assert found.endswith("sgd+clip, layers recomputed")
    whole, alone = step.split("; ")
    assert whole == "the whole script on 4 GPUs for each of 5 updates: 1.00 ms"
    assert alone == "its model and loss alone on one GPU, on which plans are based: 0.95 ms"


@pytest.mark.parametrize(
    ("own", "everyone", "ranks", "told"),
    [
        (2, 16, 8, "one of 8 ranks: 2 samples a rank, 16 in all; "),
        (2, 8, 16, "one of 16 ranks: 2 samples a rank, 8 in all, each shared by 4 ranks; "),
        (1, 1, 8, "one of 8 ranks: 1 sample a rank, 1 in all, each shared by 8 ranks; "),
        (2, 2, 1, "one process: 2 samples a rank; "),
        (0, 0, 8, "one of 8 ranks: samples not known; "),
    ],
)
def test_ranks_that_share_samples_are_counted(
    own: int, everyone: int, ranks: int, told: str
) -> None:
    batch = Batch(samples=everyone, tokens=0, own_samples=own, grouped=True)
    line = script_line("a.py", batch, [ranks], ["bf16"], "eager")
    assert line == f"a step of a.py as {told}matrix products in bf16, eager launches"
