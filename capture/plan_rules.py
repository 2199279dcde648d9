"""Which keys of a plan go together: rules that need no model."""

from __future__ import annotations

from collections.abc import Iterator

from itercast.capture.plan_fields import PlanFields
from itercast.capture.plan_keys import DCT, QUANTISED, V_SHAPED, added_keys

# Keys that plans with shard may have: they act on what is not a table, or on one rank.
WITH_SHARD = (
    *("dp", "zero", "hsdp", "ep", "amp", "compress", "local", "compress_shard", "tables"),
    *("node", "nodes"),
)


def broken_rules(p: PlanFields) -> Iterator[str]:
    """Yields the rules that a plan breaks; later rules rely on earlier ones."""
    for rules in (_degree_rules, _schedule_rules, _gradient_rules, _local_rules, _place_rules):
        yield from (rule for broken, rule in rules(p) if broken)


def _place_rules(p: PlanFields) -> Iterator[tuple[bool, str]]:
    yield p.nodes > 0 and not p.node, "nodes needs node=NAME"
    for name, value in p.more:
        yield from added_keys()[name].rules(p, value)


def _degree_rules(p: PlanFields) -> Iterator[tuple[bool, str]]:
    for name in ("dp", "tp", "pp", "cp", "ep", "accumulate", "virtual"):
        yield getattr(p, name) < 1, f"{name} is a positive integer"
    yield p.etp not in (0, 1, p.tp), f"etp is 1 or tp, got {p.etp}"
    ranks = p.dp * p.tp // p.expert_tp
    yield ranks % p.ep != 0, f"ep divides dp, or tp x dp with etp=1: ep={p.ep}, dp={p.dp}"
    spread = p.expert_tp < p.tp
    yield spread and p.ep == 1, f"etp={p.etp} needs ep > 1"
    yield spread and not p.sp, "experts over tp x dp ranks need sp: each rank sends its own tokens"
    yield not 1 <= p.imbalance <= p.ep, f"imbalance is from 1 to ep, got {p.imbalance}"
    yield p.sp and p.tp == 1, "sp needs tp > 1"
    yield p.tp_overlap and not p.sp, "tp_overlap needs sp"
    yield p.ep == 1 and (p.ep_overlap or p.ep_once), "ep_overlap and ep_once need ep > 1"


def _schedule_rules(p: PlanFields) -> Iterator[tuple[bool, str]]:
    yield p.pp > 1 and p.accumulate > 1, "with pp > 1 give micro instead of accumulate"
    both = p.micro > 1 and p.accumulate > 1
    yield both, "micro and accumulate both count micro-batches: give one"
    uneven = p.first + p.last > 0
    yield uneven and p.pp == 1, "first and last need pp > 1"
    stages = p.layers.count("+") + 1
    counted = p.layers != "" and (uneven or stages != p.pp * p.virtual)
    yield counted, f"layers has a number for each of {p.pp * p.virtual} stages, without first, last"
    yield uneven and p.virtual > 1, "first and last are of stages of one piece: not interleaved"
    yield not 0 < p.recomputed <= 1, f"recompute's share is above 0 and up to 1: {p.recomputed}"
    yield p.pp == 1 and p.schedule != "1f1b", f"schedule={p.schedule} needs pp > 1"
    interleaved, v_shaped = p.schedule == "interleaved", p.schedule in V_SHAPED
    loops = p.virtual == 1 or interleaved or v_shaped
    yield not loops, "only interleaved takes a number of stages per rank"
    yield v_shaped and p.virtual != 2, f"{p.schedule} has two stages per rank"
    few = p.schedule == "dualpipev" and p.microbatches < 2 * p.pp
    yield few, f"dualpipev needs two micro-batches per rank or more: micro >= {2 * p.pp}"
    yield (
        interleaved and p.microbatches % p.pp != 0,
        f"interleaved needs micro divisible by pp: micro={p.microbatches}, pp={p.pp}",
    )


def _gradient_rules(p: PlanFields) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas do with parameters and gradients."""
    yield p.zero > 0 and p.dp * p.cp == 1, f"zero={p.zero} needs dp > 1 or cp > 1"
    yield p.hsdp > 0 and p.zero == 0, f"hsdp={p.hsdp} needs zero"
    groups = p.hsdp == 1 or p.dp * p.cp % max(1, p.hsdp) != 0
    yield groups, f"hsdp is from 2 and divides dp * cp, got {p.hsdp}"
    yield p.compress != "" and p.dp == 1, "compress needs dp > 1"
    yield p.compress != "" and p.zero > 0, "compress acts on all_reduce: zero=0"
    yield p.compress != "" and p.cdp > 0, "compress acts on all_reduce: no cdp"
    for axis, codec in (("tp", p.compress_tp), ("pp", p.compress_pp), ("ep", p.compress_ep)):
        yield codec != "" and getattr(p, axis) == 1, f"compress_{axis} needs {axis} > 1"
    yield p.compress_shard != "" and (p.shard == "" or p.dp == 1), "compress_shard needs shard"
    others = p.gossip or p.coconet or p.cdp or p.local
    coded = bool(others) and p.compress.startswith((*QUANTISED, DCT))
    rule = "compress by a dtype or dct acts on DDP's buckets: no gossip, local, coconet or cdp"
    yield coded, rule
    yield p.gossip != "" and p.dp == 1, f"gossip={p.gossip} needs dp > 1"
    yield not 0 < p.sends <= 1, f"gossip's probability is above 0 and up to 1, got {p.sends}"
    yield p.gossip != "" and p.zero > 0, f"gossip={p.gossip} keeps whole replicas: zero=0"
    yield p.cdp > 0 and p.dp == 1, f"cdp={p.cdp} needs dp > 1"
    whole = p.pp * p.microbatches * p.ep * p.cp == 1 and not p.gossip
    yield p.cdp > 0 and not whole, "cdp staggers whole replicas: no pp, micro, gossip, ep or cp"
    handed_on = p.zero in (0, 3) and p.hsdp == 0
    yield p.cdp > 0 and not handed_on, "cdp hands whole stages on: zero=3 without hsdp, or no zero"
    yield bool(p.coconet) and p.dp == 1, "coconet rewrites the gradient all_reduce: dp > 1"
    plain = p.zero == 0 and not p.gossip and p.cdp == 0
    yield bool(p.coconet) and not plain, "coconet rewrites DDP: no zero, gossip or cdp"
    yield bool(p.coconet) and "split" not in p.coconet, "coconet starts with split"
    yield "fuse" in p.coconet and "reorder" not in p.coconet, "coconet: fuse needs reorder"
    one = p.dp == 1 and p.tables == ""
    yield p.shard != "" and one, "shard spreads tables over dp ranks: dp > 1, or tables=uvm or ssd"
    yield not 0 <= p.cached <= 1, f"a cache holds from 0 to 1 of a table's rows, got {p.cached}"
    keys = {*WITH_SHARD, "shard", "shard_group", "imbalance", "micro", "cached"}
    alone = keys.issuperset(p.stated) and p.microbatches == 1
    yield p.shard != "" and not alone, f"shard goes with {', '.join(WITH_SHARD)} alone"


def _local_rules(p: PlanFields) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas average every so many steps: parameters, or tables of groups."""
    groups = p.dp % p.table_ranks != 0
    yield groups, f"shard's group is from 2 and divides dp, got {p.shard_group}"
    yield p.local > 0 and p.dp == 1, f"local={p.local} needs dp > 1"
    tables = p.local > 0 and p.shard != ""
    yield tables and p.table_ranks == p.dp, "local with shard averages groups' tables: shard=...:N"
    alone = p.local > 0 and not tables
    yield p.outer and not alone, "outer is an optimizer of averaged parameters: local without shard"
    split = p.cp > 1 or p.ep > 1 or p.gossip != "" or p.coconet != "" or p.cdp > 0
    yield alone and split, "local steps whole replicas: no cp, ep, gossip, coconet or cdp"
    one = p.zero > 0 and p.shards == p.dp
    yield alone and one, "local with zero averages groups that shard: hsdp below dp"
