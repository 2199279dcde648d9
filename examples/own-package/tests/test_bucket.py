"""The plan key: buckets counted by hand, their law, and what it refuses."""

from __future__ import annotations

import pytest
from itercast_fft.bucket import KEY

from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import added_keys
from itercast.compose.simulate.data_parallel import fill_buckets, strategy_of

MIB = 2**20
READY = [("d", 3), ("c", 1), ("b", 5), ("a", 2)]  # gradients as they become ready, in MiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [("dp=2", [["d"], ["c", "b", "a"]]), ("dp=2,bucket=4", [["d", "c"], ["b"], ["a"]])],
)
def test_a_bucket_closes_at_its_size(text: str, expected: list[list[str]]) -> None:
    """3 MiB pass DDP's first limit of 1 MiB; 3 + 1 reach 4 MiB, and 5 do. All are sent once."""
    strategy = strategy_of(ParallelPlan.parse(text))
    found = fill_buckets((("fp32", n * MIB, name) for name, n in READY), strategy.bucket_bytes)
    assert [names for _, names in found] == expected
    assert sorted(name for _, names in found for name in names) == ["a", "b", "c", "d"]


def test_its_text_and_its_rules() -> None:
    assert added_keys()["bucket"] is KEY
    plan = ParallelPlan.parse("bucket=4,dp=2")
    assert plan.stated == ["dp", "bucket"] and ParallelPlan.parse(str(plan)) == plan
    assert plan != ParallelPlan.parse("dp=2,bucket=8")
    for text, rule in {
        "bucket=4": "bucket=4 needs dp > 1",
        "dp=2,bucket=0": "bucket is an integer from 1 to 1024, got '0'",
        "dp=2,bucket": "bucket is an integer from 1 to 1024, got ''",
        "dp=2,bucket=4,bucket=4": "bucket is given twice",
        "dp=2,zero=1,bucket=4": "bucket=4 is of DDP",
    }.items():
        with pytest.raises(ValueError, match=rule):
            ParallelPlan.parse(text)
