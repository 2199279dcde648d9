"""Parallel plans: how a training step is split over ranks, read from text such as ``dp=8,zero=3``.

Each key is a field, which says how its text is read and what it changes. Which keys go together is
said by rules that need no model; rules about the model (heads, layers, samples) are checked by the
rewrites they are of.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from itercast.capture.base.close_names import unknown
from itercast.capture.plan_keys import (
    DCT,
    FLAG,
    GREEDY,
    MOST,
    QUANTISED,
    TRANSFORMS,
    V_SHAPED,
    added_keys,
    behind,
    codec,
    counts,
    degree,
    integer,
    key,
    named,
    number,
    one_of,
    share,
    some_of,
    transforms,
)

# Keys that plans with shard may have: they act on what is not a table, or on one rank.
WITH_SHARD = (
    *("dp", "zero", "hsdp", "ep", "amp", "compress", "local", "compress_shard", "tables"),
    *("accumulate", "recompute", "offload", "node", "nodes"),
    *("tp", "sp", "tp_overlap", "compress_tp", "cp"),
    *("pp", "micro", "first", "last", "layers", "schedule", "compress_pp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism and options of one training step; the defaults are one rank.

    ``ep`` ranks hold an expert each part, among those of dp, or of tp and dp with etp=1.
    ``coconet`` is a text such as ``split,overlap:8``. ValueError where a plan breaks a rule.
    """

    dp: int = key(degree, 1, "")  # data parallel replicas
    tp: int = key(degree, 1, "ops prices")  # tensor parallel ranks
    pp: int = key(degree, 1, "stages")  # pipeline stages
    cp: int = key(degree, 1, "ops prices")  # context parallel ranks
    ep: int = key(degree, 1, "ops prices")  # expert parallel ranks
    imbalance: float = behind("ep", number(">= 1"), 1.0, "ops prices")  # of experts: most / mean
    etp: int = key(degree, 0, "")  # ranks of each expert, 1 or tp; 0: tp if ep divides dp, else 1
    ep_overlap: bool = key(FLAG, False, "prices")  # ep's messages beside another micro-batch
    ep_once: bool = key(FLAG, False, "ops prices")  # a token goes to each node of its experts once
    sp: bool = key(FLAG, False, "ops prices")  # activations between tp's layers cut by tokens
    tp_overlap: bool = key(FLAG, False, "prices")  # tp's collectives run beside their products
    amp: bool = key(FLAG, False, "")  # mixed precision, weights in fp32
    zero: int = key(integer(0, 3), 0, "")  # ZeRO stage
    hsdp: int = key(degree, 0, "")  # ranks among which ZeRO shards; 0: all replicas
    micro: int = key(degree, 0, "")  # micro-batches per replica and step; 0: as many as stages
    first: int = key(degree, 0, "stages")  # equal layers on the first stage; 0: as on others
    last: int = key(degree, 0, "stages")
    layers: str = key(counts, "", "stages")  # of each stage, such as 8+10+6
    schedule: str = key(
        one_of("1f1b", "gpipe", "interleaved", "zb", *V_SHAPED),
        "1f1b",
        "",
        short={name: f"{name}:2" for name in ("interleaved", *V_SHAPED)},
    )
    virtual: int = behind("schedule", integer(2, 1000), 1, "stages")  # interleaved, per rank
    accumulate: int = key(degree, 1, "")  # micro-batches without a pipeline
    no_sync: bool = key(FLAG, False, "")  # gradients are scattered in the last one alone
    cdp: int = key(integer(1, 2), 0, "")  # version of cyclic data parallelism
    recompute: str = key(one_of("full", "selective", "ops", "budget"), "", "prices")
    recomputed: float = behind("recompute", share, 1.0, "prices")  # of layers; budget: of bytes
    offload: str = key(some_of("optimizer", "parameters", "activations"), "", "")
    compress: str = key(codec, "", "")  # of gradients
    compress_tp: str = key(codec, "", "ops prices")  # of activations between tp ranks
    compress_pp: str = key(codec, "", "")  # between stages
    compress_ep: str = key(codec, "", "ops prices")  # of tokens between experts
    compress_shard: str = key(codec, "", "")  # of pooled vectors between ranks that have tables
    gossip: str = key(one_of("ring", "exp2"), "", "")  # averages in place of all_reduce
    sends: float = behind("gossip", share, 1.0, "")  # probability that a parameter is sent
    local: int = key(degree, 0, "")  # steps between averages of parameters; 0: no local SGD
    sampled: float = behind("local", share, 1.0, "")  # of replicas, taking part until an average
    outer: bool = key(FLAG, False, "")  # DiLoCo's optimizer of these averages
    coconet: str = key(transforms, "", "prices")
    shard: str = key(named(f"is {GREEDY} or a JSON file of a sharding"), "", "")
    shard_group: int = behind("shard", integer(2, MOST), 0, "")  # ranks that share tables; 0: all
    tables: str = key(one_of("uvm", "ssd"), "", "")  # where embedding tables lie; "": in HBM
    cached: float = behind("tables", share, 0.0, "")  # of their rows in HBM, the hottest
    node: str = key(named("needs a name or a YAML file"), "", "")
    nodes: int = key(degree, 0, "")  # 0: as many as the ranks need
    more: tuple[tuple[str, Hashable], ...] = ()  # keys that packages add, with their values

    def __post_init__(self) -> None:
        for rule in _broken_rules(self):
            raise ValueError(f"plan {str(self)!r}: {rule}")

    @property
    def autocast(self) -> bool:
        """Whether mixed precision is autocast's; with ``zero`` FSDP casts the module's weights."""
        return self.amp and not self.zero

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.stage_ranks * self.pp

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of each expert; 1: experts are spread over tp x dp ranks."""
        return self.etp or (1 if self.dp % self.ep else self.tp)

    @property
    def expert_replicas(self) -> int:
        """Ranks of one pipeline stage that hold the same part of the same experts."""
        return self.stage_ranks // (self.expert_tp * self.ep)

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO shards parameters, gradients and optimizer states."""
        return self.hsdp or self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which ZeRO shards an expert's weights.

        The tp * ``shards`` ranks of a ZeRO group hold expert_tp * ep different parts of experts;
        ranks with the same part share it. 1 where there are more parts than ranks.
        """
        group_ranks, different_parts = self.tp * self.shards, self.expert_tp * self.ep
        return 1 if group_ranks % different_parts else group_ranks // different_parts

    def shards_of(self, *, spread: bool) -> int:
        """Ranks among which ZeRO shards a parameter; ``spread``: one that ep divides over ranks."""
        return self.expert_shards if spread else self.shards

    @property
    def table_ranks(self) -> int:
        """Ranks over which embedding tables are spread; other such groups have copies."""
        return self.shard_group or self.stage_ranks

    @property
    def participants(self) -> int:
        """Replicas that run a step at the same time; each round draws them, the others wait."""
        return max(1, round(self.sampled * self.dp))

    @property
    def cpu_ranks(self) -> int:
        """Ranks that share a CPU: all, or those of one of the stated nodes."""
        return -(-self.world_size // max(1, self.nodes))

    @property
    def chunks(self) -> int:
        """Chunks of CoCoNeT's overlap; 1: messages and products do not overlap."""
        return int((re.findall(r"overlap:(\d+)", self.coconet) or [1])[0])

    @property
    def microbatches(self) -> int:
        """Micro-batches per step and data-parallel replica."""
        if self.pp == 1:
            return max(self.micro, self.accumulate, 1)
        return self.micro or self.pp

    @property
    def stated(self) -> list[str]:
        """Names of the keys that have another value than by default, also of added ones."""
        own = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return [*(name for name in own if name != "more"), *(name for name, _ in self.more)]

    def parts(self, changed: str) -> tuple[object, ...]:
        """A key of caches: values of the plan's keys that change "ops", "prices" or "stages".

        The whole plan, too, if a package's key does. Plans with equal parts share results.
        """
        kind: Any = type(self)
        own = tuple(getattr(self, name) for name in _changing(kind, changed))
        by_package = any(changed in added_keys()[name].changes for name, _ in self.more)
        return (*own, self) if by_package else own

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """Reads a plan such as ``dp=8,zero=3``; ValueError names the wrong part and the rule."""
        values, added = dict[str, Any](), dict[str, Hashable]()
        joined = re.sub(rf",\s*(?=(?:{'|'.join(TRANSFORMS)})\b)", "+", text)  # to coconet=...
        parts = [p.strip() for p in joined.split(",")]
        if text.strip() and not all(parts):
            raise ValueError(f"plan {text!r}: an empty key; a plan is like dp=8,zero=3")
        for part in filter(None, parts):
            name, given, value = (s.strip() for s in part.partition("="))
            try:
                if name in values or name in added:
                    raise ValueError(f"{name} is given twice")
                if name not in KEYS and name in added_keys():
                    added[name] = added_keys()[name].read(name, value)
                else:
                    values |= _read(name, value, flag=not given)
            except ValueError as exc:
                raise ValueError(f"plan {text!r}: {exc}") from None
        return cls(**values, more=tuple(sorted(added.items())))

    def __str__(self) -> str:
        """The text that ``parse`` reads: dp, and each option that is not the default."""
        stated, parts = self.stated, [f"dp={self.dp}"]
        for name in stated:
            if name != "dp" and name in KEYS:
                value, second = getattr(self, name), _NUMBERS.get(name, "")
                behind_colon = f":{getattr(self, second):g}" if second in stated else ""
                parts.append(name if value is True else f"{name}={value}{behind_colon}")
        return ",".join([*parts, *(f"{name}={value}" for name, value in self.more)])


@cache
def _changing(plan: Any, changed: str) -> tuple[str, ...]:
    """The fields that change "ops", "prices" or "stages": those that say so, or say nothing."""
    own = (f for f in fields(plan) if f.name != "more")
    return tuple(f.name for f in own if changed in f.metadata.get("changes", [changed]))


_FIELDS = {f.name: f.metadata for f in fields(ParallelPlan) if f.name != "more"}
# Fields of numbers behind a colon, by the key that they follow: "ep": "imbalance" of ep=8:1.2.
_NUMBERS = {facts["behind"]: name for name, facts in _FIELDS.items() if "behind" in facts}
KEYS = [name for name in _FIELDS if name not in _NUMBERS.values()]


def _read(name: str, text: str, *, flag: bool) -> dict[str, Any]:
    """Parse ``name=text``, or a ``name`` alone (``flag``); text may be ``VALUE:NUMBER``."""
    if name not in KEYS:
        raise unknown("key", name, [*KEYS, *added_keys()])
    facts, second = _FIELDS[name], _NUMBERS.get(name)
    if facts["read"] == FLAG:
        if not flag:
            raise ValueError(f"{name} takes no value, got {text!r}")
        return {name: True}
    text = facts["short"].get(text, text)
    if second is None:
        return {name: facts["read"](name, text)}
    value, colon, count = text.partition(":")
    number = {second: _FIELDS[second]["read"](f"{name}:N", count)} if colon else {}
    return {name: facts["read"](name, value), **number}


def micro_batch(plan: ParallelPlan, batch: int, seq: int) -> tuple[int, int]:
    """Returns (samples, tokens of each on one rank) of a micro-batch, from a replica's batch."""
    micro = plan.microbatches
    if batch % micro:
        raise ValueError(
            f"plan {str(plan)!r}: {batch} samples do not divide by {micro} micro-batches"
        )
    if plan.cp > 1 and (seq == 0 or seq % (2 * plan.cp)):
        raise ValueError(f"plan {str(plan)!r}: a length of {seq} does not divide by 2 * cp")
    return batch // micro, seq // plan.cp


def _broken_rules(p: ParallelPlan) -> Iterator[str]:
    """Yields the rules that a plan breaks, of pairs (broken, rule); later ones rely on earlier."""
    for rules in (_degree_rules, _schedule_rules, _gradient_rules, _local_rules, _place_rules):
        yield from (rule for broken, rule in rules(p) if broken)


def _place_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of nodes, and of keys that packages add."""
    yield p.nodes > 0 and not p.node, "nodes needs node=NAME"
    for name, value in p.more:
        yield from added_keys()[name].rules(p, value)


def _degree_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of degrees of parallelism, of experts and of sequence parallelism."""
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


def _schedule_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of micro-batches and of pipelines: their stages and schedules."""
    yield p.pp > 1 and p.accumulate > 1, "with pp > 1 give micro instead of accumulate"
    both = p.micro > 1 and p.accumulate > 1
    yield both, "micro and accumulate both count micro-batches: give one"
    uneven = p.first + p.last > 0
    yield uneven and p.pp == 1, "first and last need pp > 1"
    chunks = p.pp * p.virtual
    miscounted = p.layers != "" and (uneven or p.layers.count("+") + 1 != chunks)
    yield miscounted, f"layers has a number for each of {chunks} stages, without first, last"
    yield uneven and p.virtual > 1, "first and last are of stages of one piece: not interleaved"
    yield not 0 < p.recomputed <= 1, f"recompute's share is above 0 and up to 1: {p.recomputed}"
    yield p.pp == 1 and p.schedule != "1f1b", f"schedule={p.schedule} needs pp > 1"
    interleaved, v_shaped = p.schedule == "interleaved", p.schedule in V_SHAPED
    may_be_virtual = interleaved or v_shaped
    yield p.virtual > 1 and not may_be_virtual, "only interleaved takes a number of stages per rank"
    yield v_shaped and p.virtual != 2, f"{p.schedule} has two stages per rank"
    few = p.schedule == "dualpipev" and p.microbatches < 2 * p.pp
    yield few, f"dualpipev needs two micro-batches per rank or more: micro >= {2 * p.pp}"
    yield (
        interleaved and p.microbatches % p.pp != 0,
        f"interleaved needs micro divisible by pp: micro={p.microbatches}, pp={p.pp}",
    )


def _gradient_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas do with parameters and gradients."""
    yield p.zero > 0 and p.dp * p.cp == 1, f"zero={p.zero} needs dp > 1 or cp > 1"
    yield p.hsdp > 0 and p.zero == 0, f"hsdp={p.hsdp} needs zero"
    on_host = "parameters" in p.offload
    yield (
        on_host and p.zero < 2,
        "offload=parameters needs zero=3, or 2: what lies in host memory is FSDP's shards",
    )
    twice = on_host and "optimizer" in p.offload
    yield twice, "offload=parameters has the optimizer's state in host memory, too"
    beside = p.ep > 1 or p.cdp > 0 or p.local > 0 or p.shard != "" or p.tables != ""
    yield on_host and beside, "offload=parameters: no ep, cdp, local, shard or tables"
    uneven_groups = p.hsdp == 1 or p.dp * p.cp % max(1, p.hsdp) != 0
    yield uneven_groups, f"hsdp is from 2 and divides dp * cp, got {p.hsdp}"
    yield p.compress != "" and p.dp == 1, "compress needs dp > 1"
    vain = p.no_sync and (p.zero < 2 or p.accumulate == 1)
    yield vain, "no_sync needs zero=2 or 3 and accumulate: others scatter once a step as they are"
    sharded = p.compress != "" and p.zero > 0 and (p.compress, p.amp) != ("0.5", True)
    yield sharded, "compress with zero is 0.5, with amp: FSDP's reduce_dtype of 16 bits"
    yield p.compress != "" and p.cdp > 0, "compress acts on all_reduce: no cdp"
    for axis, way in (("tp", p.compress_tp), ("pp", p.compress_pp), ("ep", p.compress_ep)):
        yield way != "" and getattr(p, axis) == 1, f"compress_{axis} needs {axis} > 1"
    yield (
        p.compress_shard != "" and (p.shard == "" or p.stage_ranks == 1),
        "compress_shard needs shard",
    )
    without_buckets = bool(p.gossip or p.coconet or p.cdp or p.local)
    rule = "compress by a dtype or dct acts on DDP's buckets: no gossip, local, coconet or cdp"
    yield without_buckets and p.compress.startswith((*QUANTISED, DCT)), rule
    yield p.gossip != "" and p.dp == 1, f"gossip={p.gossip} needs dp > 1"
    yield not 0 < p.sends <= 1, f"gossip's probability is above 0 and up to 1, got {p.sends}"
    yield p.gossip != "" and p.zero > 0, f"gossip={p.gossip} keeps whole replicas: zero=0"
    yield p.cdp > 0 and p.dp * p.pp == 1, f"cdp={p.cdp} needs dp > 1 or pp > 1"
    in_turn = p.dp == 1 and p.schedule == "1f1b" and p.microbatches >= p.pp
    rule = "cdp with pp: micro-batches are the replicas: dp=1, schedule=1f1b, micro >= pp"
    yield p.cdp > 0 and p.pp > 1 and not in_turn, rule
    whole = (p.microbatches == 1 or p.pp > 1) and p.ep * p.cp == 1 and not p.gossip
    yield p.cdp > 0 and not whole, "cdp staggers whole replicas: no gossip, ep, cp; micro with pp"
    intact = p.zero in (0, 3) and p.hsdp == 0
    yield p.cdp > 0 and not intact, "cdp hands whole stages on: zero=3 without hsdp, or no zero"
    yield bool(p.coconet) and p.dp == 1, "coconet rewrites the gradient all_reduce: dp > 1"
    plain = p.zero == 0 and not p.gossip and p.cdp == 0
    yield bool(p.coconet) and not plain, "coconet rewrites DDP: no zero, gossip or cdp"
    yield bool(p.coconet) and "split" not in p.coconet, "coconet starts with split"
    yield "fuse" in p.coconet and "reorder" not in p.coconet, "coconet: fuse needs reorder"
    alone = p.stage_ranks == 1 and p.tables == ""
    yield p.shard != "" and alone, "shard spreads tables over ranks: dp > 1, or tables=uvm or ssd"
    yield not 0 <= p.cached <= 1, f"a cache holds from 0 to 1 of a table's rows, got {p.cached}"
    keys = {*WITH_SHARD, "shard", "shard_group", "imbalance", "virtual", "cached", "recomputed"}
    yield (
        p.shard != "" and not keys.issuperset(p.stated),
        f"shard goes with {', '.join(WITH_SHARD)} alone",
    )


def _local_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas average every few steps: parameters, or tables of groups."""
    uneven_groups = p.stage_ranks % p.table_ranks != 0
    yield uneven_groups, f"shard's group is from 2 and divides dp * tp * cp, got {p.shard_group}"
    yield p.local > 0 and p.dp == 1, f"local={p.local} needs dp > 1"
    yield not 0 < p.sampled <= 1, f"local's share is above 0 and up to 1, got {p.sampled}"
    in_parts = p.sampled < 1 and (p.zero > 0 or p.shard != "")
    yield in_parts, f"local={p.local}:{p.sampled:g} samples whole replicas: no zero, no shard"
    tables = p.local > 0 and p.shard != ""
    yield (
        tables and p.table_ranks == p.stage_ranks,
        "local with shard averages groups' tables: shard=...:N",
    )
    alone = p.local > 0 and not tables
    yield p.outer and not alone, "outer is an optimizer of averaged parameters: local without shard"
    split = p.cp > 1 or p.ep > 1 or p.gossip != "" or p.coconet != "" or p.cdp > 0
    yield alone and split, "local steps whole replicas: no cp, ep, gossip, coconet or cdp"
    one_group = p.zero > 0 and p.shards == p.dp
    yield alone and one_group, "local with zero averages groups that shard: hsdp below dp"
