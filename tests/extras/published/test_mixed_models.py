"""Models of ``datasets/mixed_runs`` that no configuration describes."""

import pytest
import torch

from itercast.capture.cases.external.user_module import load_function

FOLDER = "itercast.extras.published.examples.mixed"


@pytest.mark.parametrize(
    "name, millions",
    [  # as their authors say: READMEs, papers and model cards
        ("resnet9:resnet9", 6.57),
        ("yolo:yolo", 47.0),
        ("hifi_gan:hifi_gan", 13.94 + 70.7),  # its generator; MPD and MSD, of its code
        ("lightning_dit:lightning_dit", 675),
        ("self_supervised:swav", 28.35),  # a ResNet-50 of 23.5 and 4.2 + 0.26 + 0.38 of its head
        ("encoder_decoders:nano_t5", 248),
        ("encoder_decoders:flan_t5_xl", 2850),
        ("encoder_decoders:flan_t5_xxl", 11135),
        ("encoder_decoders:blenderbot_400m", 365),
    ],
)
def test_they_have_as_many_parameters_as_their_authors_say(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = load_function(f"{FOLDER}.{name}")(2)[0]
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.003)


@pytest.mark.parametrize(
    "name",
    [
        *("resnet9:resnet9", "yolo:yolo", "hifi_gan:hifi_gan", "mar:mar"),
        *("lightning_dit:lightning_dit", "self_supervised:barlow_twins", "self_supervised:swav"),
    ],
)
def test_they_give_a_loss(name: str) -> None:
    with torch.device("meta"):
        model, inputs, *rest = load_function(f"{FOLDER}.{name}")(2)
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        assert (rest[0](output) if rest else output).shape == ()
