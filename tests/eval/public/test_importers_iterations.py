"""Published tables of iterations: models to build, plans in our grammar, reasons for the rest."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from itercast.eval.public.readers import read_source
from itercast.eval.public.sources.models import model_of
from itercast.eval.public.sources.plans import plan_of
from itercast.eval.public.sources.timm_models import timm_config
from itercast.microbench.importers.base import Hints, Imported
from itercast.microbench.plan import ParallelPlan

MPT = {
    **{"model": "125m", "model_note": "MPT (mpt_causal_lm)", "num_params": "125311488"},
    **{"layers": "12", "d_model": "768", "heads": "12", "ffn": "3072", "vocab": "50368"},
    **{"seq_len_tokens": "2048", "gpu": "a100_80gb", "gpu_detail": "", "n_gpus": "16"},
    **{"gpus_per_node": "8", "precision": "bf16", "sharding": "FULL_SHARD", "tp": "1", "pp": "1"},
    **{"micro_batch_per_gpu": "2", "grad_accum_steps": "4", "global_batch": "128"},
    **{"activation_recompute": "true", "compile": "eager", "optimizer": "decoupled_adamw"},
    **{"attention_kernel": "triton flash", "step_time_s": "0.5", "torch": "2.0.1"},
}


NODE = {"gpus_per_node": "8"}


def imported(folder: Path, *rows: dict[str, str]) -> Imported:
    """The rows as a table, imported."""
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({k for row in rows for k in row}))
        writer.writeheader()
        writer.writerows(rows)
    return read_source("iterations", folder, Hints())


def parameters(hf_config: str | None) -> int:
    """Of the model that a configuration is of."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    facts = json.loads(hf_config or "{}")
    config = transformers.AutoConfig.for_model(**facts)
    with torch.device("meta"):
        model = getattr(transformers, facts["architectures"][0])(config)
    return sum(p.numel() for p in model.parameters())


def test_a_row_becomes_an_iteration(tmp_path: Path) -> None:
    """128 samples over 16 replicas are 8 each; 4 times 2 of them; 0.5 s are 500,000 us."""
    found = imported(tmp_path, MPT)
    (row,) = found.rows["iteration"].to_dict("records")
    expected: dict[str, Any] = {"time_us": 500_000.0, "batch": 8, "seq": 2048, "world_size": 16}
    expected |= {"plan": "dp=16,accumulate=4,zero=3,recompute=full", "ranks_per_node": 8}
    expected |= {"optimizer": "adamw", "loss": "default", "attn": "sdpa", "mode": "train"}
    expected |= {"gpu": "a100-sxm-80gb", "dtype": "bf16", "amp": False, "compile": False}
    expected |= {"case": "125m", "builder": "hf", "stack": "torch-2.0.1", "origin": "table.csv:2"}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {}


def test_what_megatron_fuses_and_cuts_unasked_is_said(tmp_path: Path) -> None:
    """fp8 of Transformer Engine over weights in bf16; its kernels in an eager loop."""
    stated = {"precision": "FP8 (TE)", "framework": "NeMo / Megatron-Core", "tp": "2"}
    found = imported(
        tmp_path, MPT | stated | {"compile": "TE kernels, none compiled", "sharding": ""}
    )
    (row,) = found.rows["iteration"].to_dict("records")
    said = (row["dtype"], row["amp"], row["engine"], row["compile"])
    assert said == ("fp8", False, "fused", False)
    assert ",tp=2,sp," in row["plan"]
    assert "sequence parallelism assumed" in row["doubts"]
    found = imported(tmp_path, MPT | stated | {"precision": "BF16"})
    assert found.rows["iteration"][["dtype", "amp"]].to_numpy().tolist() == [["bf16", False]]


def test_the_configuration_has_the_stated_parameters() -> None:
    """As many weights as MPT's own count; built for real, without memory."""
    assert parameters(model_of(MPT).hf_config) == int(MPT["num_params"])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3_30B_a3B", 30.5),
        ("Qwen3_235B_a22B", 235.1),
        ("GPT OSS 120B", 116.8),
        ("DeepSeekV3", 671.0),
    ],
)
def test_mixtures_of_experts_have_as_many_parameters_as_published(
    name: str, billions: float
) -> None:
    found = model_of({"model": name, "seq_len_tokens": "4096"})
    assert parameters(found.hf_config) / 1e9 == pytest.approx(billions, abs=0.1)
    assert ("without" in found.doubt) == (name not in ("Qwen3_30B_a3B", "Qwen3_235B_a22B"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": ""}, "gpu is not stated"),
        ({"gpu": "A100", "gpu_detail": "somewhere"}, "gpu variant is not stated: 'A100'"),
        ({"gpu": "Abacus"}, "unknown gpu: 'Abacus'"),
        ({"precision": ""}, "precision is not stated"),
        ({"global_batch": "127"}, "global batch is not a multiple of dp"),
        ({"tp": "1 (2)"}, "plan is ambiguous: tp '1 (2)'"),
        ({"n_gpus": "15", "pp": "2"}, "degrees of the plan do not fit the number of GPUs"),
        ({"pp": "4", "vp": "3", "grad_accum_steps": "2"}, "plan is ambiguous: interleaved stages"),
        (
            {"model": "DLRM large", "model_note": ""},
            "no configuration for the model 'DLRM large'",
        ),
        (
            {"model": "BERT", "model_note": "", "section": "Pre-training"},
            "lengths vary: batches are",
        ),
        ({"model": "BERT", "model_note": ""}, "model's task is not stated"),
        ({"heads": ""}, "model's heads is not stated"),
        ({"section": "LoRA Performance"}, "only a part of the weights is trained (LoRA)"),
        ({"sharding": "FSDP"}, "sharding is not known: 'FSDP'"),
        ({"sharding": "HYBRID_SHARD", "gpus_per_node": ""}, "plan is ambiguous: HSDP"),
        ({"sharding": "HYBRID_SHARD", "gpus_per_node": "6"}, "plan is ambiguous: HSDP"),
        ({"model_note": "LoRA: frozen"}, "only a part of the weights is trained (LoRA)"),
        ({"optimizer": "Muon"}, "unknown optimizer: 'Muon'"),
        ({"model": "LLAMA3_8B", "d_model": "5120"}, "layers differs from that of the named model"),
        ({"step_time_s": "nan"}, "time is not a positive number below 1e+12 us"),
    ],
)
def test_what_a_row_does_not_say_is_counted(
    tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    found = imported(tmp_path, MPT, MPT | change)
    assert len(found.rows["iteration"]) == 1
    ((said, count),) = found.dropped.items()
    assert said.startswith(reason)
    assert count == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"n_gpus": "1"}, ""),
        ({"n_gpus": "8", "parallel_plan": "DDP 8"}, "dp=8"),
        ({"n_gpus": "4", "cp": "2", "sharding": "FSDP2"}, "dp=2,cp=2,zero=3"),
        ({"n_gpus": "1", "sharding": "FSDP2"}, ""),
        (
            {"n_gpus": "64", "tp": "2", "pp": "4", "vp": "5", "grad_accum_steps": "32"},
            "dp=8,tp=2,pp=4,micro=32,schedule=interleaved:5",
        ),
        (
            {
                "n_gpus": "8",
                "tp": "4",
                "framework": "NeMo / Megatron-Core",
                "gpu_detail": "DGX H100",
            },
            "dp=2,tp=4,sp,node=dgx-h100",
        ),
        ({"n_gpus": "8", "gpu_detail": "DGX-B300"}, "dp=8,node=dgx-b300"),
        ({"n_gpus": "8", "gpu_detail": "DGX-GB300 (power)"}, "dp=8,node=gb300-nvl72"),
        ({"n_gpus": "8", "gpu_detail": "DGX-9"}, "dp=8"),
        ({"n_gpus": "8", "sharding": "NO_SHARD"}, "dp=8"),
        ({"n_gpus": "8", "sharding": "SHARD_GRAD_OP"}, "dp=8,zero=2"),
        ({"n_gpus": "8", **NODE, "sharding": "HYBRID_SHARD"}, "dp=8,zero=3"),
        ({"n_gpus": "16", **NODE, "sharding": "HYBRID_SHARD"}, "dp=16,zero=3,hsdp=8"),
        ({"n_gpus": "16", **NODE, "sharding": "_HYBRID_SHARD_ZERO2"}, "dp=16,zero=2,hsdp=8"),
        (
            {"n_gpus": "32", "tp": "2", **NODE, "sharding": "HYBRID_SHARD"},
            "dp=16,tp=2,zero=3,hsdp=4",
        ),
        ({"n_gpus": "16", "tp": "8", **NODE, "sharding": "HYBRID_SHARD"}, "dp=2,tp=8"),
        (
            {"n_gpus": "8", "micro_batch_per_gpu": "2", "global_batch": "64"},
            "dp=8,accumulate=4",
        ),
        (
            {
                "n_gpus": "8",
                "activation_cpu_offload": "true",
                "activation_recompute": "selective op",
            },
            "dp=8,recompute=ops,offload=activations",
        ),
    ],
)
def test_plans_are_texts_that_parse(given: dict[str, str], text: str) -> None:
    assert plan_of(given)[0] == text
    assert ParallelPlan.parse(text).world_size == int(given["n_gpus"])


def test_a_row_that_spans_hosts_says_which_network_is_assumed(tmp_path: Path) -> None:
    rows = [MPT, MPT | {"gpu_detail": "DGX A100"}, MPT | {"n_gpus": "8"}]
    found = imported(tmp_path, *rows).rows["iteration"]["doubts"]
    said = "network not known, the default of forecasts assumed"
    assert [said in doubts for doubts in found] == [True, False, False]


def test_fp8_of_composer_is_of_its_linear_layers(tmp_path: Path) -> None:
    """Weights are in fp32, and the GPU's form is that of the peak it is compared with."""
    row = MPT | {"gpu": "h100_80gb", "precision": "amp_fp8"}
    (found,) = imported(tmp_path, row).rows["iteration"].to_dict("records")
    stated = {"gpu": "h100-sxm-80gb", "dtype": "fp8", "amp": True}
    assert {name: found[name] for name in stated} == stated


def test_timm_states_its_conditions_in_the_file_name(tmp_path: Path) -> None:
    """fp16 autocast and SGD on one RTX 3090; 57.0 ms; a file with an unknown GPU is counted."""
    head = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count"
    text = f"{head}\ntinynet_e,8879.06,57.0,512,106,2.04\n"
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv").write_text(text)
    (tmp_path / "benchmark-train-amp-nhwc-pt112-cu113-abacus.csv").write_text(text)
    found = read_source("iterations", tmp_path, Hints())
    (row,) = found.rows["iteration"].to_dict("records")
    expected: dict[str, Any] = {"case": "tinynet_e", "builder": "timm", "batch": 512}
    expected |= {"image_size": 106, "memory_format": "nhwc", "stack": "torch-1.12+cu113"}
    expected |= {"time_us": 57_000.0, "gpu": "rtx-3090", "dtype": "fp16", "amp": True}
    assert {name: row[name] for name in expected} == expected
    assert found.dropped == {"file of timm whose name states no layout, torch and known gpu": 1}


def test_a_fine_tuned_bert_has_the_sizes_of_its_name() -> None:
    sizes = {"layers": "24", "d_model": "1024", "heads": "16", "ffn": "4096"}
    tuned = {"model": "BERT", "section": "Fine-tuning", "seq_len_tokens": "384"}
    for row in (tuned, {"model": "bert_large_squad", "seq_len_tokens": "384"}):
        found = model_of(row | sizes)
        assert json.loads(found.hf_config)["num_hidden_layers"] == 24
        assert found.attn == "eager"
    assert model_of(tuned).doubt == "taken as BERT-large, the default of the recipe"


@pytest.mark.parametrize(
    ("compiled", "engine"),
    [
        ("eager", "eager"),
        ("eager, CUDA graphs", "graph"),
        ("torch.compile (default)", "compile"),
        ("TE kernels, no torch.compile stated", "fused"),
        ("TE + CUDA graphs per recipe", "compile+graph"),
    ],
)
def test_how_kernels_are_launched_is_an_engine(tmp_path: Path, compiled: str, engine: str) -> None:
    rows = imported(tmp_path, MPT | {"compile": compiled}).rows["iteration"]
    assert rows["engine"].tolist() == [engine]
    assert rows["cuda_graphs"].tolist() == ["CUDA graphs" in compiled]


def test_a_model_of_clicks_is_a_case_launched_as_a_graph(tmp_path: Path) -> None:
    row = {**MPT, "model": "DLRM small", "model_note": "", "compile": "eager, CUDA graphs"}
    (found,) = imported(tmp_path, row).rows["iteration"].to_dict("records")
    stated = {"case": "dlrm-criteo", "builder": "case", "engine": "graph", "optimizer": "adamw"}
    assert {name: found[name] for name in stated} == stated
    assert not isinstance(found["hf_config"], str)


def test_transformer_xl_is_a_case_on_one_gpu() -> None:
    """Runs of more exchanged nothing: their steps are as long as those of one."""
    row = {"model": "transformerxlbase", "n_gpus": "1"}
    found = model_of(row)
    assert (found.case, found.builder) == ("transformer-xl-base", "case")
    assert (found.optimizer, "not blind" in found.doubt) == ("lamb", True)
    with pytest.raises(ValueError, match="gradients are not exchanged"):
        model_of(row | {"n_gpus": "8"})


def test_a_detector_is_a_case_unless_one_process_alone_was_counted() -> None:
    row = {"model": "SSD", "n_gpus": "8", "set": "v1"}
    assert model_of(row).case == "ssd300"
    assert model_of(row | {"n_gpus": "1", "set": "v0"}).optimizer == "sgd"
    with pytest.raises(ValueError, match="throughput is of one process"):
        model_of(row | {"set": "v0"})


def test_images_lie_in_memory_as_a_row_says(tmp_path: Path) -> None:
    row = {**MPT, "model": "resnet50", "model_note": "memory_format nhwc", "image_size": "224"}
    rows = [imported(tmp_path, r).rows["iteration"] for r in (row, {**row, "model_note": ""})]
    assert [list(r["memory_format"].fillna("")) for r in rows] == [["nhwc"], [""]]


def test_a_network_of_groups_is_left_to_timm() -> None:
    found = json.loads(model_of({"model": "se-resnext101-32x4d"}).hf_config)
    assert found["architecture"] == "seresnext101_32x4d"


def test_a_doubt_is_kept_with_its_row(tmp_path: Path) -> None:
    """What was assumed stands beside what the publisher doubted."""
    row = MPT | {"gpu": "A100", "gpu_detail": "80 GB", "optimizer": "", "doubts": "one run"}
    (found,) = imported(tmp_path, row).rows["iteration"]["doubts"]
    network = "network not known, the default of forecasts assumed"
    assert found == f"one run; SXM assumed; optimizer not stated, adamw assumed; {network}"
    assert isinstance(imported(tmp_path, MPT).rows["iteration"], pd.DataFrame)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 11.69),
        ("tv_resnet50", 25.56),
        ("vit_base_patch16_224", 86.57),
        ("beit_base_patch16_224", 86.53),
        ("efficientnet_b0", 5.29),
        ("tf_efficientnet_b4_ns", 19.34),
        ("mobilenetv2_035", 1.68),
        ("mobilenetv2_140", 6.11),
        ("resnetv2_50x3_bitm", 217.32),
    ],
)
def test_a_timm_model_has_as_many_parameters_as_published(name: str, millions: float) -> None:
    assert parameters(timm_config(name, 224)) / 1e6 == pytest.approx(millions, abs=0.005)


@pytest.mark.parametrize(
    "name", ["resnet50d", "resnet77", "efficientnet_b0_gn", "beit_tall_patch16_224"]
)
def test_other_networks_are_named_as_on_the_hub(name: str) -> None:
    found = json.loads(timm_config(name, 176))
    assert found["architecture"] == name
    assert found["pretrained_cfg"] == {"input_size": [3, 176, 176]}
