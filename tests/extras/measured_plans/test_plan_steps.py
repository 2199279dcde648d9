"""Steps under plans: what cannot run, what stays equal, all on two processes."""

import os
from pathlib import Path

import pytest
import torch

from itercast.capture.cases.registry import case
from itercast.capture.step import StepSettings
from itercast.extras.checkpoints.layers import numbered_layers
from itercast.extras.measured_plans.stages import edges, own_parameters
from itercast.extras.measured_plans.steps import make_plan_step
from itercast.microbench.iterations.collect import collect_iterations
from itercast.microbench.iterations.measure import Iteration
from itercast.microbench.iterations.measured_plan import measurable_plan
from itercast.microbench.store import read_rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=2,tp=2", "allowed: dp beside tp with zero"),
        ("dp=2,gossip=ring", "plan 'dp=2,gossip=ring' cannot be measured; allowed: known keys"),
        ("pp=2,dp=2,zero=2", "allowed: pp without zero"),
        ("dp=2,cdp=1,compress=0.5", "compress acts on all_reduce: no cdp"),
        ("dp=4,hsdp=2,zero=2,local=4", "allowed: local with dp alone"),
    ],
)
def test_a_plan_that_cannot_be_run_names_the_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measurable_plan(text)


def gradients(plan: str, dtype: str = "fp32") -> torch.Tensor:
    """Gradients of a small GPT, one after the other, of a step from the same seed."""
    kept: list[torch.Tensor] = []
    chosen = case("gpt-s")
    model = chosen.build

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        made: torch.nn.Module = model()
        kept.extend(made.parameters())
        torch.manual_seed(1)
        return made

    from dataclasses import replace

    own = replace(chosen, build=build)
    settings = StepSettings(dtype=dtype)
    make_plan_step(own, plan, 2, 16, settings, "cpu", lambda name: None).run()
    return torch.cat([p.grad.reshape(-1) for p in kept if p.grad is not None])


def test_recomputing_changes_nothing_but_time() -> None:
    torch.testing.assert_close(gradients("recompute=full"), gradients(""))


def test_a_plan_runs_in_the_dtype_asked_for() -> None:
    assert gradients("accumulate=2", "bf16").dtype == torch.bfloat16


def test_gradients_of_micro_batches_add_up() -> None:
    """The loss is a mean per micro-batch: two of them give a gradient about twice as large."""
    both, whole = gradients("accumulate=2"), gradients("")
    cosine = torch.nn.functional.cosine_similarity(both, whole, dim=0)
    assert cosine > 0.5
    assert 1 < both.norm() / whole.norm() < 3


def test_stages_share_blocks_and_parameters() -> None:
    """Five blocks in two stages: three and two; the tied table is at both ends."""
    assert edges(5, 2) == [0, 3, 5]
    with pytest.raises(ValueError, match="4 stages, the model has 2 blocks"):
        edges(2, 4)
    model = case("gpt-s").build()
    first, last = own_parameters(model, 0, 1), own_parameters(model, 1, 2)
    shared = {id(p) for p in first} & {id(p) for p in last}
    assert shared == {id(model.head.weight)}
    assert {id(p) for p in (*first, *last)} == {id(p) for p in model.parameters()}
    assert numbered_layers(model) == list(model.blocks)


@pytest.mark.slow
def test_every_kind_of_plan_runs_on_two_processes_once(tmp_path: Path) -> None:
    """Two processes have half of the threads each."""
    plans = ["dp=2,zero=3", "dp=2,zero=1,accumulate=2", "dp=2,compress=0.5", "tp=2"]
    plans += ["pp=2,micro=2", "dp=2,cdp=1", "dp=2,local=2,outer"]
    wanted = [Iteration(case="gpt-s", batch=2, seq=16, plan=plan) for plan in ["", *plans]]
    assert collect_iterations(tmp_path, "cpu", wanted, 0) == len(wanted)
    assert collect_iterations(tmp_path, "cpu", wanted, 0) == 0  # they are there
    rows = read_rows([tmp_path], "iteration")
    assert sorted(rows["plan"]) == ["", *sorted(plans)]
    cores = os.cpu_count() or 1
    assert set(rows[rows["plan"] == ""]["threads"]) == {cores}
    assert set(rows[rows["plan"] != ""]["threads"]) == {max(1, cores // 2)}
    assert (rows["status"] == "ok").all() and (rows["time_us"] > 0).all()
