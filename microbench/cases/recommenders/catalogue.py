"""Cases of recommendation models: published sizes for GPUs, small ones that a CPU runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.kinds import clicks

FEATURES = 13  # dense ones of Criteo's logs
# Rows of MLPerf's tables, Criteo Terabyte with at most 40 million rows each, and lookups a sample
# of its multi-hot successor. Source: https://github.com/mlcommons/training,
# recommendation_v2/torchrec_dlrm/README.MD.
MLPERF = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000),
    *(590_152, 12_973, 108, 36),
)
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
# Criteo Kaggle: https://github.com/facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh.
KAGGLE = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593),
    *(3_194, 27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105),
    142_572,
)
SMALL = (3_000, 50, 8_000, 400, 12, 2_000)
SMALL_LOOKUPS = (4, 1, 8, 2, 1, 20)
USERS, ITEMS = 138_493, 26_744  # MovieLens 20M: https://grouplens.org/datasets/movielens/20m
NEGATIVES = 128


def _builder(module: str, name: str, **sizes: Any) -> Callable[[], Any]:
    def build() -> Any:
        path = f"itercast.microbench.cases.recommenders.{module}"
        return getattr(importlib.import_module(path), name)(**sizes)

    return build


def _ranking(
    name: str,
    model: str,
    batch: int,
    *,
    rows: tuple[int, ...],
    pooling: tuple[int, ...],
    optimizer: str = "adamw",
    **sizes: Any,
) -> EvalCase:
    """A model of clicks with so many lookups per sample and table."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy: names need no torch

        pairs = list(zip(rows, pooling, strict=True))
        return {
            "dense": torch.randn(batch, FEATURES),
            "indices": torch.cat([torch.randint(0, n, (batch * k,)) for n, k in pairs]),
            "offsets": torch.stack([torch.arange(0, batch * k, k) for k in pooling]),
        }

    def loss(logits: Any, inputs: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        clicked = (inputs["dense"][:, 0] > 0).to(logits.dtype)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)

    return EvalCase(
        name=name,
        build=_builder("ranking", model, rows=rows, pooling=pooling, features=FEATURES, **sizes),
        inputs=inputs,
        loss=loss,
        batch=batch,
        measured=False,
        optimizer=optimizer,
    )


def _two_tower(name: str, batch: int, seq: int, users: int, items: int, **sizes: Any) -> EvalCase:
    """Users and the items they took: the others of the batch are the wrong ones."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {
            "user": torch.randint(0, users, (batch,)),
            "history": torch.randint(0, items, (batch, seq)),
            "item": torch.randint(0, items, (batch,)),
        }

    def loss(scores: Any, inputs: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        own = torch.arange(len(scores), device=scores.device)
        return torch.nn.functional.cross_entropy(scores, own)

    return EvalCase(
        name=name,
        build=_builder("sequences", "TwoTower", users=users, items=items, **sizes),
        inputs=inputs,
        loss=loss,
        batch=batch,
        seq=seq,
        measured=False,
    )


def _hstu(name: str, batch: int, seq: int, items: int, negatives: int, **sizes: Any) -> EvalCase:
    """Histories of ``seq`` items and candidates for each next one, the right one first."""

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        return {
            "history": torch.randint(0, items, (batch, seq)),
            "candidates": torch.randint(0, items, (batch, seq, 1 + negatives)),
        }

    def loss(logits: Any, inputs: dict[str, Any]) -> Any:
        import torch  # lazy, as above

        first = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        return torch.nn.functional.cross_entropy(logits, first)

    return EvalCase(
        name=name,
        build=_builder("sequences", "Hstu", items=items, seq=seq, **sizes),
        inputs=inputs,
        loss=loss,
        batch=batch,
        seq=seq,
        measured=False,
    )


RECOMMENDERS: tuple[EvalCase, ...] = (
    clicks(  # DLRM_MLPerf of arXiv 2404.12674: MLPerf's DLRM with one lookup a sample
        "dlrm-mlperf",
        6912,
        features=FEATURES,
        bottom=(512, 256),
        tables=len(MLPERF),
        rows=MLPERF,
        bag=1,
        width=128,
        top=(1024, 1024, 512, 256),
        sparse=True,
        measured=False,
        optimizer="sgd",
    ),
    clicks(  # DLRM_DDP of arXiv 2404.12674
        "dlrm-ddp",
        2048,
        features=128,
        bottom=(128, 128),
        tables=8,
        rows=80_000,
        bag=10,
        width=128,
        top=(512, 512, 512, 256),
        measured=False,
    ),
    clicks(  # DLRM_open_source of arXiv 2404.12674: six tables, whose rows and lookups are ours
        "dlrm-open",
        2048,
        features=512,
        bottom=(1024, 256),
        tables=6,
        rows=1_000_000,
        bag=20,
        width=128,
        top=(1024, 512, 256),
        sparse=True,
        measured=False,
        optimizer="sgd",
    ),
    _ranking(  # 55,296 samples on 8 GPUs, as most submissions to MLPerf Training v3.1
        "dlrm-dcnv2",
        "DlrmDcn",
        6912,
        bottom=(512, 256),
        rows=MLPERF,
        pooling=MULTI_HOT,
        width=128,
        top=(1024, 1024, 512, 256),
        layers=3,
        rank=512,
        sparse=True,
        optimizer="sgd",
    ),
    _ranking(
        "dlrm-dcn-s",
        "DlrmDcn",
        128,
        bottom=(64,),
        rows=SMALL,
        pooling=SMALL_LOOKUPS,
        width=32,
        top=(128, 64),
        layers=2,
        rank=32,
    ),
    _ranking(  # over Criteo Kaggle, with widths and depth of ours
        "dcn-v2",
        "DcnV2",
        4096,
        rows=KAGGLE,
        pooling=(1,) * len(KAGGLE),
        width=16,
        hidden=(768, 768),
        layers=3,
    ),
    _ranking(
        "dcn-v2-s",
        "DcnV2",
        256,
        rows=SMALL,
        pooling=(1,) * len(SMALL),
        width=16,
        hidden=(128, 128),
        layers=2,
    ),
    _ranking(  # vectors of 10 and three layers of 400, as in the paper
        "deepfm",
        "DeepFm",
        4096,
        rows=KAGGLE,
        pooling=(1,) * len(KAGGLE),
        width=10,
        hidden=(400, 400, 400),
    ),
    _ranking(
        "deepfm-s",
        "DeepFm",
        256,
        rows=SMALL,
        pooling=(1,) * len(SMALL),
        width=8,
        hidden=(64, 64),
    ),
    _two_tower(
        "two-tower", 4096, 50, users=USERS, items=ITEMS, width=128, heads=4, hidden=(512, 256)
    ),
    _two_tower("two-tower-s", 128, 20, users=5_000, items=2_000, width=32, heads=2, hidden=(64,)),
    # HSTU-large on MovieLens 20M: https://github.com/facebookresearch/generative-recommenders,
    # configs/ml-20m/hstu-sampled-softmax-n128-large-final.gin
    _hstu("hstu-large", 128, 200, ITEMS, NEGATIVES, width=256, layers=16, heads=8, head=32),
    _hstu("hstu-s", 8, 32, 2_000, 16, width=32, layers=2, heads=2, head=16),
)
