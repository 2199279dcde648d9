"""Small files in their owners' forms become rows counted by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from itercast.__main__ import app
from itercast.eval.public.readers import read_source
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.ops import families
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


def only(imported: Imported, family: str) -> dict[str, Any]:
    """The single row of a family."""
    (row,) = imported.rows[family].to_dict("records")
    return row


def holds(row: Mapping[str, Any], **expected: Any) -> None:
    """Every expected value stands in the row."""
    assert {name: row[name] for name in expected} == expected


def test_a_linear_layer_of_neusight_is_a_product_with_a_transposed_weight(tmp_path: Path) -> None:
    """(B, M, N) through N -> K: B*M rows, N summed; 0.05 ms are 50 us; plain and packed alike."""
    text = f"{OPS},B,M,N,K\nlinear,0.05,{T4},2,58,13,141\n"
    put(tmp_path / COLLECT / "linear/p2.1.0/Tesla T4.csv.gz", text)
    put(tmp_path / COLLECT / "linear/p2.1.0/plain.csv", text)
    found = read_source("neusight", tmp_path, Hints()).rows["gemm"]
    assert len(found) == 2
    row = found.to_dict("records")[0]
    holds(row, op="addmm", m=116, n=141, k=13, batch=1, layout="nt", dtype="fp32")
    holds(row, gpu="t4", stack="torch-2.1.0+cu121 cudnn-8902", timer="with_launch", time_us=50.0)
    holds(row, origin=f"{COLLECT}/linear/p2.1.0/Tesla T4.csv.gz:2", kernel="some_kernel")


@pytest.mark.parametrize(
    ("table", "family", "expected"),
    [
        ("B,M,N,K\nbmm,1,{},3,5,7,11", "gemm", {"op": "bmm", "m": 5, "n": 11, "k": 7, "batch": 3}),
        ("B,H\nadd,1,{},4,6", "elementwise", {"op": "add", "numel": 24, "inner": 24, "tensors": 2}),
        ("B,H\ndivu,1,{},4,6", "elementwise", {"op": "mul", "form": "scalar", "tensors": 1}),
        ("B,H\npow,1,{},4,6", "elementwise", {"op": "pow_general", "form": "same", "tensors": 2}),
        ("B,H\ngelu,1,{},4,6", "elementwise", {"op": "gelu", "form": "same", "tensors": 1}),
        ("B,H\nsoftmax,1,{},4,6", "reduction", {"op": "_softmax", "outer": 4, "size": 6}),
        ("B,H\nln,1,{},4,6", "norm", {"op": "layer", "rows": 4, "cols": 6}),
    ],
)
def test_ops_of_neusight_get_the_names_of_captured_calls(
    tmp_path: Path, table: str, family: str, expected: dict[str, Any]
) -> None:
    op = table.split("\n")[1].split(",")[0]
    put(tmp_path / COLLECT / op / "p2.1.0/x.csv", f"{OPS},{table.format(T4)}\n")
    row = only(read_source("neusight", tmp_path, Hints()), family)
    holds(row, **expected)
    assert {f.name for f in fields(families()[family].params)} <= set(row)


def test_a_convolution_of_neusight_is_square(tmp_path: Path) -> None:
    """A padding of 0 is a value, not a missing one."""
    head = "B,Input_Channel,Output_Channel,Kernel_Szie,Input_Size,Stride,Padding"
    put(tmp_path / COLLECT / "conv/p2.1.0/x.csv", f"{OPS},{head}\nconv,2,{T4},8,3,16,5,32,2,0\n")
    row = only(read_source("neusight", tmp_path, Hints()), "conv")
    holds(row, batch=8, in_channels=3, out_channels=16, h=32, w=32, kernel_h=5, kernel_w=5)
    holds(row, stride=2, padding_h=0, padding_w=0, time_us=2000.0, op="forward")


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


def perf(path: Path, **columns: Any) -> None:
    """A table of AIConfigurator."""
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {"framework": "VLLM", "version": "0.24.0", "latency": 0.25}
    pd.DataFrame([{**common, **columns}]).to_parquet(path)


def test_tables_of_aiconfigurator(tmp_path: Path) -> None:
    """message_size counts elements: 1024 of 2 bytes; 0.25 ms are 250 us."""
    data = tmp_path / "systems/data/h100_sxm"
    perf(data / "gemm/vllm/1/gemm_perf.parquet", gemm_dtype="bfloat16", m=3, n=5, k=7)
    nccl = {"op_name": "alltoall", "nccl_dtype": "half", "num_gpus": 8, "message_size": 1024}
    perf(data / "comm/nccl/1/nccl_perf.parquet", **nccl)
    heads = {"batch_size": 2, "isl": 16, "num_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    heads |= {"attn_dtype": "bfloat16", "step": 0, "window_size": 0}
    perf(data / "attention/vllm/1/context_attention_perf.parquet", **heads)
    perf(data / "attention/vllm/2/context_attention_perf.parquet", **heads | {"window_size": 128})
    perf(data / "moe/vllm/1/moe_perf.parquet", m=1)
    found = read_source("aiconfigurator", tmp_path, Hints())
    holds(only(found, "gemm"), op="mm", m=3, n=5, k=7, batch=1, layout="nt", dtype="bf16")
    holds(only(found, "gemm"), gpu="h100-sxm-80gb", stack="vllm-0.24.0", time_us=250.0)
    row = only(found, "collective")
    holds(row, op="all_to_all", message_bytes=2048, world_size=8, ranks_per_node=8)
    holds(row, node="dgx-h100", link="nvlink", dtype="fp16")
    row = only(found, "attention")
    holds(row, batch=2, heads=8, kv_heads=4, q_len=16, kv_len=16, head_dim=64, causal=True)
    assert found.dropped == {
        "attention with a sliding window: no such parameter in the family": 1,
        "file not imported: tables of other ops": 1,
    }


def test_networks_of_vidur(tmp_path: Path) -> None:
    """Ranks above 0 repeat rank 0; of nodes with one device each the network is not stated."""
    head = "time_stats.all_reduce.median,rank,num_workers,size,collective,devices_per_node"
    lines = ["0.043,0,2,2048,all_reduce,1", "0.044,1,2,2048,all_reduce,1"]
    lines += ["0.02,0,4,4096,all_reduce,4"]
    place = tmp_path / "data/profiling/network/a40_pairwise_nvlink/all_reduce.csv"
    put(place, "\n".join([head, *lines, ""]))
    found = read_source("vidur", tmp_path, Hints())
    (within,) = found.rows["collective"].to_dict("records")
    holds(within, gpu="a40", world_size=4, ranks_per_node=4, message_bytes=4096)
    holds(within, time_us=20.0, dtype="fp16", link="bridged")  # a bridge joins two
    reasons = {"row of a rank other than 0": 1, "nodes joined by an unknown network": 1}
    assert found.dropped == reasons


def test_blocks_of_vidur(tmp_path: Path) -> None:
    """Width 64, 4 heads and 2 key/value heads over 2 ranks: (4 + 2*2) * 16 / 2 = 64 columns."""
    ops = ("attn_pre_proj", "mlp_up_proj", "mlp_act", "attn_post_proj", "mlp_down_proj", "add")
    head = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens"
    head += ",num_tensor_parallel_workers,time_stats.input_layernorm.median"
    head += "".join(f",time_stats.{op}.median" for op in ops)
    gated, plain = (f"4,2,64,256,{gate},10,2,,0.1,0.2,0.3,,," for gate in ("True", "False"))
    table = "\n".join([head, gated, plain, ""])
    put(tmp_path / "data/profiling/compute/a100/some/model/mlp.csv", table)
    found = read_source("vidur", tmp_path, Hints())
    gemm = found.rows["gemm"].sort_values(["module", "n"]).to_dict("records")
    assert [(r["module"], r["m"], r["n"], r["k"]) for r in gemm] == [
        ("attn_pre_proj", 10, 64, 64),
        ("attn_pre_proj", 10, 64, 64),
        ("mlp_up_proj", 10, 128, 64),
        ("mlp_up_proj", 10, 256, 64),  # gated: two halves
    ]
    holds(only(found, "elementwise"), op="gelu", numel=1280, tensors=1, time_us=300.0)
    assert found.dropped == {"time is not a positive number below 1e+12 us": 10}  # of five ops


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
