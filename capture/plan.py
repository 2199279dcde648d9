"""Parallel plans: how a training step is split over ranks, read from text such as ``dp=8,zero=3``.

Each key is a field of ``ParallelPlan`` that says how its text is read and what it changes. Rules
that need no model are checked here, others (heads, layers, samples) by the rewrites they are of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

TRANSFORMS = ("split", "reorder", "fuse", "overlap")  # CoCoNeT, arXiv:2105.05720
QUANTISED, DCT = ("int8", "fp8", "int4"), "dct"  # of compress
V_SHAPED = ("zbv", "dualpipev")  # schedules
GREEDY = "greedy"  # of shard
# Keys that plans with cut may have: replicas are alike but for their part of the graph.
WITH_CUT = ("dp", "zero", "hsdp", "amp", "compress", "tables", "cached", "node", "nodes")
# Keys that plans with shard may have: they act on what is not a table, or on one rank.
WITH_SHARD = ("dp", "zero", "hsdp", "ep", "amp", "compress", "local", "tables", "node", "nodes")
DEFAULT_CHUNKS = 8  # of coconet=...,overlap
MOST = 99_999_999  # ranks or micro-batches of one kind
FLAG = "a flag has no value"  # in place of a reader
Value = TypeVar("Value")
Read = Callable[[str, str], Value]  # a value from its key and text


def _key(
    read: Read[Value] | str,
    default: Value,
    changes: str | None = None,
    *,
    short: Mapping[str, str] | None = None,
) -> Value:
    """A key of plans: how its text is read, its value where it is not given, and what it changes.

    ``changes`` names what is kept for plans that agree in it: a rank's ``ops``, their ``prices``,
    which layers a stage has (``stages``). Empty: its effect is in groups of ranks, in how replicas
    are kept equal (``itercast.compose.simulate.data_parallel.Strategy``), or in what is never kept.
    None: it changes all of it. ``short``: texts that stand for longer ones.
    """
    facts: dict[str, object] = {"read": read, "short": short or {}}
    if changes is not None:
        facts["changes"] = changes.split()
    return field(default=default, metadata=facts)


def _behind(key: str, read: Read[Value], default: Value, changes: str) -> Value:
    """A number that may follow the value of a key and a colon."""
    metadata = {"behind": key, "read": read, "changes": changes.split()}
    return field(default=default, metadata=metadata)


def _integer(low: int, high: int) -> Read[int]:
    def read(key: str, text: str) -> int:
        digits = text.isascii() and text.isdecimal() and len(text) <= len(str(high))
        if not (digits and low <= int(text) <= high):
            raise ValueError(f"{key} is an integer from {low} to {high}, got {text!r}")
        return int(text)

    return read


_degree = _integer(1, MOST)


def _number(rule: str) -> Read[float]:
    def read(key: str, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{key} is a number {rule}, got {text!r}") from None

    return read


_share = _number("above 0 and up to 1")


def _one_of(*names: str) -> Read[str]:
    def read(key: str, text: str) -> str:
        if text not in names:
            raise ValueError(f"{key} is one of {', '.join(names)}, got {text!r}")
        return text

    return read


def _text(what: str) -> Read[str]:
    def read(key: str, text: str) -> str:
        if not text:
            raise ValueError(f"{key} {what}")
        return text

    return read


def _transforms(key: str, text: str) -> str:
    """CoCoNeT's transforms, the chunks of an overlap behind a colon."""
    found: dict[str, str] = {}
    for step in text.split("+"):
        name, _, count = step.partition(":")
        if name not in TRANSFORMS or name in found or (count and name != "overlap"):
            raise ValueError(f"{key} takes split, reorder, fuse, overlap:N once each, got {step!r}")
        chunks = _integer(2, 1024)(name, count or str(DEFAULT_CHUNKS))
        found[name] = f"overlap:{chunks}" if name == "overlap" else name
    return ",".join(found.values())


def _counts(key: str, text: str) -> str:
    return "+".join(str(_degree(key, part)) for part in text.split("+"))


def _codec(key: str, text: str) -> str:
    """How messages are compressed: a share of their bytes, a dtype, or a cosine transform."""
    name, colon, share = text.partition(":")
    if name in QUANTISED and not colon:
        return text
    number = share if name == DCT and colon else text
    try:
        kept = float(number)
    except ValueError:
        known = f"a share of the bytes, {', '.join(QUANTISED)} or {DCT}:SHARE"
        raise ValueError(f"{key} is {known}, got {text!r}") from None
    if not 0 < kept <= 1:
        raise ValueError(f"{key} is above 0 and up to 1, got {number}")
    return f"{DCT}:{kept:g}" if name == DCT else "" if kept == 1 else f"{kept:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism and options of one training step; the defaults are one rank.

    ``ep`` ranks hold an expert each part, among those of dp, or of tp and dp with etp=1.
    ``coconet`` is a text such as ``split,overlap:8``.
    """

    dp: int = _key(_degree, 1, "")  # data parallel replicas
    tp: int = _key(_degree, 1, "ops prices")  # tensor parallel ranks
    pp: int = _key(_degree, 1, "stages")  # pipeline stages
    cp: int = _key(_degree, 1, "ops prices")  # context parallel ranks
    ep: int = _key(_degree, 1, "ops prices")  # expert parallel ranks
    imbalance: float = _behind("ep", _number(">= 1"), 1.0, "ops prices")  # of experts: most / mean
    etp: int = _key(_degree, 0, "")  # ranks of each expert, 1 or tp; 0: tp if ep divides dp, else 1
    ep_overlap: bool = _key(FLAG, False, "prices")  # ep's messages beside another micro-batch
    ep_once: bool = _key(FLAG, False, "ops prices")  # a token goes to each node of its experts once
    sp: bool = _key(FLAG, False, "ops prices")  # activations between tp's layers cut by tokens
    tp_overlap: bool = _key(FLAG, False, "prices")  # tp's collectives run beside their products
    amp: bool = _key(FLAG, False, "")  # autocast, weights in fp32
    zero: int = _key(_integer(0, 3), 0, "")  # ZeRO stage
    hsdp: int = _key(_degree, 0, "")  # ranks among which ZeRO shards; 0: all replicas
    micro: int = _key(_degree, 0, "")  # micro-batches per replica and step; 0: as many as stages
    first: int = _key(_degree, 0, "stages")  # equal layers on the first stage; 0: as on others
    last: int = _key(_degree, 0, "stages")
    layers: str = _key(_counts, "", "stages")  # of each stage, such as 8+10+6
    schedule: str = _key(
        _one_of("1f1b", "gpipe", "interleaved", "zb", *V_SHAPED),
        "1f1b",
        "",
        short={name: f"{name}:2" for name in ("interleaved", *V_SHAPED)},
    )
    virtual: int = _behind("schedule", _integer(2, 1000), 1, "stages")  # interleaved, per rank
    accumulate: int = _key(_degree, 1, "")  # micro-batches without a pipeline
    cdp: int = _key(_integer(1, 2), 0, "")  # version of cyclic data parallelism
    recompute: str = _key(_one_of("full", "selective", "ops", "budget"), "", "prices")
    recomputed: float = _behind("recompute", _share, 1.0, "prices")  # of layers; budget: of bytes
    offload: str = _key(_one_of("optimizer", "activations"), "", "")
    compress: str = _key(_codec, "", "")  # of gradients
    compress_tp: str = _key(_codec, "", "ops prices")  # of activations between tp ranks
    compress_pp: str = _key(_codec, "", "")  # between stages
    compress_ep: str = _key(_codec, "", "ops prices")  # of tokens between experts
    gossip: str = _key(_one_of("ring", "exp2"), "", "")  # averages in place of all_reduce
    sends: float = _behind("gossip", _share, 1.0, "")  # probability that a parameter is sent
    local: int = _key(_degree, 0, "")  # steps between averages of parameters; 0: no local SGD
    outer: bool = _key(FLAG, False, "")  # DiLoCo's optimizer of these averages
    coconet: str = _key(_transforms, "", "prices")
    shard: str = _key(_text(f"is {GREEDY} or a JSON file of a sharding"), "", "")
    shard_group: int = _behind("shard", _integer(2, MOST), 0, "")  # ranks that share tables; 0: all
    cut: float = _key(_share, 0.0, "ops prices")  # edges of a graph that join vertices of two ranks
    halo: float = _behind("cut", _number("above 0"), 0.0, "ops prices")  # received over own
    tables: str = _key(_one_of("uvm", "ssd"), "", "")  # where embedding tables lie; "": in HBM
    cached: float = _behind("tables", _share, 0.0, "")  # of their rows in HBM, the hottest
    node: str = _key(_text("needs a name or a YAML file"), "", "")
    nodes: int = _key(_degree, 0, "")  # 0: as many as the ranks need

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
    def table_ranks(self) -> int:
        """Ranks over which embedding tables are spread; other such groups have copies."""
        return self.shard_group or self.dp

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
        """Names of the fields that have another value than by default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def parts(self, changed: str) -> tuple[object, ...]:
        """The values of all fields that change ``changed``: ops, prices or stages."""
        every = [changed]
        names = [f.name for f in fields(self) if changed in f.metadata.get("changes", every)]
        return tuple(getattr(self, name) for name in names)

    @classmethod
    def parse(cls, text: str) -> ParallelPlan:
        """Reads a plan such as ``dp=8,zero=3``; ValueError names the wrong part and the rule."""
        values: dict[str, Any] = {}
        joined = re.sub(rf",\s*(?=(?:{'|'.join(TRANSFORMS)})\b)", "+", text)  # to coconet=...
        for part in filter(None, (p.strip() for p in joined.split(","))):
            key, given, value = (s.strip() for s in part.partition("="))
            try:
                if key in values:
                    raise ValueError(f"{key} is given twice")
                values |= _read(key, value, flag=not given)
            except ValueError as exc:
                raise ValueError(f"plan {text!r}: {exc}") from None
        return cls(**values)

    def __str__(self) -> str:
        """The text that ``parse`` reads: dp, and each option that is not the default."""
        stated, parts = self.stated, [f"dp={self.dp}"]
        for name in stated:
            if name != "dp" and name in _KEYS:
                value, number = getattr(self, name), _NUMBERS.get(name, "")
                behind = f":{getattr(self, number):g}" if number in stated else ""
                parts.append(name if value is True else f"{name}={value}{behind}")
        return ",".join(parts)


_FIELDS = {f.name: f.metadata for f in fields(ParallelPlan)}
_NUMBERS = {facts["behind"]: name for name, facts in _FIELDS.items() if "behind" in facts}
_KEYS = [name for name in _FIELDS if name not in _NUMBERS.values()]


def _read(key: str, text: str, *, flag: bool) -> dict[str, Any]:
    """The values of a key's text: its own, and that of a number behind it."""
    if key not in _KEYS:
        raise ValueError(f"unknown key {key!r}; known: {_KEYS}")
    facts, number = _FIELDS[key], _NUMBERS.get(key)
    if facts["read"] == FLAG:
        if not flag:
            raise ValueError(f"{key} takes no value, got {text!r}")
        return {key: True}
    text = facts["short"].get(text, text)
    if number is None:
        return {key: facts["read"](key, text)}
    value, colon, count = text.partition(":")
    found = {key: facts["read"](key, value)}
    return found | ({number: _FIELDS[number]["read"](f"{key}:N", count)} if colon else {})


def _rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Yields (whether the plan breaks the rule, the rule); later rules rely on earlier ones."""
    yield from _degree_rules(p)
    yield from _schedule_rules(p)
    yield from _gradient_rules(p)
    yield p.nodes > 0 and not p.node, "nodes needs node=NAME"


def _degree_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
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


def _gradient_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
    """Rules of what replicas do with parameters and gradients."""
    yield p.zero > 0 and p.dp * p.cp == 1, f"zero={p.zero} needs dp > 1 or cp > 1"
    yield p.hsdp > 0 and p.zero == 0, f"hsdp={p.hsdp} needs zero"
    groups = p.hsdp == 1 or p.dp * p.cp % max(1, p.hsdp) != 0
    yield groups, f"hsdp is from 2 and divides dp * cp, got {p.hsdp}"
    yield p.compress != "" and p.dp == 1, "compress needs dp > 1"
    yield p.compress != "" and p.zero > 0, "compress acts on all_reduce: zero=0"
    for axis, codec in (("tp", p.compress_tp), ("pp", p.compress_pp), ("ep", p.compress_ep)):
        yield codec != "" and getattr(p, axis) == 1, f"compress_{axis} needs {axis} > 1"
    others = p.gossip or p.coconet or p.cdp or p.local
    coded = bool(others) and p.compress.startswith((*QUANTISED, DCT))
    rule = "compress by a dtype or dct acts on DDP's buckets: no gossip, local, coconet or cdp"
    yield coded, rule
    yield p.gossip != "" and p.dp == 1, f"gossip={p.gossip} needs dp > 1"
    yield not 0 < p.sends <= 1, f"gossip's probability is above 0 and up to 1, got {p.sends}"
    yield p.gossip != "" and p.zero > 0, f"gossip={p.gossip} keeps whole replicas: zero=0"
    yield p.cdp > 0 and p.dp == 1, f"cdp={p.cdp} needs dp > 1"
    alone = p.pp == 1 and p.microbatches == 1 and not p.gossip and p.zero == 0 and p.ep == 1
    yield p.cdp > 0 and not alone, "cdp staggers whole replicas: no pp, micro, gossip, zero or ep"
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
    yield p.cut > 0 and p.dp == 1, "cut is of a graph among dp ranks: dp > 1"
    alone = {"cut", "halo", *WITH_CUT}.issuperset(p.stated)
    yield p.cut > 0 and not alone, f"cut goes with {', '.join(WITH_CUT)} alone"
    yield (
        not (0 <= p.cut <= 1 and p.halo >= 0),
        f"cut is up to 1, a halo above 0: {p.cut}, {p.halo}",
    )
    yield from _local_rules(p)


def _local_rules(p: ParallelPlan) -> Iterator[tuple[bool, str]]:
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
