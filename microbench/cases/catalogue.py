"""Cases small enough to be measured on two CPU cores, and published architectures."""

from __future__ import annotations

from typing import Any

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.kinds import clicks, graphs, images, language, perceptron


def _transformer(
    name: str, width: int, layers: int, heads: int, vocab: int, batch: int, seq: int, **options: Any
) -> EvalCase:
    sizes = {"style": name.split("-")[0], "width": width, "layers": layers, "heads": heads}
    return language(name, "Transformer", batch, seq, vocab=vocab, **{**sizes, **options})


def _recurrent(name: str, width: int, layers: int, vocab: int, batch: int, seq: int) -> EvalCase:
    sizes: dict[str, Any] = {"width": width, "layers": layers}
    return language(name, "RecurrentLM", batch, seq, vocab=vocab, module="recurrent", **sizes)


def _vit(
    name: str, width: int, layers: int, heads: int, batch: int, image: int, patch: int, **more: Any
) -> EvalCase:
    sizes = {"width": width, "layers": layers, "heads": heads, "patch": patch}
    return images(name, "Vit", batch, image, size=image, **{"classes": 100, **sizes, **more})


def _resnet(
    name: str, width: int, stages: tuple[int, ...], batch: int, image: int, **more: Any
) -> EvalCase:
    sizes = {"width": width, "stages": stages, "bottleneck": True, "classes": 100}
    return images(name, "ResNet", batch, image, **{**sizes, **more})


MEASURED: tuple[EvalCase, ...] = (
    perceptron("mlp-s", (128, 256, 256, 64), 64),
    perceptron("mlp-m", (512, 1024, 1024, 256), 128),
    perceptron("mlp-l", (1024, 2048, 2048, 512), 256),
    _transformer("gpt-s", 96, 2, 4, 512, 4, 64),
    _transformer("gpt-m", 192, 4, 6, 1024, 4, 96),
    _transformer("gpt-l", 320, 4, 5, 2048, 4, 96),
    _transformer("bert-s", 128, 2, 2, 768, 4, 48),
    _transformer("bert-m", 256, 3, 4, 1000, 8, 64),
    _transformer("bert-l", 384, 3, 6, 2000, 4, 96),
    _transformer("llama-s", 64, 3, 4, 400, 8, 64),
    _transformer("llama-m", 256, 4, 4, 800, 4, 80),
    _transformer("llama-l", 384, 3, 6, 1600, 4, 112),
    _vit("vit-s", 96, 2, 3, 4, 56, 8),
    _vit("vit-m", 192, 4, 6, 4, 64, 8),
    _vit("vit-l", 320, 4, 5, 6, 96, 12),
    _resnet("resnet-s", 16, (1, 1, 1, 1), 4, 64, bottleneck=False),
    _resnet("resnet-m", 24, (2, 2, 2, 2), 8, 64, bottleneck=False),
    _resnet("resnet-l", 24, (3, 4, 6, 3), 8, 64),
    _recurrent("gru-s", 96, 1, 500, 8, 16),
    _recurrent("gru-m", 192, 2, 1000, 16, 24),
    _recurrent("gru-l", 256, 2, 1500, 16, 32),
    clicks(
        "dlrm-s",
        128,
        features=13,
        bottom=(128, 64),
        tables=6,
        rows=2000,
        bag=2,
        width=32,
        top=(256, 128),
    ),
    clicks(
        "dlrm-m",
        512,
        features=13,
        bottom=(512, 256),
        tables=10,
        rows=4000,
        bag=4,
        width=64,
        top=(512, 256),
    ),
    clicks(
        "dlrm-l",
        1024,
        features=32,
        bottom=(512, 256),
        tables=16,
        rows=8000,
        bag=8,
        width=64,
        top=(1024, 512),
    ),
    _transformer("moe-s", 96, 2, 4, 400, 4, 40, style="gpt", experts=4, top=1),
    _transformer("moe-m", 160, 3, 5, 800, 4, 80, style="gpt", experts=6, top=1),
    _transformer("moe-l", 256, 3, 4, 1200, 4, 120, style="llama", experts=8, top=2, hidden=512),
    graphs("gnn-s", 8, nodes=64, degree=4, features=32, width=64, layers=3, classes=10),
    graphs("gnn-m", 16, nodes=100, degree=8, features=64, width=128, layers=4, classes=20),
    graphs("gnn-l", 12, nodes=120, degree=10, features=64, width=192, layers=5, classes=20),
)


def _published(
    name: str, style: str, width: int, layers: int, heads: int, vocab: int, **options: Any
) -> EvalCase:
    sizes = {"style": style, "width": width, "layers": layers, "heads": heads}
    if style == "llama":
        sizes |= {"tied": False, "positions": 0}
    batch, seq = options.pop("batch"), options.pop("seq")
    shapes = {**sizes, **options}
    return language(name, "Transformer", batch, seq, vocab=vocab, measured=False, **shapes)


def _bert(name: str, width: int, layers: int, heads: int) -> EvalCase:
    sizes: dict[str, Any] = {"width": width, "layers": layers, "heads": heads, "positions": 512}
    return language(name, "MaskedLM", 8, 512, vocab=30522, measured=False, **sizes)


PUBLISHED: tuple[EvalCase, ...] = (
    _published("gpt2-small", "gpt", 768, 12, 12, 50257, batch=8, seq=1024),
    _published("gpt2-medium", "gpt", 1024, 24, 16, 50257, batch=8, seq=1024),
    _published("gpt2-large", "gpt", 1280, 36, 20, 50257, batch=4, seq=1024),
    _published("gpt2-xl", "gpt", 1600, 48, 25, 50257, batch=4, seq=1024),
    _published("gpt3-175b", "gpt", 12288, 96, 96, 50257, batch=1, seq=2048, positions=2048),
    _bert("bert-base", 768, 12, 12),
    _bert("bert-large", 1024, 24, 16),
    _published(
        "llama-1b", "llama", 2048, 22, 32, 32000, kv_heads=4, hidden=5632, batch=4, seq=2048
    ),
    _published(
        "llama-7b", "llama", 4096, 32, 32, 32000, kv_heads=32, hidden=11008, batch=1, seq=4096
    ),
    _published(
        "llama-8b", "llama", 4096, 32, 32, 128256, kv_heads=8, hidden=14336, batch=1, seq=8192
    ),
    _published(
        "mixtral-8x7b",
        "llama",
        4096,
        32,
        32,
        32000,
        kv_heads=8,
        hidden=14336,
        experts=8,
        top=2,
        batch=1,
        seq=4096,
    ),
    _vit("vit-b", 768, 12, 12, 32, 224, 16, classes=1000, measured=False),
    _vit("vit-large", 1024, 24, 16, 32, 224, 16, classes=1000, measured=False),
    _resnet("resnet-50", 64, (3, 4, 6, 3), 32, 224, classes=1000, measured=False),
    clicks(
        "dlrm-rm2",
        512,
        features=256,
        bottom=(256, 128),
        tables=32,
        rows=1_000_000,
        bag=80,
        width=64,
        top=(512, 128),
        measured=False,
    ),
)
