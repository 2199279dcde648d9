"""The op calls of one step of any model: a named case, a configuration file, or a module.

Captures of cases are kept on disk, under a digest of what they depend on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from compose.parallel.fp8 import with_fp8
from compose.parallel.plan import ParallelPlan, micro_batch
from microbench.cases.external.huggingface import hf_case
from microbench.cases.registry import EvalCase, case
from microbench.opcall import StepCapture
from microbench.step import ALLOWED, StepSettings

DTYPES = (*ALLOWED["dtype"], "fp8")
CAPTURES = Path(".cache/captures")


def capture_case(
    chosen: EvalCase,
    *,
    batch: int | None = None,
    seq: int | None = None,
    mode: str = "train",
    optimizer: str = "adamw",
    loss: str = "default",
    dtype: str = "fp32",
    attn: str = "sdpa",
    amp: bool = False,
    shallow: bool = False,
) -> StepCapture:
    """One step of a case, captured without running it, from the cache where it is there already.

    ``shallow``: of a list of equal layers two are captured; only plans' forecasts know the rest.
    """
    from microbench.capture.cache import cached

    settings = _settings(dtype, mode=mode, optimizer=optimizer, loss=loss, attn=attn, amp=amp)
    size = (int(batch or chosen.batch), int(seq or chosen.seq))
    if not size[0]:
        raise ValueError(f"{chosen.name}: a batch is required, and a seq for text")
    key = repr((chosen.name, chosen.digest, *size, settings, shallow, _code_digest()))

    def make() -> StepCapture:
        return _captured(chosen, settings, *size, shallow)

    found = cached(hashlib.sha256(key.encode()).hexdigest()[:24], make, CAPTURES)
    return with_fp8(found) if dtype == "fp8" else found


def _settings(dtype: str, **options: Any) -> StepSettings:
    """What is captured: of fp8 all in bf16, to be narrowed afterwards."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    return StepSettings(dtype="bf16" if dtype == "fp8" else dtype, **options)


def _captured(
    chosen: EvalCase, settings: StepSettings, batch: int, seq: int, shallow: bool
) -> StepCapture:
    from microbench.capture.log import capture_step
    from microbench.capture.truncate import build_short
    from microbench.cases.external.user_module import in_short, said_here

    repeats: dict[str, int] = {}

    def build() -> Any:
        if not shallow:
            return chosen.build()
        model, cut = build_short(chosen.build)
        repeats.update(cut)
        return model

    try:
        captured = capture_step(
            build,
            lambda: chosen.inputs(batch, seq),
            chosen.loss,
            settings,
            samples=batch,
            tokens=batch * seq,
        )
    except Exception as exc:
        if said_here(exc):
            raise
        if shallow:  # a model that counts its layers, or names them, cannot be cut short
            return _captured(chosen, settings, batch, seq, shallow=False)
        raise ValueError(f"{chosen.name} fails without data: {in_short(exc)}") from exc
    return replace(captured, repeats=repeats)


def _code_digest() -> str:
    """Digest of the code a capture depends on: a changed model must not come from the cache."""
    folder = Path(__file__).parent.parent / "microbench"
    files = sorted([*folder.glob("cases/**/*.py"), *folder.glob("capture/*.py")])
    files += [folder / name for name in ("step.py", "opcall.py")]
    versions = [_version(name) for name in ("torch", "transformers", "timm")]
    code = b"".join(p.read_bytes() for p in files)
    return hashlib.sha256(code + repr(versions).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # an optional one
        return ""


def capture(
    model: Any,
    inputs: Any = None,
    loss: Callable[[Any], Any] | str = "default",
    *,
    batch: int | None = None,
    seq: int | None = None,
    mode: str = "train",
    optimizer: str = "adamw",
    dtype: str | None = None,
    attn: str = "sdpa",
    amp: bool = False,
    whole: bool = False,
) -> StepCapture:
    """One step of a model as its op calls; nothing is run and no tensor is allocated.

    ``model`` is the name of a case, the Path of a Hugging Face configuration, a torch module, or a
    function that returns a module, (module, inputs) or (module, inputs, loss) and may take
    ``batch`` and ``seq``. ``inputs`` is a tensor, a tuple of positional arguments or a dict by
    name; a transformers model can do without, given ``batch`` and ``seq``. ``loss`` is a function
    of the output; "default" takes the output's ``loss``, or the output where it is a scalar; "none"
    starts backward from the output. ``dtype`` None leaves a module as it is, else it is fp32.
    fp8 is of the linear layers of blocks alone, the rest is in bf16 (``compose.parallel.fp8``).
    ``amp``: weights stay in fp32, and the forward pass runs under CUDA's autocast to ``dtype``.
    Published cases and configurations are captured by two of many equal layers unless ``whole``.
    """
    options: dict[str, Any] = {"mode": mode, "optimizer": optimizer, "attn": attn, "amp": amp}
    words = loss if isinstance(loss, str) else "default"
    if isinstance(model, str | Path):
        if inputs is not None or not isinstance(loss, str):
            raise ValueError(f"{str(model)!r} brings its own inputs and loss")
        options |= {"loss": words, "dtype": dtype or "fp32"}
        if isinstance(model, str):
            chosen = case(model)
        else:
            chosen = hf_case(model, mode=mode, loss=words, attn=attn)
        return capture_case(
            chosen, batch=batch, seq=seq, shallow=not (whole or chosen.measured), **options
        )
    from microbench.cases.external.user_module import (  # needs torch
        OwnModel,
        call_function,
        capture_own,
    )

    def make() -> OwnModel:
        if not hasattr(model, "parameters"):
            return call_function(model, batch, seq)
        return OwnModel(module=model, inputs=inputs, loss=None if isinstance(loss, str) else loss)

    keep_dtype = dtype is None and hasattr(model, "parameters")
    settings = _settings(dtype or "fp32", loss=words, **options)
    found = capture_own(make, settings, batch=batch, seq=seq, keep_dtype=keep_dtype)
    return with_fp8(found) if dtype == "fp8" else found


def micro_size(
    model: Any, plan: ParallelPlan, batch: int | None, seq: int | None
) -> dict[str, Any]:
    """``batch`` and ``seq`` of one micro-batch on one rank, from those of a replica or a case."""
    if isinstance(model, str):
        batch, seq = batch or case(model).batch, seq or case(model).seq
    if batch is None:
        return {"batch": None, "seq": seq}
    share, length = micro_batch(plan, batch, seq or 0)
    return {"batch": share, "seq": length or None}
