"""The library: find a bundle, capture a step, forecast it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compose.forecast import Forecast, forecast
from compose.plan import ParallelPlan, micro_batch
from learners.bundle import Bundle
from microbench.cases.registry import EvalCase, case
from microbench.hardware.machine import cpu_name
from microbench.hardware.node import Node, load_node
from microbench.hardware.spec import Gpu, load_gpu
from microbench.opcall import StepCapture

SHIPPED = Path(__file__).parent.parent / "learners" / "shipped"
LOCAL = (Path("runs/demo/bundle"), Path("bundles/local"))
CAPTURES = Path(".cache/captures")


def find_bundle(gpu: str, path: Path | None = None) -> tuple[Path, Bundle]:
    """The bundle at ``path``; else a local one that knows this machine; else the shipped one."""
    if path is not None:
        return path, Bundle.load(path)
    name = cpu_name() if gpu == "cpu" else gpu
    for folder in LOCAL:
        if (folder / "bundle.json").is_file():
            bundle = Bundle.load(folder)
            if name in bundle.gpus:
                return folder, bundle
    if not (SHIPPED / "bundle.json").is_file():
        raise ValueError(f"no bundle for gpu {name!r}: run `make demo` or `itercast train` first")
    return SHIPPED, Bundle.load(SHIPPED)


def find_gpu(name: str, bundle: Bundle) -> Gpu:
    """The GPU by name or file; ``cpu`` is the machine at hand, or else the bundle's only CPU."""
    if name in bundle.gpus:
        return bundle.gpus[name]
    if name != "cpu":
        return load_gpu(name)
    cpus = {n: g for n, g in bundle.gpus.items() if g.kind == "cpu"}
    if not cpus:
        raise ValueError(f"gpu 'cpu': the bundle knows no CPU; known: {sorted(bundle.gpus)}")
    return cpus.get(cpu_name(), next(iter(cpus.values())))


def find_node(plan: ParallelPlan, gpu: Gpu) -> Node | None:
    """The plan's node; ValueError where it holds other GPUs."""
    if not plan.node:
        return None
    node = load_node(plan.node)
    if node.gpu != gpu.name:
        raise ValueError(f"plan {str(plan)!r}: node {node.name!r} holds {node.gpu}, not {gpu.name}")
    return node


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
    shallow: bool = False,
) -> StepCapture:
    """One step of a case, captured without running it, from the cache where it is there already.

    ``shallow``: of a list of equal layers two are captured; only plans' forecasts know the rest.
    """
    from microbench.capture_cache import cached

    batch, seq = batch or chosen.batch, seq or chosen.seq
    settings = (chosen.name, batch, seq, mode, optimizer, loss, dtype, attn, shallow)
    key = hashlib.sha256(repr((settings, _code_digest())).encode()).hexdigest()[:24]

    def make() -> StepCapture:
        from microbench.capture import capture_step
        from microbench.shallow import build_short
        from microbench.step import StepSettings

        repeats: dict[str, int] = {}

        def build() -> Any:
            if not shallow:
                return chosen.build()
            model, cut = build_short(chosen.build)
            repeats.update(cut)
            return model

        captured = capture_step(
            build,
            lambda: chosen.inputs(batch, seq),
            chosen.loss,
            StepSettings(mode=mode, optimizer=optimizer, loss=loss, dtype=dtype, attn=attn),
            samples=batch,
            tokens=batch * seq,
        )
        return replace(captured, repeats=repeats)

    return cached(key, make, CAPTURES)


def _code_digest() -> str:
    """Digest of the code a capture depends on: a changed model must not come from the cache."""
    folder = Path(__file__).parent.parent / "microbench"
    files: Sequence[Path] = sorted(
        [*folder.glob("cases/*.py"), *(folder / f"{n}.py" for n in ("capture", "shallow", "step"))]
    )
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def forecast_case(
    name: str,
    *,
    gpu: str = "cpu",
    plan: str = "",
    bundle: Path | None = None,
    batch: int | None = None,
    seq: int | None = None,
    mode: str = "train",
    optimizer: str = "adamw",
    loss: str = "default",
    dtype: str = "fp32",
    attn: str = "sdpa",
) -> Forecast:
    """Forecast one iteration of a named case."""
    parsed = ParallelPlan.parse(plan)
    chosen = case(name)
    folder, found = find_bundle(gpu, bundle)
    device = find_gpu(gpu, found)
    share, length = micro_batch(parsed, batch or chosen.batch, seq or chosen.seq)
    capture = capture_case(
        chosen,
        batch=share,
        seq=length,
        mode=mode,
        optimizer=optimizer,
        loss=loss,
        dtype=dtype,
        attn=attn,
        shallow=not chosen.measured,
    )
    threads = max(1, device.sm_count // parsed.world_size)
    return forecast(
        capture,
        found,
        device,
        parsed,
        bundle_name=str(folder),
        threads=threads if device.kind == "cpu" else 0,
        optimizer=optimizer,
        node=find_node(parsed, device),
    )
