"""Explained forecasts: parts that add up, ops near their roofline by hand, laws of changes."""

import json
import re

import pytest
import torch
from plan_case import forecast_of
from typer.testing import CliRunner

from itercast.command_line import app
from itercast.compose.predict import prepare
from itercast.compose.target import forecast_step
from itercast.compose.time_parts import limits, limits_in_words, time_parts
from itercast.extras.explain.changes import HARDWARE, Change, changes
from itercast.extras.explain.hot_ops import hot_ops
from itercast.extras.explain.largest_batch import largest_batch, largest_that_fits

H100 = "h100-sxm-80gb"


def test_parts_by_hand() -> None:
    """10 us of ops take 12 beside messages, 3 of messages stay, 5 wait: 20 in all."""
    found = forecast_of(
        iteration_us=20.0,
        compute_us=12.0,
        exposed_comm_us=3.0,
        by_family_us={"gemm": 7.0, "norm": 3.0, "collective": 9.0},
        idle_by_us={"host": 5.0, "bubble": 0.0},
    )
    told = [(part.name, part.kind, part.time_us) for part in time_parts(found)]
    assert told == [
        ("gemm", "compute", 7.0),
        ("GPU waits for the host", "idle", 5.0),
        ("norm", "compute", 3.0),
        ("messages not hidden", "communication", 3.0),
        ("slowed by messages beside compute", "communication", 2.0),
    ]
    assert sum(part.iteration_frac for part in time_parts(found)) == pytest.approx(1)
    assert limits(found) == pytest.approx(  # 7, 5, 3 + 2 and 3 of 20 us
        {"products": 0.35, "GPU waits for the host": 0.25, "messages": 0.25, "memory": 0.15}
    )
    told = "products (GEMM, conv, attention) 35 %, GPU waits for the host 25 %, messages 25 %"
    assert limits_in_words(found) == f"{told}, other ops (memory) 15 %"


def test_hot_ops_of_one_linear_layer() -> None:
    """(4096, 1024) x (1024, 1024): 2 * 4096 * 1024**2 FLOP forward, for the input, the weight."""
    layer = torch.nn.Linear(1024, 1024, bias=False)
    inputs = torch.zeros(4096, 1024, requires_grad=True)
    step, target = prepare(layer, inputs, "none", gpu=H100, optimizer="none")
    products = [op for op in hot_ops(step, target, 9) if op.op == "mm"]
    least_us = 1e6 * 2 * 4096 * 1024**2 / target.gpu.peak("fp32")
    assert sorted(op.phase for op in products) == ["backward", "backward", "forward"]
    assert {op.shape.split()[0] for op in products} == {"m=4096", "m=1024"}
    for op in products:
        assert op.bound == "compute" and op.calls == 1
        assert op.roofline_frac == pytest.approx(op.calls * least_us / op.time_us)


def by_name(found: list[Change]) -> dict[str, Change]:
    return {change.name: change for change in found}


def test_a_step_bound_by_its_host_gains_by_the_host() -> None:
    """mlp-s launches kernels of a few us: a faster host or a CUDA graph helps, memory does not."""
    gains = by_name(changes("mlp-s", {"gpu": H100}))
    assert gains["twice the speed of the host"].gain_frac > 0.5
    assert gains["a CUDA graph"].gain_frac > 0.5
    assert gains["twice the memory bandwidth"].gain_frac < 0.05
    assert gains["twice the compute"].gain_frac < 0.05


def test_twice_a_rate_never_slows_and_at_most_halves() -> None:
    asked = {"gpu": H100, "plan": "dp=16,node=dgx-h100", "batch": 4, "dtype": "bf16"}
    found = [c for c in changes("gpt2-small", asked) if c.kind == HARDWARE]
    rates = {"memory bandwidth", "compute", "speed of the host", "rate of links"}
    rates.add("rate of the network")
    assert {c.name.removeprefix("twice the ") for c in found} == rates
    assert all(-1e-3 <= c.gain_frac <= 1 + 1e-3 for c in found)


def test_a_fused_optimizer_does_beside_its_update_what_the_asked_one_does() -> None:
    """Clipping and a moving average stay: one kernel is in place of AdamW's alone."""
    asked = {"gpu": H100, "optimizer": "adamw+clip+ema"}
    gain = by_name(changes("mlp-s", asked))["fused AdamW"].gain_frac
    base, fused = (
        forecast_step(*prepare("mlp-s", **{**asked, "optimizer": f"{name}+clip+ema"}))
        for name in ("adamw", "adamw_fused")
    )
    assert gain == pytest.approx(base.iteration_us / fused.iteration_us - 1)


def test_changes_follow_the_question() -> None:
    """Only what is not asked for already is proposed, and each gain is that of its own forecast."""
    asked = {"gpu": "a100-sxm-80gb", "attn": "eager", "optimizer": "adamw_fused", "batch": 4}
    gains = by_name(changes("gpt2-small", asked))
    assert {"fused attention", "dtype tf32", "dtype bf16", "batch 8 for 4", H100} <= set(gains)
    assert not {"fused AdamW", "a100-sxm-80gb", "dtype fp8"} & set(gains)
    base, fused = (
        forecast_step(*prepare("gpt2-small", **{**asked, "attn": attn}))
        for attn in ("eager", "sdpa")
    )
    told = gains["fused attention"]
    assert told.iteration_us == pytest.approx(fused.iteration_us)
    assert told.gain_frac == pytest.approx(fused.samples_per_s / base.samples_per_s - 1)


def test_the_largest_batch_by_hand() -> None:
    """100 B and 10 a sample, beyond 50 samples 20: 70 fit 1,000 B. 4 do not fit 105, nor does 1."""
    assert largest_that_fits(lambda n: 100 + 10 * n + 10 * max(0, n - 50), 1000, 4) == 70
    assert largest_that_fits(lambda n: 100 + 10 * n, 125, 4) == 2
    assert largest_that_fits(lambda n: 100 + 10 * n, 105, 4) == 0
    step, target = prepare("mlp-s", gpu=H100)
    n = largest_batch("mlp-s", {"gpu": H100}, step, target)
    fits, not_one_more = (
        forecast_step(*prepare("mlp-s", gpu=H100, batch=n + more)).fits for more in (0, 1)
    )
    assert fits and not not_one_more


def test_explain_prints_json() -> None:
    done = CliRunner().invoke(app, ["explain", "mlp-s", "--gpu", H100, "--json"])
    told = json.loads(done.stdout)
    assert {"case", "forecast", "parts", "ops", "changes"} <= set(told)
    assert {"question", "command", "step", "unusual"} <= set(told)


def test_explain_lists_what_gains_and_names_what_does_not() -> None:
    """Below it stands what bounds a step."""
    words = ["explain", "mlp-s", "--gpu", H100]
    tried = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["changes"]
    percent = {one["name"]: round(100 * one["gain_frac"]) for one in tried}
    others = [f"{name} {n} %" if n else name for name, n in percent.items() if n <= 0]
    told = " ".join(CliRunner().invoke(app, words).stdout.split())
    _, table = told.split("what a change would gain")
    table, line = table.split("tried too, without gain: ")
    assert others and {name for name in percent if f"│ {name} │" in table} == {
        name for name, n in percent.items() if n > 0
    }
    assert line.startswith(f"{', '.join(others)} memory")
    host_bound = (
        r"bound by GPU waits for the host \d+ %, .*products \(GEMM, conv, attention\) \d+ % gains"
    )
    assert re.search(host_bound, line)
