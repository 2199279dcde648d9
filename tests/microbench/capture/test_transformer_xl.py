"""Transformer-XL: attention by distance, a memory, and a capture that equals its run."""

from __future__ import annotations

import torch

from itercast.microbench.capture.log import capture_step
from itercast.microbench.cases.inputs import token_loss
from itercast.microbench.cases.models.transformer_xl import TransformerXL, by_distance
from itercast.microbench.step import StepSettings

LAYERS, SEQ, BATCH, WIDTH = 2, 5, 3, 8


def model() -> TransformerXL:
    return TransformerXL(width=WIDTH, layers=LAYERS, heads=2, hidden=16, vocab=11, dropped=0.1)


def inputs() -> dict[str, torch.Tensor]:
    memory = torch.randn(LAYERS, SEQ, BATCH, WIDTH)
    return {"tokens": torch.randint(0, 11, (SEQ, BATCH)), "memory": memory}


def test_distances_become_places() -> None:
    """Scores of 3 places by how far back they are: row i moves left by what is ahead of it."""
    scores = torch.tensor([[2, 1, 0], [12, 11, 10]]).float().view(1, 1, 2, 3)
    found = by_distance(scores)[0, 0]
    assert found[0, :2].tolist() == [1, 0]  # the third place is ahead
    assert found[1].tolist() == [12, 11, 10]


def test_words_ahead_do_not_matter_and_the_memory_does() -> None:
    one, given = model().eval(), inputs()
    before, states = one(**given)
    later = given["tokens"].clone()
    later[3:] = (later[3:] + 1) % 11
    after, _ = one(later, given["memory"])
    torch.testing.assert_close(after[: 3 * BATCH], before[: 3 * BATCH])
    assert not torch.allclose(after[3 * BATCH :], before[3 * BATCH :])
    assert not torch.allclose(one(given["tokens"], states)[0], before)


def test_its_capture_equals_its_run() -> None:
    """But for copies in the backward of ReLU in place on a view, which fake tensors go without."""

    def loss(output: tuple[torch.Tensor, torch.Tensor], given: dict[str, torch.Tensor]) -> object:
        return token_loss(output[0], given)

    def calls(fake: bool) -> list[object]:
        found = capture_step(model, inputs, loss, StepSettings(), fake=fake)
        alike = [c for c in found.calls if c.phase != "backward" or "mm" in c.op]
        return [(c.op, c.phase, [(t.shape, t.dtype) for t in c.outputs]) for c in alike]

    assert calls(fake=True) == calls(fake=False)
