"""Compare some 300 forecasts with those recorded: `python tests/endurance/forecasts.py [--record]`.

Code that is moved or rewritten must forecast what it did: cases, GPUs and plans of every kind, with
the bundles that ship. Prints what differs by more than ``TOLERANCE``; exit code 1 where anything
does. ``--record`` writes the file anew.
"""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.progress import track

from itercast.capture.cases.registry import case
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture, micro_size
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.target import find_target, forecast_step
from itercast.learners.bundle import SHIPPED, SHIPPED_CPU

RECORDED = Path(__file__).with_name("forecasts.json")
TOLERANCE = 1e-4  # relative; processors round forecasts of trees apart, by up to 2e-5
NUMBERS = ("iteration_us", "iteration_us_p10", "iteration_us_p90", "host_us", "memory_bytes")
CPU = "intel-xeon-2.50ghz-2c"  # the machine of the CPU bundle
TRANSFORMER_PLANS = (
    "",
    "dp=8",
    "dp=16,amp",
    "dp=8,zero=3,amp",
    "tp=4,sp",
    "dp=2,tp=2,pp=2,micro=8",
    "pp=4,micro=8,schedule=interleaved:2",
    "dp=8,zero=1,recompute=full",
)
OTHER_PLANS = ("", "dp=8", "dp=4,zero=2", "dp=2,accumulate=4")
RARE_PLANS = (
    "dp=8,cdp=2",
    "dp=8,compress=0.01",
    "dp=8,gossip=ring",
    "dp=4,tp=2,coconet=split,overlap:4",
    "dp=4,offload=optimizer",
    "cp=4,dp=2",
    "pp=4,micro=8,schedule=zb",
    "pp=4,micro=8,schedule=gpipe,recompute=selective",
)
# model: (GPUs, dtypes, plans)
ON_GPUS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "gpt2-small": (
        ("v100-sxm-32gb", "a100-sxm-80gb", "h100-sxm-80gb", "l4"),
        ("bf16",),
        TRANSFORMER_PLANS,
    ),
    "gpt2-medium": (("h100-sxm-80gb", "rtx-4090"), ("fp32", "tf32"), RARE_PLANS),
    "bert-large": (("a100-sxm-40gb", "b200-sxm", "t4"), ("fp16",), TRANSFORMER_PLANS),
    "llama-7b": (("h100-pcie-80gb", "gb200"), ("bf16", "fp8"), TRANSFORMER_PLANS),
    "mixtral-8x7b": (("h100-sxm-80gb", "gb200"), ("bf16",), ("", "dp=8,ep=8", "dp=8,zero=3,ep=4")),
    "gpt3-175b": (
        ("h100-sxm-80gb",),
        ("bf16", "fp8"),
        ("tp=8,pp=8,micro=16,sp", "tp=8,pp=16,dp=2"),
    ),
    "resnet-50": (("v100-pcie-32gb", "a100-sxm-80gb", "rtx-3090"), ("fp32", "fp16"), OTHER_PLANS),
    "vit-b": (("a100-pcie-80gb", "h200-sxm-141gb", "mi210"), ("tf32",), OTHER_PLANS),
    "dlrm-criteo": (("a100-sxm-80gb", "v100-sxm-32gb"), ("fp32",), ("",)),
    "dlrm-r03": (("h100-sxm-80gb", "a100-sxm-80gb"), ("fp32",), ("", "dp=8")),
    "ssd300": (("rtx-3090", "a100-sxm-40gb"), ("fp16",), ("", "dp=8")),
    "transformer-xl-base": (("rtx-4090", "v100-sxm-16gb"), ("fp16",), ("", "dp=8")),
    "unet-small": (("h100-sxm-80gb", "a40"), ("bf16",), OTHER_PLANS),
    "switch-base": (("h100-sxm-80gb", "a100-sxm-80gb"), ("bf16",), ("", "dp=4,ep=4")),
    "efficientnet-s": (("rtx-3090", "h100-sxm-80gb"), ("fp32", "bf16"), ("",)),
    "lstm-s": (("v100-sxm-32gb", "h100-sxm-80gb"), ("fp32",), ("",)),
    "llama-300m": (("h100-nvl", "a10", "mi250"), ("bf16",), TRANSFORMER_PLANS),
    "densenet-s": (("v100-sxm-32gb", "rtx-4090"), ("fp32", "fp16"), OTHER_PLANS),
    "gat-s": (("a100-sxm-80gb",), ("fp32",), ("", "dp=8")),
    "conformer-s": (("h100-sxm-80gb", "p100-pcie-16gb"), ("fp32",), ("", "dp=8")),
}
ENGINES = ("graph", "compile")
CPU_PLANS = ("", "dp=2")
CPU_CASES = (
    *("gpt-m", "vit-m", "dlrm-m", "moe-m", "gnn-m", "resnet-s", "bert-l", "mlp-s", "gru-s"),
    *("llama-m", "gpt-l", "dlrm-l", "moe-s", "swin-s", "lstm-s", "convnext-s", "mixer-s"),
)
CPU_RARE = (
    "dp=2,zero=3",
    "tp=2",
    "pp=2,micro=4",
    "micro=4,recompute=full",
    "dp=2,zero=1",
    "dp=2,cdp=2",
)


def wanted() -> Iterator[dict[str, str]]:
    """What is forecast: model, gpu, dtype, plan, engine, mode."""
    for model, (gpus, dtypes, plans) in ON_GPUS.items():
        for gpu in gpus:
            for dtype in dtypes:
                for plan in plans:
                    yield _one(model, gpu, dtype, plan)
    for model in ("gpt2-small", "resnet-50", "llama-300m"):
        for engine in ENGINES:
            for gpu in ("a100-sxm-80gb", "h100-sxm-80gb"):
                yield _one(model, gpu, "bf16", "", engine=engine)
        yield _one(model, "h100-sxm-80gb", "bf16", "", mode="infer")
    for model in CPU_CASES:
        for plan in CPU_PLANS:
            yield _one(model, CPU, "fp32", plan)
    for plan in CPU_RARE:
        yield _one("gpt-m", CPU, "fp32", plan)


def _one(model: str, gpu: str, dtype: str, plan: str, **options: str) -> dict[str, str]:
    return {"model": model, "gpu": gpu, "dtype": dtype, "plan": plan, **options}


def forecast_of(asked: dict[str, str]) -> dict[str, Any]:
    """The forecast's numbers, or what it was refused with."""
    options = dict(asked)
    model, gpu, plan = (options.pop(name) for name in ("model", "gpu", "plan"))
    engine = options.pop("engine", "eager")
    try:
        target = find_target(gpu, plan, SHIPPED_CPU if gpu == CPU else SHIPPED)
        parsed = ParallelPlan.parse(plan)
        batch = max(case(model).batch, parsed.microbatches)
        size = micro_size(model, parsed, batch, None)
        optimizer = "sgd" if model.startswith("dlrm") else "adamw"
        step = capture(model, **size, amp=parsed.autocast, optimizer=optimizer, **options)
        found = forecast_step(with_engine(step, engine), target)
    except ValueError as exc:
        return {"refused": str(exc)}
    return {name: getattr(found, name) for name in NUMBERS} | {"by_family_us": found.by_family_us}


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Numbers that are not the same."""
    names = {*_flat(before), *_flat(now)}
    old, new = _flat(before), _flat(now)
    for name in sorted(names):
        a, b = old.get(name), new.get(name)
        if isinstance(a, float) and isinstance(b, float):
            if abs(a - b) > TOLERANCE * max(abs(a), abs(b)):
                yield f"{name}: {a:.6g} -> {b:.6g} ({100 * (b / a - 1) if a else 0:+.2f} %)"
        elif a != b:
            yield f"{name}: {a} -> {b}"


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    families = found.get("by_family_us", {})
    plain = {k: float(v) if k != "refused" else v for k, v in found.items() if k != "by_family_us"}
    return plain | {f"by_family_us.{k}": float(v) for k, v in families.items()}


def main(record: bool = False) -> None:
    """Record, or compare and say what differs."""
    logging.disable(logging.WARNING)
    every = list(wanted())
    found = {json.dumps(asked): forecast_of(asked) for asked in track(every, "forecasts")}
    if record:
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        refused = sum("refused" in f for f in found.values())
        print(f"{len(found)} forecasts recorded, {refused} of them refusals")
        return
    before = json.loads(RECORDED.read_text())
    changed = 0
    for key in {**before, **found}:
        said = list(differences(before.get(key, {}), found.get(key, {})))
        if said:
            changed += 1
            print(key, *said, sep="\n  ")
    print(f"{len(found)} forecasts, {changed} differ from those recorded")
    sys.exit(bool(changed))


if __name__ == "__main__":
    typer.run(main)
