"""Plans drawn by a seed from all keys, of which the legal ones are kept: what laws are held to."""

import random
from collections.abc import Iterator, Sequence
from functools import cache

from law_case import rank_for

from itercast.capture.plan import ParallelPlan
from itercast.compose.simulate.stages import stages_of

MODELS = ("gpt", "moe", "frozen", "images")
BUDGET = "recompute=budget:0.5"
SCHEDULES = [f"pp=2,micro=4,schedule={name}" for name in ("interleaved", "zb", "zbv", "dualpipev")]
VALUES: dict[str, Sequence[str]] = {
    "dp": ("", "dp=2", "dp=4", "dp=8", "dp=16"),
    "tp": ("", "", "tp=2", "tp=2,sp", "tp=4,sp"),
    "pp": ("", "", "", "pp=2", "pp=2,micro=4", "pp=4,micro=8", *SCHEDULES),
    "cp": ("", "", "", "cp=2"),
    "ep": ("", "ep=2", "ep=4", "ep=4,etp=1", "ep=2:1.5"),
    "zero": ("", "zero=1", "zero=2", "zero=3"),
    "hsdp": ("", "", "hsdp=2", "hsdp=4"),
    "accumulate": ("", "", "accumulate=2", "accumulate=2,no_sync"),
    "recompute": ("", "", "recompute=full", "recompute=selective", "recompute=ops", BUDGET),
    "offload": ("", "", "", *(f"offload={x}" for x in ("activations", "optimizer", "parameters"))),
    "exchange": ("", "", "", "", "cdp=2", "gossip=ring", "local=4", "local=4:0.5", "compress=0.5"),
    "coconet": ("", "", "", "", "coconet=split,reorder"),
}


def drawn(count: int, seed: int, *, least: str = "", never: str = "") -> Iterator[tuple[str, str]]:
    """So many legal pairs of model and plan; each plan has key ``least`` and not key ``never``."""
    draw, seen = random.Random(seed), set[tuple[str, str]]()
    while len(seen) < count:
        name = draw.choice(MODELS if least != "ep" else ("moe",))
        keys = {
            key: draw.choice([v for v in texts if v]) if key == least else draw.choice(texts)
            for key, texts in VALUES.items()
            if key != never
        }
        text = ",".join(filter(None, keys.values()))
        if (name, text) not in seen and is_legal(name, text):
            seen.add((name, text))
            yield name, text


@cache
def is_legal(name: str, text: str) -> bool:
    """Whether a model can run under a plan: rules of plans, and those of the rewrites."""
    try:
        ParallelPlan.parse(text)
        stages_of(rank_for(name, text))
    except ValueError:
        return False
    return True
