"""Plan key ``bucket=MiB``: the size of DDP's gradient buckets, as its ``bucket_cap_mb``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from itercast.capture.plan import ParallelPlan
from itercast.capture.plan_keys import PlanKey, integer
from itercast.compose.simulate.data_parallel import Strategy


def rules(plan: ParallelPlan, mib: int) -> Iterator[tuple[bool, str]]:
    """DDP alone has such buckets."""
    yield plan.dp == 1, f"bucket={mib} needs dp > 1"
    others = plan.zero or plan.gossip or plan.local or plan.cdp
    yield bool(others), f"bucket={mib} is of DDP: no zero, gossip, local or cdp"


def replicas(strategy: Strategy, mib: int) -> Strategy:
    """The first bucket, too, has this size, as in DDP where it is stated."""
    return replace(strategy, bucket_bytes=mib * 2**20)


KEY = PlanKey(name="bucket", read=integer(1, 1024), rules=rules, replicas=replicas)
