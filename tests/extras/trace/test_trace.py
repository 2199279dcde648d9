"""Traces of plans: nothing missing, and they end when the forecast says."""

from collections import Counter
from typing import Any

import pytest
from plan_case import GPU, Flat, capture_at

from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import Forecast, forecast
from itercast.compose.pricing.price_book import PriceBook
from itercast.extras.trace import events as traces
from itercast.extras.trace.forecasts import shown_rank
from itercast.extras.trace.plan import plan_trace

PLANS = (
    *("", "accumulate=4", "dp=2", "dp=4,zero=3,accumulate=2", "dp=2,tp=2", "tp=2,recompute=full"),
    *("pp=2,micro=4", "pp=2,micro=4,schedule=gpipe", "pp=2,micro=4,schedule=zb"),
    *("dp=2,pp=2,micro=4", "pp=2,micro=4,schedule=interleaved:2", "dp=2,zero=3,pp=2,micro=4"),
    *("pp=2,micro=4,schedule=zbv", "dp=2,offload=activations"),
)


@pytest.fixture(scope="module")
def step() -> StepCapture:
    return capture_at(2, 32)


def traced(step: StepCapture, text: str) -> tuple[list[dict[str, Any]], Forecast]:
    """Events of a plan's trace, and its forecast."""
    plan, book = ParallelPlan.parse(text), PriceBook(Flat(), GPU, 0)
    events: Any = plan_trace(shown_rank(step, plan, book), step.optimizer).to_json()["traceEvents"]
    return events, forecast(step, plan, book)


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X"]


def end_us(events: list[dict[str, Any]]) -> float:
    return float(max(e["ts"] + e["dur"] for e in slices(events)))


@pytest.mark.parametrize("text", PLANS)
def test_the_last_slice_ends_when_the_forecast_does(step: StepCapture, text: str) -> None:
    """And the memory's highest point is the forecast's peak."""
    events, found = traced(step, text)
    assert end_us(events) == pytest.approx(found.iteration_us, abs=0.01)
    counted = [sum(e["args"].values()) for e in events if e["ph"] == "C"]
    assert max(counted) == pytest.approx(found.memory_bytes, rel=1e-6)


@pytest.mark.parametrize("text", PLANS)
def test_every_rank_is_a_process_with_named_threads(step: StepCapture, text: str) -> None:
    """Slices of a thread follow each other or lie within each other, as Perfetto draws them."""
    events, found = traced(step, text)
    assert {e["pid"] for e in slices(events)} == set(range(found.world_size))
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices(events)} <= set(named)
    assert {"host", "compute"} <= set(named.values())
    assert all(e["cat"] for e in slices(events))
    ends: dict[tuple[int, int], float] = {}
    for e in sorted(slices(events), key=lambda e: (e["ts"], -e["dur"])):
        at = (e["pid"], e["tid"])
        end = e["ts"] + e["dur"]
        assert e["ts"] >= ends.get(at, 0.0) - 0.01 or end <= ends[at] + 0.01, e
        ends[at] = max(end, ends.get(at, 0.0))


@pytest.mark.parametrize("text", PLANS)
def test_flows_join_slices(step: StepCapture, text: str) -> None:
    """Each begins and ends within a slice; every kernel that was launched has one."""
    events, found = traced(step, text)
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in slices(events):
        spans.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    flows: dict[int, list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] in "sf":
            flows.setdefault(e["id"], []).append(e)
            inside = spans[e["pid"], e["tid"]]
            assert any(a - 0.01 <= e["ts"] <= b + 0.01 for a, b in inside), e
    assert all([e["ph"] for e in both] == ["s", "f"] for both in flows.values())
    assert all(one["ts"] <= other["ts"] + 0.01 for one, other in flows.values())
    launched = Counter(one["name"] for one, _ in flows.values())["launch"]
    assert launched > 100 * found.world_size
    between = [one for one, other in flows.values() if one["pid"] != other["pid"]]
    assert bool(between) == (found.world_size > 1 and text != "dp=2,tp=2")  # whose groups differ


def test_all_stages_and_micro_batches_are_there(step: StepCapture) -> None:
    """Four forwards and four backwards on each of two stages, and a message for each, both ways."""
    events, _ = traced(step, "pp=2,micro=4")
    schedule = [e for e in slices(events) if e["tid"] == traces.thread_number("schedule")]
    counted = Counter((e["pid"], e["name"], e["args"]["micro_batch"]) for e in schedule)
    every = [(r, kind, i) for r in (0, 1) for kind in ("forward", "backward") for i in range(4)]
    assert counted == Counter(every)
    links = [traces.thread_number(lane) for lane in ("chunk 0 to 1", "chunk 1 to 0")]
    sent = [e for e in slices(events) if e["tid"] in links]
    assert Counter(e["pid"] for e in sent) == {0: 4, 1: 4}
    assert {e["args"]["bytes"] for e in sent} == {2 * 32 * 96 * 4}  # batch, length, width, fp32


def test_messages_have_their_sizes(step: StepCapture) -> None:
    """The buckets of DDP hold all gradients: four bytes a parameter."""
    events, found = traced(step, "dp=2")
    sizes = [e["args"]["bytes"] for e in slices(events) if e["pid"] == 0 and e["cat"] == "comm"]
    assert sum(sizes) == found.memory_by_bytes["gradients"]


def test_many_equal_ranks_are_one_process(
    step: StepCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("itercast.extras.trace.plan.MOST_EVENTS", 10)
    events, _ = traced(step, "dp=4,pp=2,micro=4")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0, stage 0, as 3 others", 4: "rank 4, stage 1, as 3 others"}
