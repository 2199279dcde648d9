"""Published runs of Megatron: models and plans from flags, and the word for what cannot be said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_importers_hostile import JUNK

from itercast.eval.public.readers import read_source
from itercast.eval.public.sources.megatron import attention_of, model_of, plan_of
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.plan import ParallelPlan

HEAD = "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
HEAD += "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
GPT: dict[str, Any] = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--max-position-embeddings": 1024,
    "--seq-length": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--tensor-model-parallel-size": 2,
    "--pipeline-model-parallel-size": 2,
    "--data-path": "my-gpt3_00_text_document",
    "--transformer-impl": "transformer_engine",
    "--bf16": True,
}


def vtrain(folder: Path, *lines: str) -> Imported:
    """The lines as vTrain's table, with its byte-order mark, imported."""
    (folder / "data").mkdir()
    table = folder / "data/ground_truth_single.csv"
    table.write_text(HEAD + "".join(f"{line}\n" for line in lines), encoding="utf-8-sig")
    return read_source("vtrain", folder, Hints())


def golden(folder: Path, flags: dict[str, Any], memory: str = "2e9") -> Imported:
    """One run with these flags, imported."""
    (folder / "model_configs.json.gz").write_bytes(
        gzip.compress(json.dumps({"c": yaml.safe_dump({"MODEL_ARGS": flags})}).encode())
    )
    runs = f"case,cfg,median_s,mem_max_allocated,date\ngpt/x,c,0.25,{memory},2025-04-06\n"
    (folder / "golden_runs.csv.gz").write_bytes(gzip.compress(runs.encode()))
    return read_source("megatron-lm", folder, Hints())


def test_a_row_of_vtrain_is_a_gpt_under_a_plan(tmp_path: Path) -> None:
    """16 sequences over 2 replicas are 8 each: 4 micro-batches of 2."""
    found = vtrain(tmp_path, "4,16,2,1024,16,24,1024,1,2,2,500.5", "4,16,2,1024,16,24,1024,2,2,1,1")
    row, split = found.rows["iteration"].to_dict("records")
    expected = {"plan": "dp=2,pp=2,micro=4,recompute=full", "batch": 8, "time_us": 500_500.0}
    expected |= {"world_size": 4, "dtype": "fp16", "attn": "eager", "seq": 1024}
    assert {name: row[name] for name in expected} == expected
    assert split["plan"] == "dp=2,tp=2,accumulate=4,recompute=full"
    config = json.loads(row["hf_config"])
    assert (config["n_layer"], config["n_embd"], config["n_inner"]) == (24, 1024, 4096)
    assert (config["vocab_size"], json.loads(split["hf_config"])["vocab_size"]) == (50304, 50432)
    assert "vocabulary" in row["doubts"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("4,16,2,1024,16,24,1024,2,2,2,1", "degrees of the plan do not fit the number of GPUs"),
        ("2,15,2,1024,16,24,1024,1,2,1,1", "micro is not a whole number"),
        ("2,16,2,1024,16,x,1024,1,2,1,1", "# layers is not a positive whole number"),
        ("2,16,2,1024,16,24,1024,1,2,1,-1", "time is not a positive number below 1e+12 us"),
    ],
)
def test_rows_of_vtrain_that_contradict_themselves_are_counted(
    tmp_path: Path, line: str, reason: str
) -> None:
    found = vtrain(tmp_path, line, "2,16,2,1024,16,24,1024,1,2,1,1")
    assert len(found.rows["iteration"]) == 1
    assert found.dropped == {reason: 1}


def test_all_reduce_of_vtrain_is_nccl_tests_in_place(tmp_path: Path) -> None:
    """52,000 ns are 52 us; 4 ranks by the file's name; one dtype of nccl-tests is unknown."""
    folder = tmp_path / "trace/a100"
    folder.mkdir(parents=True)
    lines = ["size(B),count,type,time(ns),busbw(GB/s),time(ns),busbw(GB/s)"]
    lines += ["1048576,262144,float,50000,30.1,52000,31.2", "2097152,9,quad,1,1,1,1", ""]
    (folder / "AR_GPU4_1M_1024M_LUT.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (folder / "AR_GPU_LUT").write_text("\n".join(lines))
    found = vtrain(tmp_path)
    (row,) = found.rows["collective"].to_dict("records")
    expected = {"op": "all_reduce", "message_bytes": 2**20, "time_us": 52.0, "dtype": "fp32"}
    expected |= {"world_size": 4, "ranks_per_node": 4, "node": "dgx-a100", "stack": "nccl"}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {
        "unknown type: 'quad'": 1,
        "the header, which names two columns alike": 1,
        "file in an unknown folder or of an unknown name": 1,  # without a number of GPUs
    }


def test_a_golden_run_is_a_model_under_a_plan(tmp_path: Path) -> None:
    """8 GPUs / (2 * 2) are two replicas of 16 sequences: 4 micro-batches."""
    (row,) = golden(tmp_path, GPT).rows["iteration"].to_dict("records")
    expected = {"plan": "dp=2,tp=2,pp=2,micro=4", "batch": 16, "time_us": 250_000.0}
    expected |= {"d_model": 512, "dtype": "bf16", "gpu": "a100-sxm-80gb"}
    assert {name: row[name] for name in expected} == expected
    assert not row["memory_bytes"] > 0  # it is the last stage's


def test_peak_memory_is_taken_where_all_ranks_are_alike(tmp_path: Path) -> None:
    found = golden(tmp_path, GPT | {"--pipeline-model-parallel-size": 1})
    assert found.rows["iteration"]["memory_bytes"].tolist() == [2e9]


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ({"--num-layers-per-virtual-pipeline-stage": 1}, "schedule=interleaved:6"),
        ({"--num-virtual-stages-per-pipeline-rank": 2}, "schedule=interleaved:2"),
        ({"--sequence-parallel": True}, "sp"),
        ({"--use-distributed-optimizer": True}, "zero=1"),
        ({"--data-parallel-sharding-strategy": "optim_grads_params"}, "zero=3"),
        ({"--recompute-granularity": "full"}, "recompute=full"),
        ({"--decoder-first-pipeline-num-layers": 2}, "first=2"),
        ({"--decoder-last-pipeline-num-layers": 4}, "last=4"),
    ],
)
def test_flags_are_options_of_a_plan(flags: dict[str, Any], plan: str) -> None:
    text, dp = plan_of(GPT | flags)
    assert plan in text.split(",")
    assert dp == 2
    assert ParallelPlan.parse(text).world_size == 8


@pytest.mark.parametrize(
    ("instances", "keys"), [(1, ["zero=1"]), (2, ["zero=1", "hsdp=2"]), (4, [])]
)
def test_instances_of_the_optimizer_shard_by_themselves(instances: int, keys: list[str]) -> None:
    """Four replicas in two instances shard among two; each by itself shards nothing."""
    flags = {"--pipeline-model-parallel-size": 1, "--use-distributed-optimizer": True}
    text, _ = plan_of(GPT | flags | {"--num-distributed-optimizer-instances": instances})
    assert [part for part in text.split(",") if part.startswith(("zero", "hsdp"))] == keys
    assert ParallelPlan.parse(text).world_size == 8


def test_context_parallelism_leaves_one_replica() -> None:
    assert plan_of(GPT | {"--context-parallel-size": 2}) == ("tp=2,pp=2,cp=2,micro=8", 1)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"--num-experts": 8}, r"run has experts without a gate \(--num-experts\)"),
        ({"--img-h": 336}, "run has images beside text"),
        ({"--is-hybrid-model": True}, "run has state-space layers"),
        ({"--spec": "[a b]"}, "run has a layer specification"),
        (
            {"--account-for-embedding-in-pipeline-split": True},
            "run has an embedding counted as a layer",
        ),
        (
            {
                "--decoder-first-pipeline-num-layers": 2,
                "--num-virtual-stages-per-pipeline-rank": 2,
            },
            "plan has uneven first and last stages, and interleaved ones",
        ),
        ({"--cp-comm-type": "a2a+p2p"}, "run has context parallelism of another kind than a ring"),
        ({"--attention-dropout": 0.0}, "dropout of hidden values differs from that of attention"),
        ({"--num-layers": None}, "model's layers is not stated"),
        ({"--global-batch-size": 30}, "global batch is not a multiple of dp and micro-batch"),
        (
            {"--global-batch-size": 40, "--num-virtual-stages-per-pipeline-rank": 2},
            "plan is ambiguous: interleaved stages do not fit",
        ),
        ({"--tensor-model-parallel-size": 3}, "degrees of the plan do not fit"),
    ],
)
def test_what_cannot_be_said_is_refused_by_its_word(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        (model_of(GPT | flags), plan_of(GPT | flags))


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ({}, "sdpa"),
        ({"--attention-backend": "flash"}, "sdpa"),
        ({"--attention-backend": "unfused"}, "eager"),
        ({"--transformer-impl": "local"}, "eager"),
        ({"--use-legacy-models": True}, "eager"),
    ],
)
def test_attention_is_fused_by_transformer_engine_alone(
    flags: dict[str, Any], attention: str
) -> None:
    assert attention_of(GPT | flags) == attention


def test_kinds_of_models() -> None:
    """BERT by its text; rotary positions are GPT-NeoX's; embeddings are padded for each rank."""
    bert = json.loads(model_of(GPT | {"--data-path": "my-bert_00_text_sentence"}))
    assert bert["architectures"] == ["BertForPreTraining"]
    assert bert["vocab_size"] == 30720  # 120 * 256
    assert json.loads(model_of(GPT))["vocab_size"] == 50432  # 197 * 256
    rotary = json.loads(model_of(GPT | {"--position-embedding-type": "rope"}))
    assert (rotary["model_type"], rotary["use_parallel_residual"]) == ("gpt_neox", False)


@pytest.mark.parametrize("name", ["golden_runs.csv.gz", "model_configs.json.gz"])
@pytest.mark.parametrize("junk", JUNK)
def test_junk_beside_a_good_file_is_refused_or_counted(
    tmp_path: Path, name: str, junk: str
) -> None:
    golden(tmp_path, GPT)
    (tmp_path / name).write_bytes(JUNK[junk])
    try:
        assert not read_source("megatron-lm", tmp_path, Hints()).rows
    except ValueError as exc:
        assert len(str(exc).splitlines()) == 1


def test_a_run_without_its_flags_is_counted(tmp_path: Path) -> None:
    found = golden(tmp_path, GPT)
    (tmp_path / "model_configs.json.gz").write_bytes(gzip.compress(b'{"c": "[not: yaml"}'))
    found = read_source("megatron-lm", tmp_path, Hints())
    assert found.dropped == {"configuration of the run is missing": 1}
    with pytest.raises(ValueError, match="is not a folder of Megatron-LM's golden values"):
        read_source("megatron-lm", tmp_path / "..", Hints())
