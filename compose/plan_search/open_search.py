"""Opens a plan search from the names of a model, a GPU and a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from itercast.capture.cases.registry import case
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import SizedModel, capture, model_name, optimizer_of
from itercast.compose.graph.launch_modes import engine_on, with_engine
from itercast.compose.machines.file import KnownMachine
from itercast.compose.plan_search.candidates import LARGEST_MICRO_BATCH, Search
from itercast.compose.target import Target, find_target, step_dtype
from itercast.microbench.store import Row


def open_search(
    model: str | Path | SizedModel,
    gpu: str,
    gpus: int,
    *,
    node: str = "",
    global_batch: int | None = None,
    seq: int | None = None,
    bundle: Path | None = None,
    host: str = "",
    stack: str = "",
    optimizer: str = "",
    local: int = 0,
    machine: KnownMachine | None = None,
    **options: Any,
) -> tuple[Search, Target]:
    """Returns a search over plans of a model, and their target, whose plan is still open.

    ``model`` is the name of a case, the path of a Hugging Face configuration or what a script
    trains. ``global_batch``: samples of a step over all GPUs; without it and ``seq`` a case or a
    script has its own batch on each GPU.
    ``local``: steps between averages of plans with local SGD; 0: none are tried. ``machine``: what
    measured steps told of the machine.
    ``options`` are others of ``capture``: dtype, amp, channels_last, lora.
    """
    samples, seq = size_of(model, gpus, global_batch, seq)
    options["optimizer"] = optimizer or optimizer_of(model)
    plan = ParallelPlan(dp=gpus, node=node)
    target = find_target(gpu, plan, bundle, host, stack, machine, model_name(model))
    script = model if isinstance(model, SizedModel) else None
    options |= script.settings(options) if script else {}
    amp = options.pop("amp", False)
    options["dtype"] = step_dtype(options.get("dtype"), amp, [target.gpu])

    def capture_at(samples: int, length: int, autocast: bool) -> StepCapture:
        size: Row = {"batch": samples, "seq": length or None, "amp": autocast}
        step = capture(model, **size, **options)
        return with_engine(step, engine_on(target.stack, step.engine))

    search = Search(
        capture_at=capture_at,
        book=target.book,
        node=target.node,
        batch=samples,
        seq=seq,
        optimizer=options["optimizer"],
        dtype=options["dtype"] or "fp32",
        amp=amp,
        largest=max(LARGEST_MICRO_BATCH, script.facts.batch if script else 0),
        local=local,
    )
    return search, target


def size_of(model: Any, gpus: int, global_batch: int | None, seq: int | None) -> tuple[int, int]:
    """Returns samples per step over all GPUs, and tokens per sample (0: the model has no text).

    A model's own where none are stated.
    """
    if isinstance(model, str):
        named = case(model)
        global_batch, seq = global_batch or named.batch * gpus, seq or named.seq
    if isinstance(model, SizedModel):
        global_batch, seq = global_batch or model.replica_batch * gpus, seq or model.facts.seq
    if not global_batch:
        raise ValueError("--hf-config and --model need --batch, of a GPU, and --seq for text")
    return global_batch, seq or 0
