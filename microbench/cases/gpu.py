"""More cases to measure on GPUs: Llama sizes, a switch MoE, U-Nets, random DLRMs."""

from __future__ import annotations

import numpy as np

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.kinds import clicks, language, segmentation


def _llama(name: str, width: int, layers: int, heads: int, hidden: int, batch: int) -> EvalCase:
    """A Llama model with an untied head and the vocabulary of Llama 2."""
    return language(
        name,
        "Transformer",
        batch,
        2048,
        vocab=32000,
        measured=False,
        style="llama",
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=heads // 4,
        hidden=hidden,
        tied=False,
        positions=0,
    )


def random_dlrm(number: int) -> EvalCase:
    """A random DLRM; every second one has at least 20 lookups per bag.

    Perceptrons, 36 to 66 tables and batches of 512 to 4096 as in arXiv:2404.12674; tables of 1,000
    to a million rows, so that their dense gradients fit into memory.
    """
    rng = np.random.default_rng([2404, number])
    tables = int(rng.integers(36, 67))
    rows = np.exp(rng.uniform(np.log(1e3), np.log(1e6), tables)).astype(int)
    return clicks(
        f"dlrm-r{number:02d}",
        int(rng.choice([512, 1024, 2048, 4096])),
        features=512,
        bottom=(1024, 256),
        tables=tables,
        rows=tuple(int(n) for n in rows),
        bag=int(rng.integers(20, 81) if number % 2 else rng.integers(1, 20)),
        width=int(rng.choice([32, 64, 128])),
        top=(1024, 512, 256),
        measured=False,
    )


GPU: tuple[EvalCase, ...] = (
    _llama("llama-300m", 1024, 20, 16, 2816, 8),
    _llama("llama-3b", 3200, 26, 32, 8640, 1),
    language(
        "switch-base",
        "Transformer",
        8,
        512,
        vocab=32128,
        measured=False,
        style="gpt",
        width=768,
        layers=12,
        heads=12,
        experts=8,
        top=1,
    ),
    segmentation("unet", "UNet", 8, 256, classes=2, width=64, depth=4),
    segmentation("unet-small", "UNet", 16, 128, classes=2, width=32, depth=4),
    *(random_dlrm(number) for number in range(20)),
)
