"""The command line as a user meets it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from itercast.__main__ import app

run = CliRunner()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["list", "dogs"],
            "cannot list 'dogs'; known: gpus, nodes, hosts, stacks, cases, families, bundles",
        ),
        (["collect", "--device", "tpu"], "device 'tpu': allowed are cpu and cuda"),
        (["collect", "--budget", "soon"], "budget 'soon': expected a duration like 20ms, 90s"),
        (["collect", "--family", "gem"], "unknown family 'gem'; known:"),
        (["predict", "gpt9"], "unknown case 'gpt9'; known:"),
        (["predict", "gpt-s", "--plan", "dp=0"], "dp is an integer from 1 to 99999999, got '0'"),
        (["predict", "gpt-s", "--bundle", "nowhere"], "bundle 'nowhere': no readable bundle.json"),
        (
            ["predict", "gpt-s", "--gpu", "a10", "--host", "nuc"],
            "unknown host 'nuc'; known: ['usual', ",
        ),
        (["predict", "gpt-s", "--host", "modal"], "is a CPU, which is its own host"),
        (["train", "--data", "nowhere", "--out", "x"], "data 'nowhere': no such folder"),
        (["plan", "gpt-s", "--gpu", "a10", "--gpus", "0"], "'--gpus': Input should be greater"),
        (["predict", "gpt-s", "--batch", "-1"], "equal to 1, got '-1'"),
        (["train", "--out", "x", "--storage", "sqlite:///t.db"], "it needs --trials, 1 or more"),
        (["predict", "gpt-s", "--cluster", "no.yaml"], "cluster file 'no.yaml': no such file"),
        (["predict", "gpt-s", "--plan", "pp=2,micro=2,layers=9+9"], "are 18 layers, the model has"),
        (["evaluate", "--measured", "nowhere"], "measured 'nowhere': no such folder"),
        (["price", "no.parquet", "--out", "x"], "rows 'no.parquet': no such file"),
        (["calibrate", "no.parquet", "--out", "x"], "rows 'no.parquet': no such file"),
        (["plan", "gpt-s", "--gpus", "2"], "plan takes --gpu and --gpus, or --cluster"),
        (["predict", "gpt-s", "--colour", "red"], "No such option: --colour"),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    result = run.invoke(app, words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_lists() -> None:
    assert {"gpus", "cases"} < set(run.invoke(app, ["list"]).output.split())
    assert "gpt-s" in run.invoke(app, ["list", "cases"]).output.split()
    assert "gemm" in run.invoke(app, ["list", "families"]).output.split()
    assert "dgx-h100" in run.invoke(app, ["list", "nodes"]).output.split()


def test_predict_takes_one_model() -> None:
    for words in ([], ["gpt-s", "--hf-config", "x.json"], ["gpt-s", "--model", "a:b"]):
        result = run.invoke(app, ["predict", *words])
        assert result.exit_code == 2
        assert "a model is one of CASE, --hf-config and --model" in result.output
