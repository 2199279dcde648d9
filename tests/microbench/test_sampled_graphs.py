"""Blocks of sampled graphs: numbers of vertices by hand, and those of published steps."""

from __future__ import annotations

import math

import pytest

from itercast.compose.predict import predict
from itercast.microbench.cases.inputs import sampled_vertices
from itercast.microbench.cases.registry import case

UGACHE = {  # distinct vertices of a step: bytes of features over those of a row (run logs, SOSP'23)
    "sage-papers": 540_121_498 / 512,
    "sage-friendster": 1_213_328_261 / 1024,
    "sage-mag": 1_621_350_154 / 1536,
}


def test_distinct_vertices_of_a_uniform_sample() -> None:
    """100 of a million draw 5 each: 500 - 0.1 distinct; then these 600 draw 4: 2,900 in all."""
    sizes = {"vertices": 1_000_000, "degree": 9, "fanout": (5, 4), "skew": 0.0}
    assert sampled_vertices(100, sizes) == [100, 600, 100 + round(1e6 * -math.expm1(-0.0029))]
    assert sampled_vertices(100, {**sizes, "degree": 2}) == [100, 300, 900]  # as it has
    tiny = {**sizes, "vertices": 150}
    assert sampled_vertices(100, tiny)[-1] == 150


def test_a_sampled_network_sums_over_blocks_from_the_features_to_the_batch() -> None:
    chosen = case("sage-s")
    inputs = chosen.inputs(16, 0)
    first, last = inputs["blocks"]
    assert first.shape[1] == len(inputs["vertices"]) and first.shape[0] == last.shape[1]
    assert last.shape[0] == len(inputs["labels"]) == 16
    assert chosen.build()(**inputs).shape == (16, 10)


@pytest.mark.parametrize("name", list(UGACHE))
def test_distinct_vertices_of_published_steps_within_a_third(name: str) -> None:
    """All with one exponent, which was chosen on these three graphs."""
    read = len(case(name).inputs(8000, 0)["vertices"])
    assert abs(math.log(read / UGACHE[name])) < math.log(4 / 3)


def test_features_in_host_memory_are_fetched_as_often_as_the_cache_lacks_them() -> None:
    inside = predict("sage-s", gpu="a100-sxm-80gb", indices="zipf:0.85:distinct")
    plans = ("tables=uvm:0.5", "tables=uvm:0.1", "tables=uvm")
    found = [
        predict("sage-s", gpu="a100-sxm-80gb", plan=p, indices="zipf:0.85:distinct") for p in plans
    ]
    times = [f.exposed_comm_us for f in (inside, *found)]
    assert times == sorted(times) and times[0] == 0 and len(set(times)) == 4
    read = len(case("sage-s").inputs(128, 0)["vertices"])
    assert times[-1] == pytest.approx(
        read * 64 * 4 / 24.57e3, rel=0.01
    )  # each distinct vertex once
