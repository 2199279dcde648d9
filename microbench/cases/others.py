"""Further architectures, not measured by default: they test forecasts of models of other kinds."""

from __future__ import annotations

from functools import partial

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.kinds import denoiser, graphs, images, language, signals

_classifier = partial(images, classes=100, measured=False)

OTHERS: tuple[EvalCase, ...] = (
    _classifier(
        "efficientnet-s",
        "EfficientNet",
        8,
        128,
        module="convnets",
        widths=(16, 24, 40, 80),
        depth=2,
    ),
    _classifier("convnext-s", "ConvNext", 8, 128, module="convnets", widths=(48, 96, 192), depth=2),
    _classifier("densenet-s", "DenseNet", 8, 64, module="convnets", width=32, growth=16, depth=6),
    _classifier(
        "swin-s", "Swin", 4, 112, module="attentions", width=64, layers=4, heads=4, window=7
    ),
    _classifier(
        "mixer-s", "Mixer", 16, 64, module="attentions", width=128, layers=4, size=64, patch=8
    ),
    denoiser("denoiser-s", 4, 32, width=32, heads=4),
    signals("wavenet-s", "convnets", "WaveNet", 2, 4000, 1, classes=256, width=32, layers=8),
    signals(
        "conformer-s",
        "attentions",
        "Conformer",
        batch=4,
        seq=120,
        channels=128,
        classes=50,
        width=128,
        layers=3,
        heads=4,
        kernel=15,
    ),
    language(
        "lstm-s",
        "RecurrentLM",
        batch=8,
        seq=40,
        vocab=5000,
        module="recurrent",
        measured=False,
        width=256,
        layers=2,
        kind="lstm",
    ),
    graphs(
        "gat-s",
        batch=8,
        nodes=128,
        degree=8,
        features=64,
        classes=10,
        measured=False,
        width=128,
        layers=2,
        attention=True,
    ),
)
