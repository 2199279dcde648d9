"""Models of ``datasets/user_runs`` that no configuration describes."""

import pytest
import torch

from itercast.capture.cases.registry import case


@pytest.mark.parametrize(
    "name, millions",
    [  # as their authors say: papers, READMEs and a log (34.09 x 2^20)
        ("dit-xl-2", 675),
        ("unet-cifar10", 35.75),
        ("sd2-unet-256", 865.9),
        ("inceptionnext-tiny", 28),
        ("inceptionnext-small", 49),
        ("inceptionnext-base", 87),
        ("golf-gpt", 17.06),
    ],
)
def test_they_have_as_many_parameters_as_their_authors_say(name: str, millions: float) -> None:
    with torch.device("meta"):
        numbers = sum(p.numel() for p in case(name).build().parameters())
    assert numbers / 1e6 == pytest.approx(millions, rel=0.011 if millions < 100 else 0.001)


@pytest.mark.parametrize(
    "name",
    [
        *("dit-xl-2", "unet-cifar10", "sd2-unet-512", "inceptionnext-tiny", "pspnet-101"),
        *("deeplab-101", "dino-vit-s", "golf-gpt", "sasrec-ml1m", "gru4rec-diginetica"),
    ],
)
def test_their_losses_take_what_they_give(name: str) -> None:
    chosen = case(name)
    with torch.device("meta"):
        model, inputs = chosen.build(), chosen.inputs(2, chosen.seq)
        assert chosen.loss(model(**inputs), inputs).shape == ()
