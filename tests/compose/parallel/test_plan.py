"""Plans are read from text; a bad one is refused with the rule it breaks."""

import law_case
import pytest

from itercast.capture.plan import ParallelPlan
from itercast.compose.parallel.placement import ranks_per_node

GOOD = [
    *law_case.PLANS,
    *law_case.CUT,
    "",
    "dp=2,amp",
    "dp=2,tp=4,sp,ep=8",
    "dp=8,tp=2,sp,ep=4,etp=1",
    "pp=4,micro=8,first=2,last=3",
    "pp=2,micro=4,schedule=dualpipev:2",
    "accumulate=4,recompute=full:0.5,offload=optimizer",
    "dp=8,zero=3,hsdp=4,amp,accumulate=4,offload=parameters+activations",
    "tp=2,pp=2,compress_tp=int8,compress_pp=dct:0.5",
    "dp=4,tp=2,ep=2,compress=dct:0.25,compress_tp=int8,compress_ep=0.5",
    "dp=8,local=100,outer",
    "dp=8,local=100:0.25",
    "dp=4,tp=2,zero=2,shard=greedy:2,local=8",
    "dp=16,node=dgx-h100,nodes=2",
    "dp=4,amp,shard=plans/tables.json,node=dgx-h100",
]
BAD = {
    "tp=2,tp=2": "tp is given twice",
    "width=1": "unknown key 'width'; known: first, tp, dp; all 37: itercast list keys",
    "dp=0": "dp is an integer from 1 to 99999999",
    "dp=x": "dp is an integer from 1 to 99999999",
    "sp": "sp needs tp > 1",
    "tp=4,tp_overlap": "tp_overlap needs sp",
    "dp=4,ep_overlap": "ep_overlap and ep_once need ep > 1",
    "dp=4,ep_once": "ep_overlap and ep_once need ep > 1",
    "amp=1": "amp takes no value",
    "dp=4,ep=3": "ep divides dp, or tp x dp with etp=1",
    "dp=2,tp=4,ep=8": "experts over tp x dp ranks need sp",
    "dp=4,tp=4,ep=2,etp=2": "etp is 1 or tp",
    "dp=4,tp=4,sp,etp=1": "etp=1 needs ep > 1",
    "schedule=zb": "schedule=zb needs pp > 1",
    "pp=2,schedule=2f2b": "schedule is one of",
    "pp=2,schedule=1f1b:2": "only interleaved takes a number",
    "pp=4,micro=6,schedule=interleaved": "interleaved needs micro divisible by pp",
    "pp=2,micro=3,schedule=dualpipev": "two micro-batches per rank or more: micro >= 4",
    "pp=2,schedule=zbv:3": "zbv has two stages per rank",
    "pp=2,accumulate=2": "give micro instead of accumulate",
    "zero=1": "zero=1 needs dp > 1",
    "dp=2,zero=4": "zero is an integer from 0 to 3",
    "dp=2,compress=2": "compress is above 0",
    "compress=0.5": "compress needs dp > 1",
    "tp=2,compress_tp=int3": "a share of the bytes, int8, fp8, int4 or dct:SHARE, got",
    "tp=2,compress_tp=dct": "compress_tp is a share",
    "tp=2,compress_tp=dct:2": "compress_tp is above 0 and up to 1, got 2",
    "dp=2,compress_tp=0.5": "compress_tp needs tp > 1",
    "dp=2,gossip=ring,compress=int8": "no gossip, local, coconet or cdp",
    "dp=2,gossip=ring:0": "above 0 and up to 1",
    "dp=2,gossip=ring,zero=1": "keeps whole replicas",
    "dp=2,pp=2,cdp=1": "cdp with pp: micro-batches are the replicas",
    "pp=4,micro=2,cdp=1": "micro >= pp",
    "cdp=1": "dp > 1 or pp > 1",
    "dp=2,cp=2,cdp=1": "no gossip, ep, cp",
    "dp=2,zero=2,cdp=1": "zero=3 without hsdp",
    "tp=2,local=4": "local=4 needs dp > 1",
    "dp=4,local=4:0": "local's share is above 0 and up to 1",
    "dp=4,hsdp=2,zero=3,local=4:0.5": "samples whole replicas: no zero, no shard",
    "dp=2,outer": "outer is an optimizer of averaged parameters",
    "dp=2,cp=2,local=4": "local steps whole replicas",
    "dp=2,zero=1,local=4": "groups that shard: hsdp below dp",
    "dp=2,compress=int8,local=4": "no gossip, local, coconet or cdp",
    "dp=4,shard=greedy,local=4": "averages groups' tables: shard=...:N",
    "dp=2,coconet=fuse": "coconet starts with split",
    "dp=2,coconet=split,fuse": "fuse needs reorder",
    "dp=2,zero=1,coconet=split": "coconet rewrites DDP",
    "dp=2,cdp=1,compress=0.5": "compress acts on all_reduce: no cdp",
    "dp=8,hsdp=4": "hsdp=4 needs zero",
    "dp=8,zero=3,hsdp=3": "hsdp is from 2 and divides dp",
    "first=2": "first and last need pp > 1",
    "pp=3,layers=2+2": "layers has a number for each of 3 stages",
    "pp=2,layers=2+x": "layers is an integer",
    "pp=2,last=1,schedule=interleaved:2": "not interleaved",
    "recompute=full:0": "share is above 0",
    "recompute=full:x": "is a number above 0",
    "nodes=2": "nodes needs node",
    "offload=weights": "offload is one of",
    "offload=activations+activations": "offload is one of",
    "dp=2,zero=3,offload=optimizer+parameters": "has the optimizer's state in host memory, too",
    "cut=0.5": "dp > 1",
    "dp=2,cut=2": "up to 1",
    "dp=2,tp=2,cut=0.5": "goes with dp",
    "dp=4,shard=greedy:3": "shard's group is from 2 and divides dp \\* tp \\* cp, got 3",
    "dp=2,shard=": "shard is greedy or a JSON file",
    "shard=greedy": "shard spreads tables over ranks: dp > 1",
    "dp=2,gossip=ring,shard=greedy": "shard goes with dp, zero, hsdp, ep, amp, compress, local",
}


def test_a_plan_reads_its_own_text() -> None:
    for text in GOOD:
        plan = ParallelPlan.parse(text)
        assert ParallelPlan.parse(str(plan)) == plan, text


@pytest.mark.parametrize("text", BAD)
def test_a_bad_plan_gets_one_line_that_names_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        ParallelPlan.parse(text)
    assert "\n" not in str(caught.value)


def test_world_size_and_micro_batches() -> None:
    assert ParallelPlan.parse("dp=2,tp=4,pp=3,cp=5").world_size == 120
    assert ParallelPlan(pp=4).microbatches == 4  # as many as stages
    assert ParallelPlan(pp=4, micro=16).microbatches == 16
    assert ParallelPlan(accumulate=3).microbatches == 3
    assert ParallelPlan().microbatches == 1
    assert ParallelPlan.parse("dp=2,compress=1") == ParallelPlan.parse("dp=2")


def test_ranks_fill_nodes_evenly_or_do_not_fit() -> None:
    assert ranks_per_node(ParallelPlan(dp=12), 8) == 6  # two nodes
    assert ranks_per_node(ParallelPlan(dp=4), 8) == 4
    assert ranks_per_node(ParallelPlan(dp=8, node="x", nodes=4), 8) == 2
    with pytest.raises(ValueError, match="16 ranks do not fit 1 node of 8 GPUs"):
        ranks_per_node(ParallelPlan(dp=16, node="x", nodes=1), 8)
