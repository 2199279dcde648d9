"""The training iterations that are measured on one GPU: small and large, host-bound and not."""

from __future__ import annotations

from itercast.microbench.cases.registry import case
from itercast.microbench.iterations.measure import Iteration

# Case, batch, dtype and engine, measured in this order; every kind of model is among the first.
# Optimizer: AdamW, but SGD for DLRM, whose batch 0 stands for the case's own.
FIRST: tuple[tuple[str, int, str, str], ...] = (
    ("bert-base", 1, "bf16", "eager"),
    ("gpt2-small", 16, "bf16", "eager"),
    ("dlrm-r00", 0, "fp32", "eager"),
    ("resnet-50", 2, "fp32", "eager"),
    ("llama-300m", 4, "bf16", "eager"),
    ("vit-b", 64, "bf16", "eager"),
    ("unet-small", 1, "bf16", "eager"),
    ("switch-base", 8, "tf32", "eager"),
    ("dlrm-r01", 0, "fp32", "eager"),
    ("gpt2-small", 1, "bf16", "graph"),
    ("bert-large", 16, "tf32", "eager"),
    ("resnet-50", 128, "bf16", "eager"),
    ("vit-b", 2, "bf16", "eager"),
    ("llama-1b", 1, "bf16", "eager"),
    ("unet", 4, "tf32", "eager"),
    ("dlrm-r02", 0, "fp32", "eager"),
    ("gpt2-medium", 1, "tf32", "eager"),
    ("bert-base", 8, "fp32", "graph"),
    ("gpt2-large", 4, "bf16", "eager"),
    ("switch-base", 1, "bf16", "eager"),
    ("vit-large", 8, "fp32", "eager"),
    ("dlrm-r03", 0, "fp32", "eager"),
    ("llama-300m", 4, "bf16", "graph"),
    ("bert-base", 8, "fp32", "eager"),
    ("llama-3b", 1, "bf16", "eager"),
)
# Batch and dtype of further eager steps; they and further DLRMs are measured in turn.
EAGER: dict[str, tuple[tuple[int, str], ...]] = {
    "bert-base": ((32, "bf16"),),
    "gpt2-small": ((1, "bf16"), (4, "fp32"), (8, "tf32")),
    "vit-b": ((32, "tf32"),),
    "resnet-50": ((32, "fp32"),),
    "unet-small": ((16, "fp32"),),
    "unet": ((16, "bf16"),),
    "llama-300m": ((1, "bf16"), (4, "tf32")),
    "bert-large": ((4, "bf16"),),
    "gpt2-medium": ((8, "bf16"),),
    "vit-large": ((64, "bf16"),),
    "llama-1b": ((4, "bf16"),),
    "gpt2-large": ((2, "tf32"),),
    "gpt2-xl": ((1, "bf16"), (4, "bf16")),
}
DLRM = tuple(f"dlrm-r{number:02d}" for number in range(20))
GRAPHS: tuple[tuple[str, int, str, str], ...] = (
    ("vit-b", 2, "bf16", "graph"),
    ("resnet-50", 2, "fp32", "graph"),
    ("unet-small", 1, "bf16", "graph"),
)
COMPILED: tuple[tuple[str, int, str, str], ...] = (
    ("gpt2-small", 1, "bf16", "compile"),
    ("bert-base", 8, "fp32", "compile"),
    ("resnet-50", 32, "fp32", "compile"),
)


def gpu_iterations() -> list[Iteration]:
    """Lists all iterations to measure: ``FIRST``, more eager steps, CUDA graphs, compiled steps."""
    first = [_iteration(*one) for one in FIRST]
    eager = [
        _iteration(name, *sizes[number], "eager")
        for number in range(max(map(len, EAGER.values())))
        for name, sizes in EAGER.items()
        if number < len(sizes)
    ]
    dlrm = [one for name in DLRM if (one := _iteration(name, 0, "fp32", "eager")) not in first]
    rest = [one for both in zip(eager, dlrm, strict=False) for one in both]
    rest += eager[len(dlrm) :] + dlrm[len(eager) :]
    return [*first, *rest, *(_iteration(*one) for one in (*GRAPHS, *COMPILED))]


def _iteration(name: str, batch: int, dtype: str, engine: str) -> Iteration:
    chosen, optimizer = case(name), "sgd" if name in DLRM else "adamw"
    return Iteration(
        case=name,
        batch=batch or chosen.batch,
        seq=chosen.seq,
        dtype=dtype,
        optimizer=optimizer,
        engine=engine,
    )
