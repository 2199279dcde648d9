"""Parallel plans: how a training step is split over ranks, read from text such as ``dp=8,zero=3``.

Rules that need no model are checked here; those that do (heads, layers, samples) are checked by the
rewrites that apply them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "recompute": ("full", "selective"),
    "offload": ("optimizer", "activations"),
    "gossip": ("ring", "exp2"),
}
DEGREES = ("dp", "tp", "pp", "cp", "etp", "micro", "accumulate", "hsdp", "first", "last", "nodes")
FLAGS = ("sp", "tp_overlap", "amp")
# What each field of a plan changes, for the keys of caches: a rank's op calls; their prices; which
# layers a stage has; how a stage runs. Nothing: its effect is in groups of ranks, in derived
# properties, or in what is never kept. A field that is not listed changes all of it.
CHANGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("tp", "sp", "cp", "imbalance"), ("ops", "prices")),
    "ep": ("ops", "prices", "runs"),
    **dict.fromkeys(("tp_overlap", "recompute", "recomputed"), ("prices",)),
    **dict.fromkeys(("coconet", "overlap"), ("prices", "runs")),
    **dict.fromkeys(("pp", "virtual", "first", "last"), ("stages",)),
    **dict.fromkeys(("zero", "hsdp", "cdp", "offload", "compress", "gossip"), ("runs",)),
    **dict.fromkeys(("dp", "etp", "amp", "micro", "accumulate", "schedule"), ()),
    **dict.fromkeys(("shard", "node", "nodes"), ()),
}
TRANSFORMS = ("split", "reorder", "fuse", "overlap")  # CoCoNeT, arXiv:2105.05720
GREEDY = "greedy"  # of shard
DEFAULT_STAGES_PER_RANK = "2"  # of schedule=interleaved
DEFAULT_CHUNKS = "8"  # of coconet=...,overlap
MOST = 99_999_999  # ranks or micro-batches of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism and options of one training step; the defaults are one rank."""

    dp: int = 1  # data parallel replicas
    tp: int = 1  # tensor parallel ranks
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallel ranks
    ep: int = 1  # expert parallel ranks, among those of dp, or of tp and dp with etp=1
    etp: int = 0  # tensor parallel ranks of each expert, 1 or tp; 0: tp if ep divides dp, else 1
    imbalance: float = 1.0  # tokens of the busiest rank of experts over the mean
    sp: bool = False  # sequence parallelism: activations between tp's layers are cut by tokens
    tp_overlap: bool = False  # tp's collectives run beside the products they belong to
    amp: bool = False  # autocast, weights in fp32
    zero: int = 0  # ZeRO stage
    hsdp: int = 0  # ranks among which ZeRO shards; 0: all replicas
    micro: int = 0  # micro-batches per replica and step; 0: as many as stages
    first: int = 0  # equal layers on the first stage; 0: as many as on others
    last: int = 0
    schedule: str = "1f1b"
    virtual: int = 1  # stages per rank of the interleaved schedule
    accumulate: int = 1  # the same without a pipeline
    cdp: int = 0  # version 1 or 2 of cyclic data parallelism
    recompute: str = ""
    recomputed: float = 1.0  # share of layers that recompute
    offload: str = ""
    compress: float = 1.0  # bytes of gradients sent over bytes of gradients
    gossip: str = ""  # replicas average with neighbours instead of all_reduce
    coconet: tuple[str, ...] = ()
    overlap: int = 1  # chunks of CoCoNeT's overlap
    shard: str = ""  # greedy, or a file that says how embedding tables are spread over dp ranks
    node: str = ""  # name or file of a node
    nodes: int = 0  # 0: as many as the ranks need

    def __post_init__(self) -> None:
        for broken, rule in _rules(self):
            if broken:
                raise ValueError(f"plan {str(self)!r}: {rule}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of each expert; 1: experts are spread over tp x dp ranks."""
        return self.etp or (1 if self.dp % self.ep else self.tp)

    @property
    def expert_replicas(self) -> int:
        """Ranks of one pipeline stage that hold the same part of the same experts."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    @property
    def shards(self) -> int:
        """Ranks among which parameters, gradients and states are shared out."""
        return self.hsdp or self.dp * self.cp

    @property
    def plain(self) -> bool:
        """Whether the plan is one process, or DDP without any option."""
        return replace(self, micro=0, amp=False) == ParallelPlan(dp=self.dp) and (
            self.microbatches == 1
        )

    @property
    def microbatches(self) -> int:
        """Micro-batches per step and data-parallel replica."""
        if self.pp == 1:
            return max(self.micro, self.accumulate, 1)
        return self.micro or self.pp

    def parts(self, changed: str) -> tuple[object, ...]:
        """The values of all fields that change ``changed``: ops, prices, stages or runs."""
        names = [f.name for f in fields(self) if changed in CHANGES.get(f.name, (changed,))]
        return tuple(getattr(self, name) for name in names)

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """Reads a plan such as ``dp=8,zero=3``; ValueError names the wrong part and the rule."""
        values: dict[str, Any] = {}
        for part in _parts(text):
            key, _, value = (s.strip() for s in part.partition("="))
            if key not in _READERS:
                raise ValueError(f"plan {text!r}: unknown key {key!r}; known: {list(_READERS)}")
            if key in values:
                raise ValueError(f"plan {text!r}: {key} is given twice")
            try:
                values |= _READERS[key](key, value)
            except ValueError as exc:
                raise ValueError(f"plan {text!r}: {exc}") from None
        return cls(**values)

    def __str__(self) -> str:
        """The text that ``parse`` reads: dp, and each option that is not the default."""
        parts = [f"dp={self.dp}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("dp", "virtual", "overlap", "imbalance", "recomputed") or (
                value == f.default
            ):
                continue
            if f.name == "ep" and self.imbalance != 1:
                parts.append(f"ep={self.ep}:{self.imbalance:g}")
            elif f.name in FLAGS:
                parts.append(f.name)
            elif f.name == "schedule" and value == "interleaved":
                parts.append(f"schedule=interleaved:{self.virtual}")
            elif f.name == "recompute" and self.recomputed < 1:
                parts.append(f"recompute={value}:{self.recomputed:g}")
            elif f.name == "coconet":
                steps = [f"overlap:{self.overlap}" if s == "overlap" else s for s in value]
                parts.append(f"coconet={','.join(steps)}")
            else:
                parts.append(f"{f.name}={value:g}" if f.name == "compress" else f"{f.name}={value}")
        return ",".join(parts)


def _parts(text: str) -> Iterator[str]:
    """Splits at commas; transforms after ``coconet=`` stay with it, joined by "+"."""
    coconet = ""
    for part in filter(None, (p.strip() for p in text.split(","))):
        if coconet and part.split(":")[0] in TRANSFORMS:
            coconet += f"+{part}"
            continue
        if coconet:
            yield coconet
        coconet = ""
        if part.startswith("coconet"):
            coconet = part
        else:
            yield part
    if coconet:
        yield coconet


def _degree(key: str, value: str) -> dict[str, Any]:
    return {key: _integer(key, value, 1, MOST)}


def _integer(key: str, value: str, low: int, high: int) -> int:
    digits = value.isascii() and value.isdecimal() and len(value) <= len(str(high))
    if not (digits and low <= int(value) <= high):
        raise ValueError(f"{key} is an integer from {low} to {high}, got {value!r}")
    return int(value)


def _choice(key: str, value: str) -> dict[str, Any]:
    name, _, count = value.partition(":")
    if name not in CHOICES[key]:
        raise ValueError(f"{key} is one of {', '.join(CHOICES[key])}, got {value!r}")
    if name == "interleaved":
        return {
            key: name,
            "virtual": _integer(f"{key}={name}", count or DEFAULT_STAGES_PER_RANK, 2, 1000),
        }
    if key == "recompute":
        return {key: name, "recomputed": _share(f"{key}={name}:SHARE", count or "1")}
    if ":" in value:
        raise ValueError(f"only interleaved takes a number, got {key}={value!r}")
    return {key: name}


def _experts(key: str, value: str) -> dict[str, Any]:
    degree, _, imbalance = value.partition(":")
    values: dict[str, Any] = _degree(key, degree)
    try:
        return values | {"imbalance": float(imbalance or 1)}
    except ValueError:
        raise ValueError(f"{key}=N:imbalance takes a number >= 1, got {value!r}") from None


def _compress(key: str, value: str) -> dict[str, Any]:
    return {key: _share(key, value)}


def _share(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{key} is a number above 0 and up to 1, got {value!r}") from None


def _coconet(key: str, value: str) -> dict[str, Any]:
    values: dict[str, Any] = {key: ()}
    for step in value.split("+"):
        name, _, count = step.partition(":")
        if name not in TRANSFORMS or name in values[key] or (count and name != "overlap"):
            raise ValueError(f"{key} takes split, reorder, fuse, overlap:N once each, got {step!r}")
        values[key] = (*values[key], name)
        if name == "overlap":
            values["overlap"] = _integer("overlap", count or DEFAULT_CHUNKS, 2, 1024)
    return values


def _flag(key: str, value: str) -> dict[str, Any]:
    if value:
        raise ValueError(f"{key} takes no value, got {value!r}")
    return {key: True}


def _node(key: str, value: str) -> dict[str, Any]:
    if not value:
        raise ValueError("node needs a name or a YAML file")
    return {key: value}


def _shard(key: str, value: str) -> dict[str, Any]:
    if not value:
        raise ValueError(f"shard is {GREEDY} or a JSON file of a sharding")
    return {key: value}


_READERS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    **dict.fromkeys(DEGREES, _degree),
    "ep": _experts,
    **dict.fromkeys(FLAGS, _flag),
    "zero": lambda key, value: {key: _integer(key, value, 0, 3)},
    "cdp": lambda key, value: {key: _integer(key, value, 1, 2)},
    **dict.fromkeys(CHOICES, _choice),
    "compress": _compress,
    "coconet": _coconet,
    "shard": _shard,
    "node": _node,
}


def _rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Yields (whether the plan breaks the rule, the rule); later rules rely on earlier ones."""
    yield from _degree_rules(p)
    yield from _schedule_rules(p)
    yield from _gradient_rules(p)
    yield p.nodes > 0 and not p.node, "nodes needs node=NAME"


def _degree_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    for name in ("dp", "tp", "pp", "cp", "ep", "accumulate", "virtual", "overlap"):
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


def _schedule_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    yield p.pp > 1 and p.accumulate > 1, "with pp > 1 give micro instead of accumulate"
    both = p.micro > 1 and p.accumulate > 1
    yield both, "micro and accumulate both count micro-batches: give one"
    uneven = p.first + p.last > 0
    yield uneven and p.pp == 1, "first and last need pp > 1"
    yield uneven and p.virtual > 1, "first and last are of stages of one piece: not interleaved"
    yield not 0 < p.recomputed <= 1, f"recompute's share is above 0 and up to 1: {p.recomputed}"
    yield p.pp == 1 and p.schedule != "1f1b", f"schedule={p.schedule} needs pp > 1"
    interleaved = p.schedule == "interleaved"
    yield (
        interleaved and p.microbatches % p.pp != 0,
        f"interleaved needs micro divisible by pp: micro={p.microbatches}, pp={p.pp}",
    )


def _gradient_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas do with parameters and gradients."""
    yield p.zero > 0 and p.dp * p.cp == 1, f"zero={p.zero} needs dp > 1 or cp > 1"
    yield p.hsdp > 0 and p.zero == 0, f"hsdp={p.hsdp} needs zero"
    groups = p.hsdp == 1 or p.dp * p.cp % max(1, p.hsdp) != 0
    yield groups, f"hsdp is from 2 and divides dp * cp, got {p.hsdp}"
    yield not 0 < p.compress <= 1, f"compress is above 0 and up to 1, got {p.compress}"
    yield p.compress < 1 and p.dp == 1, "compress needs dp > 1"
    yield p.compress < 1 and p.zero > 0, "compress acts on all_reduce: zero=0"
    yield p.gossip != "" and p.dp == 1, f"gossip={p.gossip} needs dp > 1"
    yield p.gossip != "" and p.zero > 0, f"gossip={p.gossip} keeps whole replicas: zero=0"
    yield p.cdp > 0 and p.dp == 1, f"cdp={p.cdp} needs dp > 1"
    alone = p.pp == 1 and p.microbatches == 1 and not p.gossip and p.zero == 0 and p.ep == 1
    yield p.cdp > 0 and not alone, "cdp staggers whole replicas: no pp, micro, gossip, zero or ep"
    yield bool(p.coconet) and p.dp == 1, "coconet rewrites the gradient all_reduce: dp > 1"
    plain = p.zero == 0 and not p.gossip and p.cdp == 0
    yield bool(p.coconet) and not plain, "coconet rewrites DDP: no zero, gossip or cdp"
    yield bool(p.coconet) and "split" not in p.coconet, "coconet starts with split"
    yield "fuse" in p.coconet and "reorder" not in p.coconet, "coconet: fuse needs reorder"
    yield p.shard != "" and p.dp == 1, "shard spreads tables over dp ranks: dp > 1"
    others = (
        p.recompute,
        p.offload,
        p.gossip,
        p.zero,
        p.cdp,
        p.coconet,
        p.ep > 1,
        p.world_size > p.dp,
    )
    ddp = not any(others) and p.microbatches == 1
    yield p.shard != "" and not ddp, "shard goes with dp, amp, compress and node alone"


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


def ranks_per_node(plan: ParallelPlan, gpus_per_node: int) -> int:
    """Returns the ranks on each node; ValueError where the plan's nodes cannot hold its ranks."""
    nodes = plan.nodes or ceil(plan.world_size / gpus_per_node)
    if plan.world_size > nodes * gpus_per_node:
        place = f"{nodes} nodes of {gpus_per_node} GPUs"
        raise ValueError(f"plan {str(plan)!r}: {plan.world_size} ranks do not fit {place}")
    return ceil(plan.world_size / nodes)
