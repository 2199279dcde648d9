"""Whole-model lines of the public benchmark: what is chosen, what is summed, what is scored."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import as_launched
from itercast.eval.compare import compare_all, stated_rows, step_of
from itercast.extras.published.lines import ModelLine, model_lines
from itercast.extras.published.models import Answer, add_forecasts, judge, judged, with_fitted_hosts
from itercast.extras.published.readers import node_sums_us, read_iterations
from itercast.extras.published.sources.layers import LAYERS, layer
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import load_host
from itercast.microbench.importers.base import About, RowCollector


def test_nodes_of_the_layer_count_once_per_layer(tmp_path: Path) -> None:
    """1 ms outside and 2 + 4 + 0.5 ms inside, three layers: 1 + 3 * 6.5 = 20.5 ms."""
    folder = tmp_path / "scripts/asplos/label/Tesla_X"
    folder.mkdir(parents=True)
    nodes = {
        "Name": ["embed", "bert_encoder_layer_0_dense"],
        "meta": ["{}", "{}"],
        "fw_latency": [1.0, 2.0],
        "bw_latency": [0.0, 4.0],
        "acc_latency": [0.0, 0.5],
    }
    pd.DataFrame(nodes).to_csv(folder / "m-train-8-1.csv")
    (folder / "m-train-8-1.json").write_text(json.dumps({"num_layer": 3}))
    found = node_sums_us(tmp_path)["scripts/asplos/label/Tesla_X/m-train-8-1.json:1"]
    assert found == {"step": pytest.approx(20_500), "backward": pytest.approx(13_500)}


def test_a_row_says_how_its_step_is_launched_and_by_which_kernels() -> None:
    common = {"case": "gpt-s", "batch": 2, "seq": 16, "dtype": "fp32"}
    plain = step_of(common, ParallelPlan())
    stated = {"engine": "compile", "attention_kernel": "triton flash"}
    found = step_of({**common, **stated}, ParallelPlan())
    assert (plain.engine, found.engine) == ("eager", "compile")
    assert len(as_launched(found).calls) < len(as_launched(plain).calls)
    attention = [c for c in found.calls if c.op.startswith("itercast.sdpa")]
    assert {c.kwargs["kernel"] for c in attention} == {"triton"}


def test_a_row_is_forecast_for_the_software_that_it_states() -> None:
    """torch 2.2 runs flash 2 on Hopper; unknown software and none are the usual one."""
    asked = {"case": "gpt-s", "gpu": "h100-sxm-80gb", "batch": 4096, "seq": 256, "dtype": "bf16"}
    stacks = ["torch-2.11.0+cu130", "torch-2.2.1+cu121", "their own", None]
    rows = pd.DataFrame([{**asked, "time_us": 1e3, "stack": stack} for stack in stacks])
    rows = stated_rows(rows.assign(optimizer="adamw", hf_config=None))
    known: dict[Any, Answer] = {}
    with ThreadPoolExecutor(1) as pool:
        step = add_forecasts(rows, SHIPPED, known, pool)["step"].tolist()  # type: ignore[arg-type]
    assert step[1] > step[0]
    assert step[2] == step[3] == pytest.approx(step[0])
    compared = {r.model: r.predicted_us for r in compare_all(rows, SHIPPED)}
    assert compared["gpt-s torch-2.2.1+cu121"] == pytest.approx(step[1])
    assert compared["gpt-s torch-2.11.0+cu130"] == pytest.approx(step[0])


def test_rows_are_forecast_as_their_steps_were_timed(tmp_path: Path) -> None:
    """Our rows without a word were synchronised, published ones were not unless they say so."""
    asked = {"case": "gpt-s", "gpu": "h100-sxm-80gb", "batch": 2, "seq": 16, "dtype": "bf16"}
    rows = pd.DataFrame([{**asked, "time_us": 1.0}] * 2)
    found = stated_rows(rows.assign(plan="", timing=[None, "back_to_back"]))
    steps = [step_of(row, ParallelPlan()) for row in found.to_dict("records")]
    assert [step.synchronised for step in steps] == [True, False]
    published = RowCollector(About(source="x", where="", licence="", conventions=""), tmp_path)
    published.add("iteration", rows.assign(op="", timer="", stack=""))
    assert set(published.frames["iteration"][0]["timing"]) == {"back_to_back"}


def chosen(rows: pd.DataFrame, text: str, folder: str) -> dict[str, list[int]]:
    """By line of a folder whose name contains a text: numbers of the rows that it chooses."""
    lines = [x for x in model_lines() if text in x.name and x.folder == folder]
    return {x.name: x.choose(rows.assign(at=range(len(rows))))["at"].tolist() for x in lines}


def test_lines_choose_their_rows() -> None:
    """No compiled or split labels; experts by the plan; examples by source and number of GPUs."""
    labels = pd.DataFrame({"compile": [False, True, False], "plan": ["", "", "dp=4"]})
    labels = labels.assign(source="neusight", gpu="a100-pcie-80gb", mode="train")
    assert chosen(labels, "A100-80GB train", "NeuSight") == {
        "NeuSight labels, A100-80GB train": [0]
    }
    plans = pd.DataFrame({"plan": ["dp=8,ep=8", "ep=8", "dp=8,tp=2,sp", "dp=8,ep=8"]})
    plans = plans.assign(source=["megatron-bridge"] * 3 + ["timm"], dtype=["fp8", "bf16"] * 2)
    plans.loc[len(plans)] = ("tp=2", "megatron-bridge", "nvfp4")
    dense, experts, fp4 = chosen(plans, "Megatron-Core", "iterations").values()
    assert (dense, experts, fp4) == ([2], [0, 1], [4])
    runs = [("nvidia-dle", "resnet50v1.5", 1), ("lambda-deeplearning-benchmark", "resnet50", 8)]
    runs += [("timm", "resnet50", 1), ("nvidia-dle", "dlrm-criteo", 1)]
    examples = pd.DataFrame(runs, columns=["source", "case", "world_size"])
    assert chosen(examples, "ResNet", "iterations") == {
        "ResNet-50 on one GPU": [0],
        "ResNet-50 under DDP": [1],
    }
    h100 = [("llm-foundry", 8), ("lambda-deeplearning-benchmark", 1)]
    h100 += [("lambda-deeplearning-benchmark", 8)]
    networks = pd.DataFrame(h100, columns=["source", "world_size"])
    assert [*chosen(networks, "", "iterations-h100").values()] == [[0, 1, 2], [0], [1], [2]]


def test_forecasts_are_of_the_rows_asked_and_others_are_counted() -> None:
    """A row asked for twice has one answer; one on no known GPU has none and is left out."""
    common = {"case": "mlp-s", "batch": 2, "dtype": "fp32", "plan": "", "mode": "train"}
    common |= {"seq": 0, "optimizer": "adamw", "loss": "default", "attn": "sdpa"}
    gpus = ("v100-pcie-32gb", "x1", "v100-pcie-32gb")
    rows = stated_rows(pd.DataFrame({"gpu": gpu, **common} for gpu in gpus))
    known: dict[Any, Answer] = {}
    with ThreadPoolExecutor(1) as pool:
        found = add_forecasts(rows.assign(hf_config=None, backward_us=9.0), SHIPPED, known, pool)
    assert found["gpu"].tolist() == ["v100-pcie-32gb"] * 2
    assert found["step"].nunique() == found["backward"].nunique() == 1
    assert (found["step"] > found["backward"]).all()
    assert (found["backward"] > 0).all()
    assert (found["memory"] > 0).all()
    assert sum("unknown gpu 'x1'" in str(answer) for answer in known.values()) == 1


def test_mixed_precision_is_what_a_row_states_but_under_fsdp() -> None:
    """Not stated is none; FSDP casts weights itself."""
    stated = [("", True), ("dp=8", True), ("dp=8,zero=3", True), ("", False), ("", None)]
    rows = pd.DataFrame(stated, columns=["plan", "amp"]).assign(case="gpt-s")
    assert stated_rows(rows)["amp"].tolist() == [True, True, False, False, False]
    assert stated_rows(rows.drop(columns="plan"))["amp"].tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_missing_folder_leaves_its_lines_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_iterations(tmp_path, "iterations-h100") is None
    assert "its lines are left out" in " ".join(capsys.readouterr().out.split())


def test_peak_memory_is_judged_where_it_was_measured() -> None:
    rows = pd.DataFrame({"memory_bytes": [2e9, np.nan, 4e9], "memory": [3e9, 1e9, 6e9]})
    (result,) = judge(line(part="memory"), rows.assign(time_us=1.0, nodes=np.nan), 1.0)
    assert (result.rows, result.scores["itercast"]["bias_pct"]) == (2, pytest.approx(50))


def line(**changed: object) -> ModelLine:
    facts = {"name": "x", "known_best": "", "targets": {"mape_pct": 5.0}}
    return ModelLine(**{**facts, **changed})  # type: ignore[arg-type]


def test_nodes_are_judged_on_the_rows_that_have_them() -> None:
    rows = pd.DataFrame({"time_us": [100.0, 100.0], "step": [110.0, 130.0], "nodes": [96, np.nan]})
    rows = rows.assign(step_p10=[90.0, 105.0], step_p90=[120.0, 150.0])
    (result,) = judge(line(), rows, 1.0)
    assert result.scores["itercast"]["coverage_pct"] == 50  # 100 us is below 105 to 150 us
    assert result.scores["itercast"]["mape_pct"] == pytest.approx(20)
    assert result.scores["itercast, same rows"]["mape_pct"] == pytest.approx(10)
    assert result.scores["nodes summed"]["mape_pct"] == pytest.approx(4)


def test_calibration_is_judged_on_other_models() -> None:
    """Everything is twice as fast as forecast: the models left tell nothing but the noise."""
    step = np.arange(1.0, 11.0)
    rows = pd.DataFrame({"case": list("abcdefghij"), "time_us": step / 2, "step": step})
    rows = rows.assign(step_p10=0.9 * step, step_p90=1.1 * step)
    (result,) = judge(line(calibrated=True), rows.assign(nodes=np.nan), 1.0)
    assert result.rows == 5
    assert result.scores["itercast"]["mape_pct"] == pytest.approx(0, abs=1e-9)
    assert result.scores["itercast"]["kendall_tau"] == pytest.approx(1)
    assert result.scores["itercast"]["coverage_pct"] == 100  # intervals are scaled alike


SMALL = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.rand(16, {columns})]
"""


def forwards(engine: str, machine: str, *columns: int) -> pd.DataFrame:
    """Forwards of a ReLU without their times."""
    row = {"gpu": "h100-sxm-80gb", "case": "relu", "plan": "", "mode": "infer", "dtype": "fp32"}
    row |= {"stack": "torch", "engine": engine, "machine": machine, "source": "somebody"}
    return pd.DataFrame([{**row, "problem_source": SMALL.format(columns=n)} for n in columns])


def test_a_machines_host_is_found_from_what_it_ran_eagerly(tmp_path: Path) -> None:
    """Two machines, whose hosts are 2 and 6 times as slow as the reference: graphs follow them."""
    slow = {"this": 2.0, "that": 6.0}
    parts = [forwards(e, m, 256, 1024) for m in slow for e in ("eager", "eager+graph")]
    rows = pd.concat(parts, ignore_index=True)
    fits = line(fits_hosts="engine == 'eager'")
    with ThreadPoolExecutor(1) as pool:
        files = dict[str, str]()
        for name, slowdown in slow.items():
            path = tmp_path / f"{name}-real.yaml"
            path.write_text(f"slowdown: {slowdown}\nlaunch_us: {5 * slowdown}\nsource: made up\n")
            files[name] = str(path)
        real = rows.assign(host_file=rows["machine"].map(files))
        real["time_us"] = add_forecasts(real, SHIPPED, {}, pool)["step"]  # type: ignore[arg-type]
        rows = real.drop(columns=["host_file"])
        found = with_fitted_hosts(fits, rows, SHIPPED, pool, tmp_path)
        hosts = {m: load_host(p) for m, p in zip(found["machine"], found["host_file"], strict=True)}
        assert {m: h.slowdown for m, h in hosts.items()} == pytest.approx(slow, rel=0.02)
        again = add_forecasts(found, SHIPPED, {}, pool)  # type: ignore[arg-type]
        assert again["step"].to_numpy() == pytest.approx(rows["time_us"].to_numpy(), rel=0.02)
        same = with_fitted_hosts(line(), rows, SHIPPED, pool, tmp_path)
    assert same is rows
    assert set(judged(fits, again)["engine"]) == {"eager+graph"}


def test_runs_of_a_test_that_fits_hosts_are_judged_nowhere() -> None:
    """A test of Megatron-LM fits the host with all of its runs; a wide model is always judged."""
    names = [f"gpt/{n}" for n in range(200) for _ in range(2)]
    small = pd.DataFrame({"case": names, "d_model": 512})
    rows = pd.concat([small, small.assign(d_model=2048)], ignore_index=True)
    by_name = {line.name: line for line in model_lines()}
    wide = by_name["Megatron golden values, models >= 1024 wide, host from 32 steps"]
    fits = rows[wide.fits(rows)]
    assert 60 < len(fits) < 100 and len(fits) == 2 * fits["case"].nunique()
    assert (fits["d_model"] == 512).all()
    some = wide.choose(rows)
    assert len(some) == len(fits) + 400
    assert (judged(wide, some)["d_model"] == 2048).all()


def whole(name: str) -> StepCapture:
    """Forward and backward of a layer, with gradients of all of its tensors."""
    return capture(lambda: layer(name, 64, 128, 32, 4, 2), loss="none", optimizer="none")


def test_a_layer_is_the_ops_that_eager_torch_runs() -> None:
    """Forward of an RMS norm in bf16: to fp32, square, mean, + eps, rsqrt, *, to bf16, * scale."""
    step = capture(lambda: layer("rms_norm", 64, 128, 0), mode="infer", dtype="bf16")
    assert [call.op.split(".")[1] for call in step.calls] == [
        *("_to_copy", "pow", "mean", "add", "rsqrt", "mul", "_to_copy", "mul")
    ]
    both = capture(lambda: layer("swiglu_mlp", 64, 32, 96), loss="none", optimizer="none")
    products = [call.op for call in both.calls if call.op == "aten.mm.default"]
    assert len(products) == 3 + 6  # and gradients of inputs and weights
    with pytest.raises(ValueError, match="unknown layer 'gru'"):
        layer("gru", 1, 1)
    for name in LAYERS:
        assert {call.phase for call in whole(name).calls} >= {"forward", "backward"}


def test_experts_in_a_loop_each_make_gradients_as_large_as_all_weights() -> None:
    """Of 4 experts each has two products, which backward doubles, for its share of the tokens.

    64 tokens go to 2 of 4 experts each: 32 to an expert, of width 128, and 2 x 32 wide inside. The
    gradient of an expert's weights, 64 x 128, is written into zeros for 4 experts. The host reads
    an expert's number to take its mask, and both of its weights.
    """
    calls = whole("expert_loop").calls
    products = [call for call in calls if call.op == "aten.mm.default"]
    assert len(products) == 4 * 2 * 3
    assert [products[0].args[0].shape, products[0].args[1].shape] == [(32, 128), (128, 64)]
    stacks = [call for call in calls if call.op == "aten.select_backward.default"]
    assert sorted(call.args[1] for call in stacks) == 4 * [(4, 64, 128)] + 4 * [(4, 128, 32)]
    assert sum(call.op == "aten._local_scalar_dense.default" for call in calls) == 4 * 3


def test_layers_are_forecast_by_their_kernels_alone() -> None:
    """A timer of the device leaves the launches out: 16 rows are all launches, 2**16 hardly any."""
    row = {"gpu": "h100-sxm-80gb", "case": "swiglu", "plan": "", "dtype": "bf16", "engine": "eager"}
    rows = pd.DataFrame(
        {**row, "mode": mode, "timer": timer, "rows": n, "cols": 4096, "inner": np.nan}
        for mode, timer, n in (
            ("infer", "device", 16),
            ("infer", "with_launch", 16),
            ("train", "device", 2**16),
            ("infer", "device", 2**16),
        )
    ).assign(backward_us=9.0, stack="torch")
    with ThreadPoolExecutor(1) as pool:
        found = add_forecasts(rows, SHIPPED, {}, pool)  # type: ignore[arg-type]
    small, launched, both, forward = found["step"]
    assert small < launched / 2
    assert found["backward"].tolist() == pytest.approx([0, 0, both - forward, 0])
    assert (found["step_p10"] < found["step"]).all() and (found["step"] < found["step_p90"]).all()
