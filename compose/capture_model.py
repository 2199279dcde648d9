"""Captures one step of any model: a named case, a configuration file, or a module.

Captures of cases are cached on disk, under a digest of the code and the settings they depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from itercast.capture.base.cache_folder import cache_folder, digest_of_code, installed
from itercast.capture.base.extensions import function_of
from itercast.capture.cases.external.adapters import Adapters
from itercast.capture.cases.external.huggingface import hf_case
from itercast.capture.cases.registry import EvalCase, case
from itercast.capture.opcall import NARROW, StepCapture
from itercast.capture.plan import ParallelPlan, micro_batch
from itercast.capture.programs.trained.facts import Trained
from itercast.capture.step import ALLOWED, StepSettings
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.graph.layers import split_layers
from itercast.compose.graph.quantised_weights import with_quantised_weights
from itercast.compose.parallel.captured_tables import check_positions
from itercast.compose.parallel.narrow import with_narrow_products
from itercast.compose.target import Target, step_dtype
from itercast.microbench.store import Row

DTYPES = (*ALLOWED["dtype"], *NARROW)
CAPTURE = Path(__file__).parents[1] / "capture"
LIBRARIES = ("torch", "transformers", "timm")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A model that can be captured at any batch size, with facts of the step it was found in.

    ``capture_at`` takes settings, samples, tokens per sample, and whether a few layers stand for
    all. ``engine`` says how its step is launched.
    """

    name: str
    facts: Trained
    engine: str
    capture_at: Callable[[StepSettings, int, int, bool], StepCapture]

    @property
    def replica_batch(self) -> int:
        """Samples of a step of one process."""
        return self.facts.batch * self.facts.micro

    def settings(self, asked: Mapping[str, Any]) -> Row:
        """The step's precision and optimizer (amp, dtype, optimizer): as asked, else its own."""
        facts, dtype = self.facts, asked.get("dtype")
        amp = bool(asked.get("amp") or (facts.amp and not dtype))
        usual_dtype = "bf16" if amp else "fp32"
        own_dtype = facts.dtype if amp == facts.amp else usual_dtype
        optimizer = asked.get("optimizer") or facts.optimizer
        return {"amp": amp, "dtype": dtype or own_dtype, "optimizer": optimizer}


def capture_case(
    chosen: EvalCase, settings: StepSettings, batch: int | None, seq: int | None, *, shallow: bool
) -> StepCapture:
    """Capture one step of a case on fake tensors, or read it from the cache.

    ``shallow``: as for ``capture_shortened``.
    """
    from itercast.capture.recorder.cache import cached

    size = (int(batch or chosen.batch), int(seq or chosen.seq))
    if not size[0]:
        raise ValueError(f"{chosen.name}: a batch is required, and a seq for text")
    code = (digest_of_code(CAPTURE), *map(installed, LIBRARIES))
    key = repr((chosen.name, chosen.digest, *size, settings, shallow, *code))
    make = partial(_captured, chosen, settings, *size, shallow)
    return cached(hashlib.sha256(key.encode()).hexdigest()[:24], make, cache_folder("captures"))


def _settings(dtype: str, **options: Any) -> StepSettings:
    """The settings of the captured step; 8 and 4 bits are captured in bf16 and rewritten."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return StepSettings(dtype="bf16" if dtype in NARROW else dtype, **options)


def _captured(
    chosen: EvalCase, settings: StepSettings, batch: int, seq: int, shallow: bool
) -> StepCapture:
    """Capture a step of a case; see ``capture_case``, which caches it."""
    from itercast.capture.recorder.truncate import capture_shortened  # needs torch

    return capture_shortened(
        chosen.name,
        chosen.build,
        lambda: chosen.inputs(batch, seq),
        chosen.loss,
        settings,
        samples=batch,
        tokens=batch * seq,
        shallow=shallow,
    )


def capture(
    model: Any,
    inputs: Any = None,
    loss: Callable[[Any], Any] | str = "default",
    *,
    batch: int | None = None,
    seq: int | None = None,
    mode: str = "train",
    optimizer: str = "",
    dtype: str | None = None,
    attn: str = "sdpa",
    amp: bool = False,
    channels_last: bool = False,
    lora: str | int = "",
    whole: bool = False,
) -> StepCapture:
    """Capture one step of a model as op calls; nothing is run and no tensor is allocated.

    ``model`` is the name of a case, the Path of a Hugging Face configuration, what a script trains,
    a torch module, or a function that returns a module, (module, inputs) or (module, inputs, loss)
    and may take ``batch`` and ``seq``. A module or script under torch.compile is taken as launched
    by it (``engine``).

    - ``inputs``: a tensor, a tuple of positional arguments or a dict by name; a transformers model
      needs none, given ``batch`` and ``seq``.
    - ``loss``: a function of the output; "default" takes the output's ``loss``, or the output if it
      is a scalar; "none" starts backward from the output.
    - ``optimizer``: that of ``optimizer_of`` where none is named.
    - ``dtype``: None keeps the dtypes of a module and is fp32 for all other models. fp8, nvfp4 and
      mxfp4 apply to the linear layers of blocks, the rest is in bf16
      (``itercast.compose.parallel.narrow``).
    - ``amp``: weights stay in fp32, the forward pass runs under CUDA's autocast to ``dtype``.
    - ``channels_last``: the model and its images are turned to that memory format (NHWC) first.
    - ``lora``: rank of adapters on a frozen configuration's model, or what
      ``itercast.capture.cases.external.adapters`` reads.
    - ``whole``: capture all layers; else three of many equal ones of cases and configurations.
    """
    options: Row = {
        "mode": mode,
        "optimizer": optimizer or optimizer_of(model),
        "attn": attn,
        "amp": amp,
        "channels_last": channels_last,
        "loss": loss if isinstance(loss, str) else "default",
    }
    if isinstance(model, SizedModel):
        dtype = model.settings(options | {"dtype": dtype})["dtype"]
    settings = _settings(dtype or "fp32", **options)
    adapters = Adapters.parse(lora)
    if adapters and not isinstance(model, Path):
        name = model if isinstance(model, str) else type(model).__name__
        only = "adapts the model of a Hugging Face configuration only"
        raise ValueError(f"lora {lora!r} {only}, got {name}")
    if isinstance(model, SizedModel):
        size = (batch or model.facts.batch, seq or model.facts.seq)
        step = with_engine(model.capture_at(settings, *size, not whole), model.engine)
    elif isinstance(model, str | Path):
        if inputs is not None or not isinstance(loss, str):
            raise ValueError(f"{str(model)!r} brings its own inputs and loss")
        chosen = _case_of(model, settings, str(lora))
        shallow = not (whole or chosen.measured)
        step = capture_case(chosen, settings, batch, seq, shallow=shallow)
    else:
        keep_dtype = dtype is None and hasattr(model, "parameters")
        step = _capture_module(model, inputs, loss, settings, batch, seq, keep_dtype)
    check_positions(step)
    if adapters and adapters.weights:
        if dtype in NARROW:
            raise ValueError(f"lora: weights in {adapters.weights} have no products in {dtype}")
        step = with_quantised_weights(step, adapters.weights)
    return with_narrow_products(step, dtype) if dtype in NARROW else step


def _case_of(model: str | Path, settings: StepSettings, lora: str) -> EvalCase:
    """The case of a name, or of a Hugging Face configuration's file."""
    if isinstance(model, str):
        return case(model)
    return hf_case(model, lora=lora, mode=settings.mode, loss=settings.loss, attn=settings.attn)


def optimizer_of(model: Any) -> str:
    """The optimizer where none is asked for: a case's or a script's own, else adamw."""
    if isinstance(model, SizedModel):
        return model.facts.optimizer
    return case(model).optimizer if isinstance(model, str) else "adamw"


def _capture_module(
    model: Any,
    inputs: Any,
    loss: Callable[[Any], Any] | str,
    settings: StepSettings,
    batch: int | None,
    seq: int | None,
    keep_dtype: bool,
) -> StepCapture:
    """Capture a torch module, or what a function returns."""
    from itercast.capture.cases.external.user_module import (  # needs torch
        UserModel,
        call_function,
        capture_user_model,
    )

    def make() -> UserModel:
        if not hasattr(model, "parameters"):
            return call_function(model, batch, seq)
        return UserModel(module=model, inputs=inputs, loss=None if isinstance(loss, str) else loss)

    step = capture_user_model(make, settings, batch=batch, seq=seq, keep_dtype=keep_dtype)
    return with_engine(step, step.engine)


def micro_size(model: Any, plan: ParallelPlan, batch: int | None, seq: int | None) -> Row:
    """The batch and sequence length of one micro-batch on one rank.

    ``batch`` is that of a data-parallel replica; None takes a case's or a script's own.
    """
    if isinstance(model, str):
        batch, seq = batch or case(model).batch, seq or case(model).seq
    if isinstance(model, SizedModel):
        batch, seq = batch or model.replica_batch, seq or model.facts.seq
    if batch is None:
        return {"batch": None, "seq": seq}
    try:
        share, length = micro_batch(plan, batch, seq or 0)
    except ValueError as exc:
        raise ValueError(f"{exc}{_lacking_layers(model, plan, seq)}") from None
    return {"batch": share, "seq": length or None}


def _lacking_layers(model: Any, plan: ParallelPlan, seq: int | None) -> str:
    """Text for an error if the plan has more stages than the model has layers; else ""."""
    stages = plan.pp * plan.virtual
    if stages == 1 or not isinstance(model, str | Path | SizedModel):
        return ""
    folded = split_layers(capture(model, batch=1, seq=seq))
    layers = sum(x.count for x in folded if x.numbered) or sum(x.count for x in folded)
    return f"; {stages} stages, the model has {layers} layers" if stages > layers else ""


def model_name(model: Any) -> str:
    """The name of a model in machine files: a case's, a configuration's path, a function's."""
    if isinstance(model, Path):
        return str(model.resolve())
    if isinstance(model, SizedModel):
        return model.name
    return model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)


def capture_micro_batch(
    model: Any, target: Target, lengths: str, packed: bool, options: dict[str, Any]
) -> StepCapture:
    """Capture one micro-batch of a rank of ``target``'s plan.

    ``lengths`` and ``packed``: see ``prepare``; ``options``: those of ``capture``, with ``batch``
    and ``seq`` of a replica.
    """
    plan = target.plan
    size = micro_size(model, plan, options.pop("batch", None), options.pop("seq", None))
    rewrite: Callable[[StepCapture], StepCapture] | None = None
    if lengths or packed:
        size["seq"], rewrite = function_of("lengths", "stated")(lengths, plan, packed, **size)
    amp = options.pop("amp", plan.autocast)
    dtype = step_dtype(options.pop("dtype", None), amp or plan.amp, [target.gpu])
    step = capture(model, **size, amp=amp, dtype=dtype, **options)
    check_positions(step, plan.cp)
    return rewrite(step) if rewrite else step
