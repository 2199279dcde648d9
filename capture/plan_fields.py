"""The keys of parallel plans, each a field that says how its text is read and what it changes."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, fields

from itercast.capture.plan_keys import (
    FLAG,
    GREEDY,
    MOST,
    V_SHAPED,
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
    transforms,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFields:
    """Degrees of parallelism and options of one training step; the defaults are one rank.

    ``ep`` ranks hold an expert each part, among those of dp, or of tp and dp with etp=1.
    ``coconet`` is a text such as ``split,overlap:8``.
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
    amp: bool = key(FLAG, False, "")  # autocast, weights in fp32
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
    cdp: int = key(integer(1, 2), 0, "")  # version of cyclic data parallelism
    recompute: str = key(one_of("full", "selective", "ops", "budget"), "", "prices")
    recomputed: float = behind("recompute", share, 1.0, "prices")  # of layers; budget: of bytes
    offload: str = key(one_of("optimizer", "activations"), "", "")
    compress: str = key(codec, "", "")  # of gradients
    compress_tp: str = key(codec, "", "ops prices")  # of activations between tp ranks
    compress_pp: str = key(codec, "", "")  # between stages
    compress_ep: str = key(codec, "", "ops prices")  # of tokens between experts
    compress_shard: str = key(codec, "", "")  # of pooled vectors between ranks that have tables
    gossip: str = key(one_of("ring", "exp2"), "", "")  # averages in place of all_reduce
    sends: float = behind("gossip", share, 1.0, "")  # probability that a parameter is sent
    local: int = key(degree, 0, "")  # steps between averages of parameters; 0: no local SGD
    outer: bool = key(FLAG, False, "")  # DiLoCo's optimizer of these averages
    coconet: str = key(transforms, "", "prices")
    shard: str = key(named(f"is {GREEDY} or a JSON file of a sharding"), "", "")
    shard_group: int = behind("shard", integer(2, MOST), 0, "")  # ranks that share tables; 0: all
    tables: str = key(one_of("uvm", "ssd"), "", "")  # where embedding tables lie; "": in HBM
    cached: float = behind("tables", share, 0.0, "")  # of their rows in HBM, the hottest
    node: str = key(named("needs a name or a YAML file"), "", "")
    nodes: int = key(degree, 0, "")  # 0: as many as the ranks need
    more: tuple[tuple[str, Hashable], ...] = ()  # keys that packages add, with their values

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
