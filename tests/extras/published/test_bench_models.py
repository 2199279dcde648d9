"""Whole-model lines of the public benchmark: what is chosen, what is summed, what is scored."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.graph.launch_modes import as_launched
from itercast.compose.target import find_target, forecast_step
from itercast.eval.compare import compare_all, stated_rows, step_of
from itercast.extras.imports.base import About, RowCollector
from itercast.extras.published.lines import ModelLine, model_lines
from itercast.extras.published.models import (
    Answer,
    add_forecasts,
    captured_step,
    judge,
    judged,
    last_rank_bytes,
    timed_us,
    with_fitted_hosts,
)
from itercast.extras.published.readers import node_sums_us
from itercast.learners.bundle import SHIPPED
from itercast.microbench.hardware.host import load_host

LINE = ModelLine(name="x", targets={"mape_pct": 5.0})


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


def test_weights_of_a_published_rms_norm_are_in_fp32_and_so_is_its_result() -> None:
    """As Liger's scripts make them: 4 x 8 numbers in bf16 times 8 in fp32."""
    asked = {"case": "rms_norm", "rows": 4, "cols": 8, "dtype": "bf16", "mode": "train"}
    for engine in ("eager", "compile"):
        step = captured_step({**asked, "engine": engine}, ParallelPlan())
        assert [(p.shape, p.dtype) for p in step.parameters] == [((4, 8), "bf16"), ((8,), "fp32")]
        last = [c for c in step.calls if c.phase == "forward"][-1]
        assert (last.op, last.outputs[0].dtype) == ("aten.mul.Tensor", "fp32")
        assert "zero_grad" not in step.host
    assert step.host["compiled_call"] == 2  # forward and backward; it has no loss


def test_do_bench_waits_for_the_host_behind_256_mb_that_it_zeroes() -> None:
    """256 MB take an H100 76.4 us: of a host's 300 us 223.6 are seen, where kernels take less."""
    asked = {"case": "rms_norm", "rows": 4, "cols": 8, "dtype": "bf16", "mode": "train"}
    target = find_target("h100-sxm-80gb", "", SHIPPED)
    step = captured_step({**asked, "engine": "compile"}, ParallelPlan())
    small = forecast_step(step, target)
    slow = dataclasses.replace(small, host_us=300.0)
    on = {"gpu": "h100-sxm-80gb"}
    do_bench = {**on, "timer": "device", "flush_bytes": 256e6}
    waited = 300 - 256e6 / target.gpu.hbm_bytes_per_s * 1e6
    assert small.compute_us < waited == pytest.approx(223.6, abs=0.1)
    assert timed_us(do_bench, slow) == pytest.approx(waited)
    assert timed_us({**on, "timer": "device"}, slow) == small.compute_us
    assert timed_us({**on, "timer": "with_launch"}, slow) == small.iteration_us
    long = dataclasses.replace(slow, compute_us=250.0)
    assert timed_us(do_bench, long) == 250
    assert timed_us(do_bench, long, ahead=slow) == 250 - small.compute_us


def test_memory_of_a_pipeline_is_that_of_its_last_rank() -> None:
    """The first of two stages holds two micro-batches, the last one, and logits of all."""
    step, target = capture("gpt-s"), find_target("v100-pcie-32gb", "pp=2,micro=8")
    assert 0 < last_rank_bytes(step, target) < 0.9 * forecast_step(step, target).memory_bytes


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


def test_calibration_is_judged_on_other_models() -> None:
    """Everything is twice as fast as forecast: the models left tell nothing but the noise."""
    step = np.arange(1.0, 11.0)
    rows = pd.DataFrame({"case": list("abcdefghij"), "time_us": step / 2, "step": step})
    rows = rows.assign(step_p10=0.9 * step, step_p90=1.1 * step)
    (result,) = judge(dataclasses.replace(LINE, calibrated=True), rows.assign(nodes=np.nan), 1.0)
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
    fits = dataclasses.replace(LINE, fits_hosts="engine == 'eager'")
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
        same = with_fitted_hosts(LINE, rows, SHIPPED, pool, tmp_path)
    assert same is rows
    assert set(judged(fits, again)["engine"]) == {"eager+graph"}
