"""Plan search finds the plans that simulating every candidate finds."""

import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
from plan_case import CPU, GPU, capture_at, experts_at, legal_plans, search_of

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.plan_search.bounds import least_us, mean_us
from itercast.compose.plan_search.candidates import Search, candidate_plans
from itercast.compose.plan_search.search import (
    BranchAndBound,
    best_plans,
    local_or_recomputed,
    shapes_of,
    v_shaped,
)
from itercast.compose.plan_search.shapes import FINER_TAKES, Shape, Shapes
from itercast.compose.simulate.iteration import quick_us
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.stages import partition, uneven
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import Gpu, load_gpu

NO_SHAPES = Shapes(search_of(), [], 1.0)


@pytest.fixture(scope="module")
def search() -> Search:
    return search_of()


def with_variants(found: BranchAndBound) -> BranchAndBound:
    """What is found, with V-shaped schedules, local SGD and least recomputation."""
    for variants in (v_shaped, local_or_recomputed):
        found.add(variants(found))
        found.near(NO_SHAPES, lambda plan: True)
    return found


def looked_at(search: Search, plan: ParallelPlan) -> BranchAndBound:
    """A plan, and what else is tried as it is looked at."""
    found = BranchAndBound(search)
    found.add([search.rank(plan)])
    found.near(NO_SHAPES, lambda plan: True)
    return found


@pytest.mark.parametrize("capture", [capture_at, experts_at])
def test_no_better_plan_is_pruned(capture: Callable[[int, int], StepCapture]) -> None:
    search = search_of(capture_at=capture)
    result = best_plans(search, 4, "time", count=5)
    ranks = list(with_variants(legal_plans(search, 4, "time")).listed.values())
    times = sorted(quick_us(r, "adamw") for r in ranks)
    assert [s.iteration_us for s in result.best] == pytest.approx(times[:5])
    assert result.simulated < result.considered <= len(ranks)
    assert all(least_us(r) <= quick_us(r, "adamw") for r in ranks)


@pytest.mark.parametrize("gpu", [CPU, GPU, load_gpu("h100-sxm-80gb")], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    ("text", "least"),
    [("dp=4,zero=3", 0.6), ("dp=4,zero=3,hsdp=2", 0.6), ("dp=2,pp=2,zero=3,micro=4", 0.5)],
)
def test_bounds_know_what_fsdp_sends_in_each_micro_batch(gpu: Gpu, text: str, least: float) -> None:
    """Messages of the whole model take longer than compute, which alone would be no bound.

    Not in the bound is what a pipeline scatters once, after its last backward.
    """
    rank = search_of(gpu).rank(ParallelPlan.parse(text))
    simulated_us = quick_us(rank, "adamw")
    assert mean_us(rank) < simulated_us / 4
    assert least * simulated_us < least_us(rank) <= simulated_us


def test_plans_finer_than_those_that_are_too_slow_are_not_listed(search: Search) -> None:
    """Ops take 10 us however small: with half the samples in a micro-batch a step takes twice."""
    shapes, whole_us = shapes_of(search, 4, "time"), mean_us(search.rank(ParallelPlan()))
    cut = {n: Shape.of(ParallelPlan(accumulate=8 // n), search.batch) for n in (8, 4, 2)}
    for samples, times in ((8, 1), (4, 2)):
        assert cut[samples] in {Shape.of(r.plan, search.batch) for r in shapes.take(shapes.least)}
        assert shapes.bounds[cut[2]] == pytest.approx(FINER_TAKES * times * whole_us / 4)
    every = len(legal_plans(search, 4, "time").listed)
    assert best_plans(search, 4, "time", count=1).considered < every


def gpt2_at(batch: int, seq: int, autocast: bool) -> StepCapture:
    """One step of GPT-2 small: 12 layers between an embedding and a head."""
    return capture("gpt2-small", batch=batch, seq=seq)


@pytest.mark.parametrize(("text", "better"), [("pp=2", False), ("pp=5", True)])
def test_uneven_stages_are_the_best_balanced_of_all(text: str, better: bool) -> None:
    """Of 12 equal layers, tried one by one: no first and last stage makes the slowest faster."""
    plan, search = ParallelPlan.parse(f"{text},micro=8"), search_of(capture_at=gpt2_at)
    rank = search.rank(plan)
    assert rank is not None

    def slowest_us(other: ParallelPlan) -> float:
        chunks = partition(rank.model.layers, other)
        works = [[(x.forward_work, x.backward_work, n) for x, n in c.runs] for c in chunks]
        return max(sum(n * (f.alone_us + b.alone_us) for f, b, n in work) for work in works)

    found = uneven(rank.model.layers, plan)
    ends = [(f, n) for f in range(1, 12) for n in range(1, 13 - f)]
    legal = [e for e in ends if (sum(e) == 12 if plan.pp == 2 else sum(e) + plan.pp - 2 <= 12)]
    least = min(slowest_us(replace(plan, first=f, last=n)) for f, n in legal)
    assert (found is not None) == better
    assert slowest_us(found or plan) == pytest.approx(min(least, slowest_us(plan)))
    if found:
        assert found in looked_at(search, plan).listed


def test_ep_divides_dp_and_the_experts(search: Search) -> None:
    """Four experts: ep of 1, 2 or 4 on four GPUs, 1 on three; without experts ep is 1."""
    mixture = search_of(capture_at=experts_at)
    assert {(p.dp, p.ep) for p in candidate_plans(mixture, 4) if p.tp * p.pp == 1} == {
        *((4, 1), (4, 2), (4, 4))
    }
    assert {p.ep for p in candidate_plans(mixture, 3)} <= {1}
    assert {p.ep for p in candidate_plans(search, 4)} == {1}


@pytest.mark.parametrize(
    ("gpu", "node", "largest"),
    [
        ("gb200", "", 16),  # 72 GPUs joined by NVLink
        ("gb200", "gb200-nvl72", 16),
        ("b200-sxm", "", 8),
        ("b200-sxm", "dgx-b200", 8),
    ],
)
def test_tensor_parallelism_is_tried_within_one_link_domain(
    gpu: str, node: str, largest: int
) -> None:
    """Of 16 GPUs a rack of GB200 joins all, an HGX board of B200 eight."""
    search = replace(search_of(load_gpu(gpu)), node=load_node(node) if node else None, batch=16)
    assert max(p.tp for p in candidate_plans(search, 16)) == largest


def gpu_with_room(nbytes: float) -> Gpu:
    """A device all of whose memory is for tensors."""
    return Gpu(**{**GPU.to_dict(), "kind": "cpu", "hbm_bytes": float(nbytes)})


def test_a_gpu_too_small_for_all_experts_holds_some_of_them() -> None:
    """A rank's bytes shrink with ep, so that the lower bound of memory keeps plans with ep."""
    search = search_of(capture_at=experts_at)
    plans = [p for p in candidate_plans(search, 4) if p.pp * p.tp == 1 and p.ep > 1]
    ranks = [r for p in plans if (r := search.allowed(p)) is not None]
    spread = min(sum(memory(r, "adamw").values()) for r in ranks)
    tight = gpu_with_room(spread * 1.01)
    best = best_plans(search_of(tight, experts_at), 4, "memory", count=3).best
    assert best[0].fits and best[0].memory_bytes <= spread


def test_best_plans_use_all_gpus_but_for_cost(search: Search) -> None:
    collected = set[bool]()
    found = best_plans(search, 4, "time", on_plan=lambda n, best: collected.add(gc.isenabled()))
    assert {s.plan.world_size for s in found.best} == {4}
    assert collected == {False} and gc.isenabled()  # garbage is collected after a search
    cheap = best_plans(search, 4, "cost").best[0]
    assert cheap.plan.world_size in (1, 2, 4)
    small = best_plans(search, 4, "memory").best
    assert [s.memory_bytes for s in small] == sorted(s.memory_bytes for s in small)


def test_plans_that_exceed_the_memory_come_last(search: Search) -> None:
    ranks = [r for p in candidate_plans(search, 4) if (r := search.allowed(p)) is not None]
    sizes = sorted(sum(memory(r, "adamw").values()) for r in ranks)
    tight = gpu_with_room(sizes[len(sizes) // 2])
    best = best_plans(search_of(tight), 4, "time", count=1000).best
    fits = [s.fits for s in best]
    assert True in fits and fits == sorted(fits, reverse=True)


def test_replicas_may_shard_within_a_node(search: Search) -> None:
    """Eight GPUs share a node, tp among them; on one node that is plain ZeRO."""
    found = {(p.tp, p.hsdp) for p in candidate_plans(search, 16) if p.zero == 3 and p.pp == 1}
    assert {(2, 0), (2, 4), (4, 0), (4, 2)} <= found
    assert (8, 1) not in found
    assert {p.hsdp for p in candidate_plans(search, 8)} == {0}
    plans = [p for p in candidate_plans(search, 16) if p.hsdp == 4][:3]
    for plan in plans:
        rank = search.rank(plan)
        assert least_us(rank) <= search.simulated(rank).iteration_us


def test_v_shaped_schedules_and_local_sgd_are_tried(search: Search) -> None:
    """Four micro-batches on two stages suffice for zbv and dualpipev, two on two only for zbv.

    Of the plans on four GPUs local SGD is added to those with replicas that are whole.
    """
    search = replace(search, local=16)
    legal = legal_plans(search, 4, "time")
    before = set(map(str, legal.listed))
    found = set(map(str, with_variants(legal).listed)) - before
    assert {"dp=2,pp=2,micro=4,schedule=zbv:2", "dp=2,pp=2,micro=4,schedule=dualpipev:2"} <= found
    assert "dp=2,pp=2,micro=2,schedule=zbv:2" in found
    assert "dp=2,pp=2,micro=2,schedule=dualpipev:2" not in found
    assert {"dp=4,local=16", "dp=2,pp=2,micro=4,schedule=zbv:2,local=16"} <= found
    assert not any("zero" in p and "local" in p for p in found)
    legal.best = [replace(legal.weighed[0], iteration_us=0.0)] * legal.count
    assert not [*v_shaped(legal), *local_or_recomputed(legal)]  # none can be so fast


@pytest.mark.parametrize("lacking", [1 / 4, -0.001])
def test_no_more_is_recomputed_than_the_memory_takes(lacking: float) -> None:
    """A GPU lacks a quarter of what a replica saves for backward, or has hardly more than it takes.

    The largest budget that fits beyond the memory model's error.
    """

    def searched(gpu: Gpu) -> Search:
        return replace(search_of(gpu), optimizer="sgd", batch=1024)

    plan = ParallelPlan.parse("dp=4,accumulate=4")
    used = memory(searched(GPU).rank(plan), "sgd")
    lacks = used["activations"] * lacking
    assert used["activations"] / 4 > used["parameters"]
    tight = searched(gpu_with_room(sum(used.values()) - lacks))
    looked = looked_at(tight, plan)
    listed = looked.weighed[0]
    (recomputed,) = local_or_recomputed(looked)
    found = tight.scored(recomputed, 0.0)
    tenths = [replace(plan, recompute="budget", recomputed=n / 10) for n in range(1, 11)]
    bounded = [looked_at(tight, p).weighed[0] for p in tenths]
    fitting = [one.plan for one in bounded if one.fits and not one.close]
    assert listed.fits == (lacking < 0) and (listed.close or not listed.fits)
    assert found.fits and not found.close
    assert found.plan == fitting[-1] and 0 < found.plan.recomputed <= 1


def ranking_at(batch: int, seq: int, autocast: bool) -> StepCapture:
    """One step of a small DLRM: most of its parameters are in tables."""
    return capture("dlrm-s", batch=batch, optimizer="sgd")


def ranking_search(gpu: Gpu) -> Search:
    return replace(search_of(gpu, ranking_at), optimizer="sgd", batch=512)


def test_tables_are_spread_where_their_copies_do_not_fit() -> None:
    """A GPU holds half of the copies' bytes: of plans on four GPUs that spread them one fits."""
    search = ranking_search(GPU)
    copies, spread = (
        search.simulated(search.rank(ParallelPlan.parse(text)))
        for text in ("dp=4", "dp=4,shard=greedy")
    )
    assert spread.memory_bytes < copies.memory_bytes / 2
    tight = gpu_with_room(copies.memory_bytes / 2)
    best = best_plans(ranking_search(tight), 4, "time").best
    assert best[0].fits and best[0].plan.shard == "greedy"
    assert not any(s.fits for s in best if str(s.plan) == "dp=4")
    tighter = ranking_search(gpu_with_room(spread.memory_bytes / 2))
    assert any(p.shard and p.recompute for p in legal_plans(tighter, 4, "time").listed)


def test_spread_tables_compete_with_copies_where_both_fit() -> None:
    """Both are simulated, and the faster one comes first; a replica's batch is never cut."""
    search = ranking_search(GPU)
    plans = list(candidate_plans(search, 4))
    spread = {
        f"dp={dp},shard=greedy" for dp in ("4", "2,tp=2", "1,tp=4", "2,tp=2,zero=3", "4,zero=3")
    }
    assert {"dp=4", *spread} <= {str(p) for p in plans}
    assert {p.microbatches for p in plans} == {1}
    times = {str(s.plan): s.iteration_us for s in best_plans(search, 4, "time", count=99).best}
    assert list(times.values()) == sorted(times.values())
    assert times["dp=4,shard=greedy"] != times["dp=4"]


def test_tables_stay_where_other_parameters_are_larger(search: Search) -> None:
    """A GPT looks tokens up too; one GPU has nobody to share with."""
    assert not any(p.shard for p in candidate_plans(search, 4))
    assert not any(p.shard for p in candidate_plans(ranking_search(GPU), 1))


def test_where_no_plan_fits_the_least_memory_is_named() -> None:
    """Of two GPUs each takes half of weights, gradients and two states of AdamW."""
    search = search_of(gpu_with_room(1e4))
    assert not best_plans(search, 2, "time").best
    weights = sum(p.nbytes for p in capture_at(8, 64).parameters)
    assert min(search.too_large) == pytest.approx(4 * weights / 2, rel=0.01)
    assert search.why_none().startswith("parameters, gradients and optimizer take at least")


def test_plans_whose_micro_batches_cannot_be_captured_are_left_out() -> None:
    """Those of one sample: of the others the same are found as where all can be."""
    tried = list[int]()

    def several(samples: int, seq: int, autocast: bool = False) -> StepCapture:
        tried.append(samples)
        if samples == 1:
            raise ValueError("norms over one sample")
        return capture_at(samples, seq, autocast)

    whole, search = search_of(), search_of(capture_at=several)
    found = best_plans(search, 4, "time").best
    plans = [s.plan for s in best_plans(whole, 4, "time", count=1000).best]
    assert [s.plan for s in found] == [p for p in plans if whole.size(p)[0] > 1][: len(found)]
    assert tried.count(1) == 1
    assert (
        search.left_out()
        == "no plans with micro-batches of 1 x 64 tokens a rank: norms over one sample"
    )
    assert whole.left_out() == ""
    with pytest.raises(ValueError, match="nothing"):
        best_plans(search_of(capture_at=nothing), 4, "time")


def nothing(samples: int, seq: int, autocast: bool = False) -> StepCapture:
    raise ValueError("nothing can be captured")
