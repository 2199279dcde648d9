"""Models of NVIDIA's DeepLearningExamples in the sizes of its published step times.

Source of the sizes: https://github.com/NVIDIA/DeepLearningExamples.
"""

from __future__ import annotations

from typing import Any

from itercast.microbench.cases.evalcase import EvalCase
from itercast.microbench.cases.kinds import builder, clicks, token_loss

# Rows of the tables of the small DLRM in PyTorch/Recommendation/DLRM: categories seen at least 15
# times in the Criteo Terabyte logs, by feature.
CRITEO = (
    *(7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11),
    *(2209, 10667, 104, 4, 968, 15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35),
)
WORDS = 267_735  # vocabulary of WikiText-103: words seen at least three times


def _transformer_xl(name: str, batch: int, seq: int, layers: int, **sizes: Any) -> EvalCase:
    """Transformer-XL on WikiText-103, with a memory as long as a segment.

    The softmax is over all words; dropout is that of train.py unless ``sizes`` say otherwise.
    """

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy: names need no torch

        memory = torch.randn(layers, seq, batch, sizes["width"])
        return {"tokens": torch.randint(0, WORDS, (seq, batch)), "memory": memory}

    return EvalCase(
        name=name,
        build=builder("transformer_xl", "TransformerXL", layers=layers, vocab=WORDS, **sizes),
        inputs=inputs,
        loss=lambda output, inputs: token_loss(output[0], inputs),
        batch=batch,
        seq=seq,
        measured=False,
    )


def _ssd(name: str, batch: int, image: int, places: int, classes: int) -> EvalCase:
    """Make the case of SSD, an object detector, on COCO; 1 % of its ``places`` hold an object.

    ``places``: default boxes per image.
    """

    def inputs(batch: int, seq: int) -> dict[str, Any]:
        import torch  # lazy, as above

        labels = torch.randint(1, classes, (batch, places)) * (torch.rand(batch, places) < 0.01)
        images = torch.randn(batch, 3, image, image)
        return {"images": images, "boxes": torch.randn(batch, 4, places), "labels": labels}

    def loss(output: Any, inputs: dict[str, Any]) -> Any:
        from itercast.microbench.cases.models.detection import detection_loss  # lazy, as above

        return detection_loss(output, inputs["boxes"], inputs["labels"])

    build = builder("detection", "Ssd", classes=classes)
    return EvalCase(name=name, build=build, inputs=inputs, loss=loss, batch=batch, measured=False)


EXAMPLES: tuple[EvalCase, ...] = (
    clicks(
        "dlrm-criteo",
        65536,
        features=13,
        bottom=(512, 256),
        tables=26,
        rows=CRITEO,
        bag=1,
        width=128,
        top=(1024, 1024, 512, 256),
        sparse=True,
        multiple=8,
        measured=False,
        optimizer="sgd",
    ),
    _transformer_xl("transformer-xl-base", 32, 192, 16, width=512, heads=8, hidden=2048),
    _transformer_xl(
        "transformer-xl-large",
        16,
        128,
        18,
        width=1024,
        heads=16,
        hidden=4096,
        dropout=0.2,
        dropped=0.2,
    ),
    _ssd("ssd300", 32, 300, 8732, 81),
)
