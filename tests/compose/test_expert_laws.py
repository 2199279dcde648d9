"""Laws of experts that ep spreads over ranks: nothing of them is lost, and nothing sent in vain."""

from typing import Any

import pandas as pd
import pytest
import torch
from drawn_plans import drawn
from law_case import KIB, rank_for, run_of
from plan_case import Flat
from torch import nn

from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture
from itercast.compose.simulate.memory.rank_memory import Sizes, rank_memory
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.rank import Rank
from itercast.compose.simulate.rank_program import RankProgram
from itercast.compose.simulate.stages import stages_of

EXPERTS = 2 * 4 * 96 * 384 * 4  # bytes of a block of moe-s: two stacks of four matrices in fp32
BLOCKS = 2


def sizes_of(stage: Rank) -> Sizes:
    """Bytes of a stage's layers."""
    return Sizes.of([(x, 1) for x in stage.layers])


@pytest.mark.parametrize(("name", "text"), [*drawn(60, 1), *drawn(60, 2, least="ep")])
def test_all_ranks_together_hold_the_model_at_least_once(name: str, text: str) -> None:
    """Parameters, gradients and Adam's state of two copies, whatever is sharded or spread.

    Without tensor parallelism and padding a plan that shards all of them holds them once a group.
    Where shards lie in host memory a GPU has what it would have of a rank's there.
    """
    text = text.replace(",offload=parameters", "")
    plan, whole = ParallelPlan.parse(text), sizes_of(rank_for(name, ""))
    held = [0, 0, 0]
    for stage in stages_of(rank_for(name, text)):
        sizes = sizes_of(stage)
        parameters = rank_memory(sizes, plan, "adamw")["parameters"]
        gradients, state = sizes.held_by_rank(plan, "adamw", {})
        ranks = plan.world_size // plan.pp
        held = [
            n + ranks * one for n, one in zip(held, (parameters, gradients, state), strict=True)
        ]
    slack = plan.world_size * 8 * len(stages_of(rank_for(name, text)))  # of whole bytes and rows
    for n, once in zip(held, (whole.parameters, whole.trained, 2 * whole.trained), strict=True):
        assert n >= once - slack
        assert n <= 1.1 * plan.world_size * once


def expert_bytes(text: str) -> dict[str, int]:
    """By kind the bytes that a rank sends for a mixture, over those of its other weights."""
    total: dict[str, int] = {}
    for op in run_of(rank_for("moe", text)).sent:
        total[op.op] = total.get(op.op, 0) + round(op.duration_us * KIB)
    return total


@pytest.mark.parametrize(("ranks", "ep", "sharers"), [(4, 4, 1), (8, 4, 2), (8, 2, 4), (16, 4, 4)])
def test_experts_are_sharded_among_their_replicas_alone(ranks: int, ep: int, sharers: int) -> None:
    """Each of ``ranks / ep`` ranks with the same experts holds a share of them; alone it has all.

    Four experts of 294,912 bytes a block; Adam's state is twice that.
    """
    held = {zero: sizes_of(rank_for("moe", f"dp={ranks},ep={ep},zero={zero}")) for zero in (1, 3)}
    own = BLOCKS * EXPERTS // ep
    for zero, sizes in held.items():
        plan = ParallelPlan.parse(f"dp={ranks},ep={ep},zero={zero}")
        assert plan.expert_shards == sharers
        gradients, state = sizes.held_by_rank(plan, "adamw", {})
        dense = sizes.dense.nbytes
        assert state == 2 * dense // ranks + 2 * own // sharers
        whole = zero == 1
        assert gradients == (dense if whole else dense // ranks) + own // (1 if whole else sharers)


def test_gathers_and_scatters_of_experts_go_among_their_replicas() -> None:
    """Per block 294,912 bytes of one expert are gathered twice and scattered once among two ranks;
    with as many experts as ranks nothing is sent for them. The pricer takes 1 us per KiB.
    """
    rank = rank_for("moe", "dp=8,ep=4,zero=3")
    group = rank.cluster.groups["expert_shard"]
    assert (group.size, group.per_node) == (2, 2)
    one = EXPERTS // 4
    lone, shared = (expert_bytes(f"dp={n},ep=4,zero=3") for n in (4, 8))
    for kind, times in (("all_gather", 2), ("reduce_scatter", 1)):
        assert shared[kind] - lone[kind] == pytest.approx(times * BLOCKS * one, rel=0.01)


def test_groups_that_shard_sum_their_experts_among_themselves() -> None:
    """Of 16 ranks in groups of four, ep=4 leaves each group one copy of each expert: it is whole,
    and summed over the four groups. With ep=2 two share it: half of two experts is summed.
    """
    for ep, shards in ((4, 1), (2, 2)):
        text = f"dp=16,hsdp=4,ep={ep},zero=3"
        rank = rank_for("moe", text)
        plan = rank.plan
        assert (plan.expert_shards, plan.expert_replicas) == (shards, 16 // ep)
        groups = rank.cluster.groups
        assert (groups["expert_shard"].size, groups["expert_replicate"].size) == (shards, 4)
        dense = sum(x.layer.dense.padded_bytes(4, trained=True) for x in rank.layers) // 4
        own = BLOCKS * EXPERTS // ep // shards
        assert expert_bytes(text)["all_reduce"] == pytest.approx(dense + own, rel=1e-3)


def test_experts_that_no_other_rank_has_are_in_no_bucket() -> None:
    """DDP with ep = dp: their gradients are neither copied, nor sent, nor there twice."""
    rank = rank_for("moe", "dp=4,ep=4")
    own = BLOCKS * EXPERTS // 4
    sizes = sizes_of(rank)
    found = memory(rank, "adamw")
    assert found["buckets"] == sizes.dense.nbytes == sizes.trained - own
    assert expert_bytes("dp=4,ep=4")["all_reduce"] == sizes.dense.nbytes
    assert expert_bytes("dp=8,ep=4")["all_reduce"] == sizes.trained
    assert memory(rank_for("moe", "dp=8,ep=4"), "adamw")["buckets"] == sizes.trained


class Updated(Flat):
    """The optimizer takes 1 us per element."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return rows["numel"] if family == "optimizer" else super().us(family, rows)


@pytest.mark.parametrize(("text", "own"), [("dp=4,ep=4", 1.0), ("dp=8,ep=4", 0.5)])
def test_an_update_that_is_shared_out_covers_a_rank_s_own_experts(text: str, own: float) -> None:
    """The elements over which Adam's calls go: 1 / dp of the others, and all of lone experts."""
    rank = rank_for("moe", f"{text},zero=1", pricer=Updated)
    program = RankProgram(rank)
    program.update("adamw")
    sizes = sizes_of(rank)
    wanted = sizes.dense.nbytes / 4 / rank.plan.dp + own * BLOCKS * EXPERTS / 4 / 4
    updates = {op.duration_us for op in program.run().updates}
    assert max(updates) == pytest.approx(wanted, rel=1e-3)


class Lone(nn.Module):
    """Four experts of 64 x 4 and 4 x 64, for 16 tokens each."""

    def __init__(self) -> None:
        super().__init__()
        stacks = {"up": torch.zeros(4, 64, 4), "down": torch.zeros(4, 4, 64)}
        self.blocks = nn.ModuleList([nn.ParameterDict(stacks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[0]
        return torch.bmm(torch.bmm(x, block["up"]), block["down"]).sum()


@pytest.mark.parametrize(
    ("text", "temporary"), [("", 1024 + 16384), ("ep=2", 32768), ("ep=2:2", 49152)]
)
def test_what_experts_send_is_there_until_it_arrived(text: str, temporary: int) -> None:
    """Results of 64 tokens are 16,384 bytes, those between products 1,024.

    They are most when the results go back: as sent and as arrived. A rank with twice the tokens
    sends 32,768 bytes and receives 16,384, of its own tokens.
    """
    found = capture(Lone(), torch.zeros(4, 16, 64), mode="infer")
    held = memory(rank_for(found, f"dp=2,{text}".strip(",")), "none")
    assert held["activations"] + held["temporary"] == 4 * 16 * 64 * 4 + temporary  # the input


def test_the_busiest_rank_saves_all_that_it_receives() -> None:
    """Of 256 tokens more in a block: 96 numbers as arrived, 384 between products, twice."""
    blocks = [
        rank_for("moe", text).model.layers[1].layer for text in ("", "dp=4,ep=4", "dp=4,ep=4:2")
    ]
    alone, even, busiest = (x.saved_bytes for x in blocks)
    assert even == alone
    assert busiest - even == 256 * (96 + 384 + 384) * 4
