"""Parses published parallel plans into plan text as in ``itercast.capture.plan``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from itercast.capture.base.assumptions import assumed
from itercast.extras.imports.base import whole
from itercast.microbench.hardware.node import node_named

RECOMPUTE = {
    "true": "full",
    "full": "full",
    "false": "",
    "none": "",
    "": "",
    "selective": "selective",
    "selective layer": "full:0.5",  # torchtitan: every second layer
    "selective op": "ops",
}
SEQUENCE_PARALLEL = assumed(__file__, "megatron_sequence_parallel")
EXPERTS_OVERLAP: Mapping[str, float] = assumed(__file__, "experts_overlap")
SENT_ONCE: tuple[str, ...] = tuple(assumed(__file__, "experts_sent_once"))
CONTAINER = re.compile(r"(\d\d\.\d\d)[\d.]* NeMo Container")
DGX = re.compile(r"DGX[ -](?:DGX )?(\w+)")
HYBRID = {"HYBRID_SHARD": 3, "_HYBRID_SHARD_ZERO2": 2}  # ZeRO stages within a node
STAGES = {**dict.fromkeys(("", "NO_SHARD", "DDP", "none"), 0), **HYBRID}
STAGES |= {"FULL_SHARD": 3, "FSDP2": 3, "SHARD_GRAD_OP": 2}


def plan_of(given: Mapping[str, str]) -> tuple[str, int]:
    """Returns the plan as text, and dp, of a row; ValueError where its columns contradict.

    dp = GPUs / (tp * pp * cp). The micro-batches of a step are ``micro`` under pipelines, else
    ``accumulate``. With Megatron-Core, tp is assumed to include sequence parallelism.
    """
    degrees = {axis: _degree(axis, given.get(axis, "")) for axis in ("tp", "pp", "cp", "ep", "vp")}
    gpus, stages, virtual = whole(given.get("n_gpus")), degrees["pp"], degrees.pop("vp")
    if not gpus:
        raise ValueError("number of GPUs is not stated")
    dp, rest = divmod(gpus, degrees["tp"] * stages * degrees["cp"])
    stated = re.fullmatch(r"DDP (\d{1,6})", given.get("parallel_plan", ""))
    if rest or not dp or dp % degrees["ep"] or (stated and int(stated[1]) != dp):
        raise ValueError("degrees of the plan do not fit the number of GPUs")
    micro = _micro(given, dp)
    if virtual > 1 and (stages == 1 or micro % stages):
        raise ValueError("plan is ambiguous: interleaved stages do not fit")
    parts: dict[str, object] = {k: v for k, v in {"dp": dp, **degrees}.items() if v > 1}
    if _overlaps_experts(given):
        parts["ep_overlap"] = ""
    if degrees["ep"] > 1 and _sends_once(given):
        parts["ep_once"] = ""
    if SEQUENCE_PARALLEL and degrees["tp"] > 1 and "Megatron" in given.get("framework", ""):
        parts["sp"] = ""
    if stages > 1 and micro:
        parts["micro"] = micro
    elif micro > 1:
        parts["accumulate"] = micro
    if virtual > 1:
        parts["schedule"] = f"interleaved:{virtual}"
    parts |= _sharding(given, dp * degrees["cp"], degrees["tp"])
    if recompute := RECOMPUTE.get(given.get("activation_recompute", ""), ""):
        parts["recompute"] = recompute
    if given.get("activation_cpu_offload", "") == "true":
        parts["offload"] = "activations"
    if gpus > 1 and (node := _node(given.get("gpu_detail", ""))):
        parts["node"] = node
    return ",".join(f"{k}={v}".rstrip("=") for k, v in parts.items()), dp


def _degree(axis: str, text: str) -> int:
    if text in ("", "n/a"):
        return 1
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ValueError(f"plan is ambiguous: {axis} {text[:20]!r}")
    return int(text)


def _micro(given: Mapping[str, str], dp: int) -> int:
    """Micro-batches as stated, else global batch / (dp * micro-batch); 0 where unknown."""
    if stated := given.get("grad_accum_steps", ""):
        return _degree("grad_accum_steps", stated)
    each = whole(given.get("micro_batch_per_gpu")) * dp
    batch = whole(given.get("global_batch"))
    return batch // each if each and batch % each == 0 else 0


def _sharding(given: Mapping[str, str], replicas: int, tp: int) -> dict[str, int]:
    """ZeRO stage; under HSDP also the ranks that shard: those of a node, where there are more."""
    zero = _zero(given)
    if replicas == 1 or not zero:
        return {}
    if given["sharding"].strip() not in HYBRID:
        return {"zero": zero}
    inner = whole(given.get("gpus_per_node")) // tp
    if not inner or replicas % min(inner, replicas):
        raise ValueError(
            "plan is ambiguous: HSDP, and the GPUs of a node are not stated or fit not"
        )
    if inner == 1:
        return {}
    return {"zero": zero, "hsdp": inner} if inner < replicas else {"zero": zero}


def _zero(given: Mapping[str, str]) -> int:
    """ZeRO stage: 3 for full sharding, 1 for a distributed optimizer, 0 where none is stated.

    Megatron Bridge's recipes have a distributed optimizer where Megatron-FSDP is off. ValueError
    for other words: FSDP alone names no stage.
    """
    sharding = given.get("sharding", "").strip()
    if sharding in STAGES:
        return STAGES[sharding]
    if found := re.fullmatch(r"Megatron-FSDP=(\d{1,6})", sharding):
        return 3 if int(found[1]) > 1 else 1
    if "distributed optimizer" in sharding and "FSDP" not in sharding:
        return 1
    raise ValueError(f"sharding is not known: {sharding[:40]!r}")


def _overlaps_experts(given: Mapping[str, str]) -> bool:
    """Whether the recipe behind a row overlaps experts' messages with another micro-batch."""
    what = f"{given.get('gpu')} {given.get('precision')} EP{given.get('ep')}"
    release = CONTAINER.match(given.get("set", ""))
    return release is not None and float(release[1]) >= EXPERTS_OVERLAP.get(what, float("inf"))


def _sends_once(given: Mapping[str, str]) -> bool:
    """Whether the recipe behind a row sends a token once to each node of its experts."""
    what = f"{given.get('model')} {given.get('gpu')} {given.get('precision')} "
    release = CONTAINER.match(given.get("set", ""))
    return release is not None and what.startswith(tuple(f"{name} " for name in SENT_ONCE))


def _node(detail: str) -> str:
    """The node that a GPU's description names; empty where it names none we know."""
    found = DGX.search(detail)
    return (node_named(f"dgx-{found[1]}") if found else None) or ""


def network_doubt(given: Mapping[str, str]) -> str:
    """Notes which network is assumed for a row that spans hosts with an unknown network."""
    gpus, each = whole(given.get("n_gpus")), whole(given.get("gpus_per_node"))
    if gpus <= (each or gpus) or _node(given.get("gpu_detail", "")):
        return ""
    return "network not known, the default of forecasts assumed"
