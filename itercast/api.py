"""The library: find a bundle, capture a step, forecast it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from compose.forecast import Forecast, forecast
from compose.plan import ParallelPlan
from learners.bundle import Bundle
from microbench.cases.registry import EvalCase, case
from microbench.hardware.machine import cpu_name
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
) -> StepCapture:
    """One step of a case, captured without running it, from the cache where it is there already."""
    from microbench.capture_cache import cached

    batch, seq = batch or chosen.batch, seq or chosen.seq
    settings = (chosen.name, batch, seq, mode, optimizer, loss, dtype, attn)
    key = hashlib.sha256(repr((settings, _code_digest())).encode()).hexdigest()[:24]

    def make() -> StepCapture:
        from microbench.capture import capture_step
        from microbench.step import StepSettings

        return capture_step(
            chosen.build,
            lambda: chosen.inputs(batch, seq),
            chosen.loss,
            StepSettings(mode=mode, optimizer=optimizer, loss=loss, dtype=dtype, attn=attn),
            samples=batch,
            tokens=batch * seq,
        )

    return cached(key, make, CAPTURES)


def _code_digest() -> str:
    """Digest of the code a capture depends on: a changed model must not come from the cache."""
    folder = Path(__file__).parent.parent / "microbench"
    files: Sequence[Path] = sorted(
        [*folder.glob("cases/*.py"), folder / "capture.py", folder / "step.py"]
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
    capture = capture_case(
        chosen,
        batch=batch,
        seq=seq,
        mode=mode,
        optimizer=optimizer,
        loss=loss,
        dtype=dtype,
        attn=attn,
    )
    threads = device.sm_count if parsed.dp == 1 else max(1, device.sm_count // parsed.dp)
    return forecast(
        capture,
        found,
        device,
        parsed,
        bundle_name=str(folder),
        threads=threads if device.kind == "cpu" else 0,
        optimizer=optimizer,
    )
