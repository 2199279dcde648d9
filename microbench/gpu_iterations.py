"""Which training iterations are measured on one GPU: small and large, host-bound and not."""

from __future__ import annotations

from collections.abc import Iterator

from microbench.cases.registry import case
from microbench.iterations import Iteration

# case: (batch, dtype) of eager AdamW steps, one after the other from the least that takes long
EAGER: dict[str, tuple[tuple[int, str], ...]] = {
    "bert-base": ((1, "bf16"), (8, "fp32"), (32, "bf16")),
    "gpt2-small": ((1, "bf16"), (4, "fp32"), (8, "tf32"), (16, "bf16")),
    "vit-b": ((2, "bf16"), (32, "tf32"), (64, "bf16")),
    "resnet-50": ((2, "fp32"), (32, "fp32"), (128, "bf16")),
    "unet-small": ((1, "bf16"), (16, "fp32")),
    "unet": ((4, "tf32"), (16, "bf16")),
    "switch-base": ((1, "bf16"), (8, "tf32")),
    "llama-300m": ((1, "bf16"), (4, "bf16"), (4, "tf32")),
    "bert-large": ((4, "bf16"), (16, "tf32")),
    "gpt2-medium": ((1, "tf32"), (8, "bf16")),
    "vit-large": ((8, "fp32"), (64, "bf16")),
    "llama-1b": ((1, "bf16"), (4, "bf16")),
    "gpt2-large": ((2, "tf32"), (4, "bf16")),
    "gpt2-xl": ((1, "bf16"), (4, "bf16")),
    "llama-3b": ((1, "bf16"),),
}
DLRM = tuple(f"dlrm-r{number:02d}" for number in range(20))
OTHER_ENGINES: tuple[tuple[str, int, str, str], ...] = (
    ("gpt2-small", 1, "bf16", "graph"),
    ("bert-base", 8, "fp32", "graph"),
    ("vit-b", 2, "bf16", "graph"),
    ("resnet-50", 2, "fp32", "graph"),
    ("unet-small", 1, "bf16", "graph"),
    ("llama-300m", 4, "bf16", "graph"),
    ("gpt2-small", 1, "bf16", "compile"),
    ("bert-base", 8, "fp32", "compile"),
    ("resnet-50", 32, "fp32", "compile"),
)


def gpu_iterations() -> list[Iteration]:
    """All of them, in turn by kind and the short ones first, so that any budget sees every kind."""
    eager = [list(_of_case(name)) for name in EAGER]
    dlrm = [_iteration(name, case(name).batch, "fp32", "sgd") for name in DLRM]
    engines = [_iteration(n, b, d, "adamw", engine) for n, b, d, engine in OTHER_ENGINES]
    rounds = max(len(some) for some in eager)
    found: list[Iteration] = []
    for number in range(rounds):
        found += [some[number] for some in eager if number < len(some)]
        found += dlrm[number::rounds]
        found += engines[number::rounds]
    return found


def _of_case(name: str) -> Iterator[Iteration]:
    for batch, dtype in EAGER[name]:
        yield _iteration(name, batch, dtype, "adamw")


def _iteration(
    name: str, batch: int, dtype: str, optimizer: str, engine: str = "eager"
) -> Iteration:
    seq = case(name).seq
    return Iteration(
        case=name, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, engine=engine
    )
