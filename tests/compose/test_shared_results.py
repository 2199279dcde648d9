"""Plans share results only where these are equal; captures are shared as long as the code is."""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from plan_case import GPU, Flat, capture_at, experts_at

from itercast.capture.base import extensions
from itercast.capture.base.switches import switching_off
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import PlanKey, integer
from itercast.compose.capture_model import CAPTURE, capture
from itercast.compose.forecast import rank_of
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.graph.rewrite import StepBuilder
from itercast.compose.notes import without_effect
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.compose.simulate.iteration import evaluate
from itercast.compose.target import find_target, forecast_step
from itercast.learners import kept_answers, unfinished
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.microbench.hardware.spec import Gpu

DEVICE: Gpu = replace(GPU, peak_flops_per_s={"fp32": 1e12, "bf16": 1e12}, hbm_bytes_per_s=1e9)
# A plan, and plans that differ from it in one key each.
VARIANTS = {
    "dp=4": "dp=8; tp=2; amp; zero=1; cdp=2; compress=0.5; compress=int8; gossip=ring;"
    "gossip=ring:0.5; local=1; local=4; local=4:0.5; local=4,outer;"
    "coconet=split; coconet=split,overlap:4; coconet=split,overlap:8; accumulate=2; micro=4;"
    "recompute=full; recompute=full:0.5; recompute=selective; offload=optimizer; cp=2",
    "dp=4,amp,zero=1": "zero=2; zero=3; hsdp=2; tp=2; accumulate=2; recompute=full; compress=0.5",
    "dp=4,zero=3,accumulate=2": "no_sync; accumulate=4",
    "dp=4,zero=3": "offload=parameters; offload=optimizer; accumulate=2; hsdp=2",
    "dp=4,tp=2,sp,zero=1": "zero=2; zero=3; hsdp=2; tp_overlap; accumulate=2; pp=2;"
    "recompute=full; compress_tp=int8; compress_tp=0.5",
    "dp=2,pp=2,micro=4": "micro=8; schedule=gpipe; schedule=zb; schedule=interleaved:2;"
    "schedule=zbv; first=1; last=1; layers=1+3; zero=1; zero=3; tp=2; compress=0.5;"
    "gossip=ring; coconet=split;"
    "offload=activations; recompute=full; offload=optimizer; cp=2; compress_pp=int8",
    "dp=4,zero=3,pp=2,micro=4": "hsdp=2; offload=activations; micro=2;"
    "recompute=selective; offload=parameters",
}
MIXTURE = {
    "dp=4,ep=2": "ep=4; ep=2:1.5; ep_overlap; ep_overlap,accumulate=2; ep_once; zero=1; pp=2;"
    "dp=8; compress_ep=int8",
    "dp=4,tp=2,sp,ep=2": "etp=1; ep=2:1.5",
}
# Of these a plan has one value, or others test them: where ranks, tables and parts of graphs are.
ELSEWHERE = {
    "shard",
    "shard_group",
    "compress_shard",
    "tables",
    "cached",
    "node",
    "nodes",
}


def plans(variants: dict[str, str]) -> list[ParallelPlan]:
    """The plans and their variants, of which a key replaces one that the plan has."""
    found = []
    for base, keys in variants.items():
        found.append(ParallelPlan.parse(base))
        for key in keys.split(";"):
            name = key.strip().partition("=")[0]
            kept = [p for p in base.split(",") if p.partition("=")[0] != name]
            found.append(ParallelPlan.parse(",".join([*kept, key])))
    return list(dict.fromkeys(found))


def forecast(step: StepCapture, plan: ParallelPlan, book: PriceBook) -> dict[str, Any]:
    """Time, parts and memory of an iteration, or the rule that the plan breaks."""
    cluster = cluster_for(plan, book.gpu)
    try:
        rank = rank_of(step, plan, book, cluster)
        found = evaluate(rank, "adamw")
    except ValueError as exc:
        return {"refused": str(exc)}
    names = ("iteration_us", "compute_us", "exposed_comm_us", "comm_us", "bubble_us", "memory")
    return {name: getattr(found, name) for name in names}


@pytest.mark.parametrize(
    ("step", "variants"), [(capture_at(8, 64), VARIANTS), (experts_at(8, 64), MIXTURE)]
)
def test_plans_share_no_result_that_differs(step: StepCapture, variants: dict[str, str]) -> None:
    """Forecasts one after the other, with all caches, are those of each plan on its own."""
    book = PriceBook(Flat(), DEVICE, 0)
    together = {str(plan): forecast(step, plan, book) for plan in plans(variants)}
    alone = {
        str(plan): forecast(replace(step), plan, PriceBook(Flat(), DEVICE, 0))
        for plan in plans(variants)
    }
    assert together == alone
    assert sum("refused" in found for found in alone.values()) < len(alone) / 4


@pytest.mark.parametrize(("engine", "shared"), [("eager", True), ("compile", False)])
def test_plans_that_run_the_same_ops_share_them(engine: str, shared: bool) -> None:
    """Shards of state alone, or of weights, too: only a compiled step casts gathered ones apart."""
    step = with_engine(capture_at(8, 64), engine)
    plans = [ParallelPlan(dp=4, zero=zero) for zero in (1, 3)]
    one, other = (rank_graph(step, plan, DEVICE) for plan in plans)
    assert (one is other) == shared


def test_every_key_is_varied() -> None:
    """A key that someone adds is in one of the plans above, or the law does not hold it."""
    found = [p for variants in (VARIANTS, MIXTURE) for p in plans(variants)]
    own = [f.name for f in fields(ParallelPlan) if f.name != "more"]
    values = {name: {getattr(p, name) for p in found} for name in own}
    assert {name for name, held in values.items() if len(held) < 2} == ELSEWHERE


@dataclass(frozen=True, kw_only=True)
class WiderPlan(ParallelPlan):
    """A plan with a key that does not say what it changes."""

    bucket: int = 0


def test_a_key_that_says_nothing_changes_everything() -> None:
    """It is part of every cache's key: then it costs time, not truth."""
    for part in ("ops", "prices", "stages"):
        assert 4 not in WiderPlan(dp=4).parts(part)
        assert 4 in WiderPlan(bucket=4).parts(part)


@pytest.mark.parametrize(
    ("step", "text", "without", "with_effect"),
    [
        (capture_at(8, 64), "dp=4,zero=2", "dp=4,zero=1", "dp=4,zero=2,accumulate=2"),
        (capture_at(8, 64), "dp=4,cdp=2", "dp=4,cdp=1", ""),
        (experts_at(8, 64), "dp=4,ep=2,ep_overlap", "dp=4,ep=2", "dp=4,ep=2,ep_overlap,micro=2"),
        (experts_at(8, 64), "dp=4,ep=2,ep_once", "dp=4,ep=2", "dp=16,ep=16,ep_once"),
    ],
)
def test_a_key_without_effect_is_noted(
    step: StepCapture, text: str, without: str, with_effect: str
) -> None:
    """The forecast is that of the plan without it; where it changes something nothing is noted."""
    book = PriceBook(Flat(), DEVICE, 0)
    plan, other = ParallelPlan.parse(text), ParallelPlan.parse(without)
    assert forecast(step, plan, book) == forecast(step, other, book)
    assert len(list(without_effect(plan, cluster_for(plan, DEVICE)))) == 1
    for also in (without, with_effect):
        silent = ParallelPlan.parse(also)
        assert not list(without_effect(silent, cluster_for(silent, DEVICE)))


def test_a_key_that_a_package_adds_changes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs forward's first op n times more and keeps n bytes; caches know it apart."""

    def again(step: StepCapture, plan: ParallelPlan, n: int) -> StepCapture:
        made, at = StepBuilder(step), [c.phase for c in step.calls].index("forward")
        for i, call in enumerate(step.calls):
            made.calls += [call] * (n if i == at else 0)
            made.add(i, call)
        return made.step()

    def held(found: dict[str, int], plan: ParallelPlan, n: int) -> dict[str, int]:
        return found | {"buckets": found["buckets"] + n}

    key = PlanKey(name="more", read=integer(1, 9), changes="ops prices", step=again, memory=held)
    added = {"plan_keys": {"more": (key, "a test")}}
    monkeypatch.setattr(extensions, "_added", lambda group: added.get(group, {}))
    step, book = replace(capture_at(8, 64)), PriceBook(Flat(), DEVICE, 0)
    texts = ("dp=2", "dp=2,more=1", "dp=2,more=2")
    found = [forecast(step, ParallelPlan.parse(text), book) for text in texts]
    times = [one["iteration_us"] for one in found]
    assert times == sorted(set(times))
    assert [one["memory"]["buckets"] - found[0]["memory"]["buckets"] for one in found] == [0, 1, 2]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "vocab_size": 512,
}


def test_answers_are_kept_by_question_bundle_and_what_is_switched_off(tmp_path: Path) -> None:
    """Not of a bundle in memory that differs from its files, as ``calibrate`` makes it."""
    answers = count(1)
    for name in ("one", "two"):
        Bundle(models={}, gpus={}, anchors={(name, 1): (1.0, 1.0)}).save(tmp_path / name)
    one, two = (Bundle.load(tmp_path / name) for name in ("one", "two"))

    def answer(bundle: Bundle, question: int) -> Any:
        return kept_answers.kept_answer(bundle, ["gemm"], question, partial(next, answers))

    assert (answer(one, 1), answer(one, 1), answer(one, 2)) == (1, 1, 2)
    assert answer(two, 1) == 3
    with switching_off("power_limit"):
        assert answer(one, 1) == 4
    assert answer(one, 1) == 1
    changed = replace(one, models={})
    assert (answer(changed, 1), answer(changed, 1)) == (5, 6)


@pytest.mark.parametrize("folder", [CAPTURE, *kept_answers.CODE, *unfinished.CODE], ids=str)
def test_digests_are_of_folders_with_code(folder: Path) -> None:
    """A moved folder would leave a digest without files, and old captures and answers in use."""
    assert any(folder.rglob("*.py"))


def test_all_tables_of_a_recommender_are_captured() -> None:
    """Equal tables stand side by side: two of them would be another model."""
    step = capture("dlrm-rm2")
    lookups = [
        c for c in step.calls if c.op.startswith("aten._embedding_bag") and "back" not in c.op
    ]
    tables = [p for p in step.parameters if p.name.startswith("tables.")]
    assert len(lookups) == len(tables) > 2
    assert "tables" not in step.repeats


@pytest.mark.parametrize("plan", ["dp=1", "dp=4,zero=3"])
def test_layers_left_out_cost_the_host_what_they_cost_in_a_whole_capture(
    tmp_path: Path, plan: str
) -> None:
    """What a step does once before its first layer or after its last is not done by every layer."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    target = find_target("h100-sxm-80gb", plan, SHIPPED)
    short, whole = (
        forecast_step(capture(config, batch=1, seq=64, dtype="bf16", whole=whole), target)
        for whole in (False, True)
    )
    assert short.host_us == pytest.approx(whole.host_us, rel=0.02)
    assert short.memory_bytes == pytest.approx(whole.memory_bytes, rel=0.02)
