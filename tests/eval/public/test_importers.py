"""Small files in their owners' forms become rows counted by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints
from itercast.microbench.plan import ParallelPlan
from itercast.microbench.store import read_rows

OPS = "OPName,Latency,Device,Torch Version,CUDNN Version,Kernel Name,CUDA Version"
T4 = "Tesla T4,p2.1.0,8902,some_kernel,cu121"
COLLECT = "scripts/asplos/data/dataset/train/collect"


def put(path: Path, text: str) -> Path:
    """A file with its folders; packed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def holds(row: Mapping[str, Any], **expected: Any) -> None:
    """Every expected value stands in the row."""
    assert {name: row[name] for name in expected} == expected


def test_labels_of_neusight_are_iterations_that_can_be_built(tmp_path: Path) -> None:
    """Global batch 8 over dp=4 is 2 a replica; the configuration travels with the row."""
    base = tmp_path / "scripts/asplos"
    put(base / "data/DLmodel_configs/tiny.json", '{"architectures": ["GPT2LMHeadModel"]}')
    label = json.dumps({"e2e_latency": 3.0, "fw_latency": 1.0, "bwall_latency": 2.0})
    for name in ("tiny-train-64-8-dp4", "tiny-inf-64-8-fusion", "tiny-train-64-8-pp4_1"):
        put(base / "label/NVIDIA_A100-SXM4-40GB" / f"{name}.json", label)
    put(base / "label/NVIDIA_A100-SXM4-40GB/tiny-train-64-9-dp4.json", label)
    put(base / "label/NVIDIA_A100-SXM4-40GB/other-train-64-8.json", label)
    put(base / "label/Sharp_Calculator/tiny-train-64-8.json", label)
    found = read_source("neusight", tmp_path, Hints())
    rows = found.rows["iteration"].set_index("plan")
    holds(rows.loc["dp=4"], batch=2, seq=64, world_size=4, mode="train", time_us=3000.0)
    holds(rows.loc["dp=4"], loss="none", optimizer="none", attn="eager", compile=False)
    holds(rows.loc["dp=4"], forward_us=1000.0, backward_us=2000.0, gpu="a100-sxm-40gb")
    holds(rows.loc[""], batch=8, mode="infer", compile=True, engine="compile", world_size=1)
    assert ParallelPlan.parse("pp=4,micro=1").world_size == rows.loc["pp=4,micro=1", "world_size"]
    assert json.loads(rows.loc[""]["hf_config"]) == {"architectures": ["GPT2LMHeadModel"]}
    assert found.dropped == {
        "unknown gpu: 'Sharp_Calculator'": 1,
        "batch is not a positive whole number": 1,
        "no readable file '../../data/DLmodel_configs/other.json'": 1,
    }


def test_tables_of_aiconfigurator_without_a_family_are_counted(tmp_path: Path) -> None:
    """Attention with a window, which no parameter says, and a file of other ops."""
    data = tmp_path / "systems/data/h100_sxm"
    common = {"framework": "VLLM", "version": "0.24.0", "latency": 0.25}
    heads = {"batch_size": 2, "isl": 16, "num_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    heads |= {"attn_dtype": "bfloat16", "step": 0, "window_size": 128}
    for name, columns in (("attention/vllm/2/context_attention", heads), ("moe/vllm/1/moe", {})):
        path = data / f"{name}_perf.parquet"
        path.parent.mkdir(parents=True)
        pd.DataFrame([{**common, **columns}]).to_parquet(path)
    assert read_source("aiconfigurator", tmp_path, Hints()).dropped == {
        "attention with a sliding window: no such parameter in the family": 1,
        "file not imported: tables of other ops": 1,
    }


def test_import_writes_a_dataset_and_again_the_same(tmp_path: Path) -> None:
    """Rows, cards with licence and hardware, counts; a second import replaces the first."""
    put(tmp_path / COLLECT / "ln/p2.1.0/x.csv", f"{OPS},B,H\nln,1,{T4},4,6\nln,-1,{T4},4,6\n")
    put(tmp_path / ".git/HEAD", "ref: refs/heads/main\n")
    put(tmp_path / ".git/refs/heads/main", "0123456789" * 4)
    out = tmp_path.with_name("imported")
    words = ["import", "neusight", str(tmp_path), "--out", str(out), "--json"]
    for _ in range(2):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["rows"] == {"norm": 1}
    assert report["dropped"] == {"time is not a positive number below 1e+12 us": 1}
    assert len(read_rows([out], "norm")) == 1
    card = yaml.safe_load((out / "norm/t4/neusight/card.yaml").read_text())
    assert (card["licence"], card["commit"]) == ("MIT", "0123456789" * 4)
    assert "https://github.com/sitar-lab/NeuSight" in card["where"]
    assert card["hardware"]["name"] == "t4"
    assert card["rows"] == {"ok": 1}
    assert card["dropped_in_this_import"] == report["dropped"]


@pytest.mark.parametrize(
    "source", ["neusight", "aiconfigurator", "vidur", "nccl-tests", "kineto", "iterations"]
)
def test_a_folder_of_something_else_is_refused_in_one_line(tmp_path: Path, source: str) -> None:
    put(tmp_path / "some/file.py", "1")
    result = CliRunner().invoke(app, ["import", source, str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "looked for" in result.output


def test_an_unknown_source_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    for words, message in (
        (["habitat", str(tmp_path)], "unknown source 'habitat'; known:"),
        (["vidur", str(tmp_path / "none")], "no such file or folder"),
        (["kineto", str(tmp_path), "--gpu", "tpu"], "unknown gpu 'tpu'; known:"),
    ):
        result = CliRunner().invoke(app, ["import", *words])
        assert (result.exit_code, message in result.output) == (2, True)
