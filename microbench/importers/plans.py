"""Published parallel plans in our grammar: dp, tp, pp, cp, ep, vp (interleaving), micro, zero."""

from __future__ import annotations

import re
from collections.abc import Mapping

from microbench.importers.base import whole


def plan_of(given: Mapping[str, str]) -> tuple[str, int]:
    """The plan and its dp, from a table's columns; ValueError where they do not fit together.

    dp is what is left of the GPUs. ``micro`` is the micro-batches per replica and step, left out
    where it is 1 without pipeline.
    """
    degrees = {axis: _degree(axis, given.get(axis, "")) for axis in ("tp", "pp", "cp", "ep", "vp")}
    gpus = whole(given.get("n_gpus"))
    if not gpus:
        raise ValueError("number of GPUs is not stated")
    dp, rest = divmod(gpus, degrees["tp"] * degrees["pp"] * degrees["cp"])
    stated = re.fullmatch(r"DDP (\d{1,6})", given.get("parallel_plan", ""))
    if rest or not dp or (stated and int(stated[1]) != dp):
        raise ValueError("degrees of the plan do not fit the number of GPUs")
    parts = {"dp": dp, **degrees, "micro": _micro(given, dp, degrees["pp"])}
    parts["zero"] = _zero(given)
    kept = {k: v for k, v in parts.items() if v > 1 or (k in ("zero", "micro") and v == 1)}
    if kept.get("micro") == 1 and degrees["pp"] == 1:
        del kept["micro"]
    if dp == 1:
        kept.pop("zero", None)
    return ",".join(f"{k}={v}" for k, v in kept.items()), dp


def _degree(axis: str, text: str) -> int:
    if text in ("", "n/a"):
        return 1
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ValueError(f"plan is ambiguous: {axis} {text[:20]!r}")
    return int(text)


def _micro(given: Mapping[str, str], dp: int, pp: int) -> int:
    """Micro-batches as stated, else global batch over dp and micro-batch; 0 where unknown."""
    if stated := given.get("grad_accum_steps", ""):
        return _degree("grad_accum_steps", stated)
    each = whole(given.get("micro_batch_per_gpu")) * dp
    batch = whole(given.get("global_batch"))
    return batch // each if each and batch % each == 0 else 0


def _zero(given: Mapping[str, str]) -> int:
    """Stage of sharding: 3 for FSDP, 1 for a distributed optimizer, 0 where none is stated."""
    sharding = given.get("sharding", "")
    if sharding in ("FULL_SHARD", "FSDP2"):
        return 3
    if sharding == "SHARD_GRAD_OP":
        return 2
    if found := re.match(r"Megatron-FSDP=(\d{1,6})(.*)", sharding):
        if found[2].strip():
            raise ValueError("plan is ambiguous: sharding")
        return 3 if int(found[1]) > 1 else 0
    return 1 if "distributed optimizer" in sharding else 0
