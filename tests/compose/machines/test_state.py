"""What measured steps tell of a machine: arithmetic by hand, and laws of normal distributions."""

from math import hypot, log, sqrt

import numpy as np
import pytest

from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import Anchor, Machine, Spread

TYPICAL = Spread(spread=(0.3, 0.2, 0.2, 0.4, 0.3), model=0.1, row=0.05, deviates=1.7)
ALONE = (0.7, 0.3, 0.0, 0.0, 0.0)  # a step of one GPU: products and memory
FAR = (0.4, 0.1, 0.0, 0.5, 0.0)  # of many: half of it in messages over the network


def test_one_anchor_by_hand() -> None:
    """All in products: a ratio of e**0.2 by variances 0.09, 0.01 (model) and 0.0025 (row)."""
    anchor = Anchor(model="a", sensitivity=(1.0, 0, 0, 0, 0), log_ratio=0.2)
    known = Machine.new(TYPICAL).updated([anchor])
    total = 0.09 + 0.01 + 0.0025
    assert log(known.factors().products) == pytest.approx(0.2 * 0.09 / total)
    assert log(known.factors("a").products) == pytest.approx(0.2 * 0.10 / total)
    assert known.covariance[0][0] == pytest.approx(0.09 - 0.09**2 / total)


def test_an_interval_of_a_new_machine_by_hand() -> None:
    """0.7 products, 0.3 memory; an error of kernels that no machine tells of adds to it."""
    sigma = sqrt(0.49 * 0.09 + 0.09 * 0.04 + 0.1**2 + 0.05**2)
    for other in (0.0, 0.2):
        wide = 1.7 * hypot(sigma, other)
        assert Machine.new(TYPICAL).half_width(ALONE, "a", other) == pytest.approx(wide)


def test_an_anchor_as_long_as_forecast_moves_nothing() -> None:
    new = Machine.new(TYPICAL)
    known = new.updated([Anchor(model="a", sensitivity=FAR, log_ratio=0.0)])
    assert known.factors("a").logs == pytest.approx(new.factors("a").logs)


def test_a_step_of_one_gpu_says_nothing_of_the_network() -> None:
    new = Machine.new(TYPICAL)
    known = new.updated([Anchor(model="a", sensitivity=ALONE, log_ratio=0.4)])
    at = NAMES.index("network")
    assert known.mean[at] == new.mean[at]
    assert known.covariance[at][at] == new.covariance[at][at]
    assert known.interval("network") == new.interval("network")


def test_anchors_never_make_an_interval_wider_than_without_any() -> None:
    """And those that are as forecast make it narrower, each of them."""
    draw = np.random.default_rng(0)
    known = usual = Machine.new(TYPICAL)
    asked = [(tuple(draw.dirichlet(np.ones(5)).tolist()), model) for model in "abcx"]
    widths = untold = [known.half_width(*one) for one in asked]
    for at in range(12):
        j, model = tuple(draw.dirichlet(np.ones(5)).tolist()), "abc"[at % 3]
        ratio = float(draw.normal(0, 0.5))
        known = known.updated([Anchor(model=model, sensitivity=j, log_ratio=ratio)])
        assert all(
            known.half_width(*one) <= w + 1e-12 for one, w in zip(asked, untold, strict=True)
        )
        usual = usual.updated([Anchor(model=model, sensitivity=j, log_ratio=0.0)])
        narrower = [usual.half_width(*one) for one in asked]
        assert all(a <= b + 1e-12 for a, b in zip(narrower, widths, strict=True))
        widths = narrower


def test_anchors_tell_by_hand_how_far_steps_of_the_machine_are_spread() -> None:
    """One step all in products, a variance of 0.1025 together: 4 degrees become 5.

    As long as forecast: deviations by sqrt(4 / 5); off by twice its deviation: sqrt(8 / 5), of
    another model, whose variance is 0.0025 + 0.01 + what the anchor leaves of products.
    """
    total = 0.09 + 0.01 + 0.0025
    left = 0.09 - 0.09**2 / total + 0.01 + 0.0025
    for off, squares in ((0.0, 0.0), (2 * sqrt(total), 4.0)):
        anchor = Anchor(model="a", sensitivity=(1.0, 0, 0, 0, 0), log_ratio=off)
        known = Machine.new(TYPICAL).updated([anchor])
        assert known.seen == pytest.approx((1, squares))
        deviation = sqrt(left * (4 + squares) / 5)
        assert known.log_deviation((1.0, 0, 0, 0, 0), "b") == pytest.approx(deviation)
    far = Anchor(model="a", sensitivity=ALONE, log_ratio=2.0)
    known, new = Machine.new(TYPICAL).updated([far]), Machine.new(TYPICAL)
    assert known.log_deviation(FAR, "b") == pytest.approx(new.log_deviation(FAR, "b"))
    assert known.interval("network")[2] == new.interval("network")[2]


MESSAGES = np.array([name in ("links", "network") for name in NAMES], dtype=float)


@pytest.mark.parametrize("seed", range(5))
def test_two_machines_of_known_factors_are_recovered(seed: int) -> None:
    """Forty drawn steps each: every factor within four deviations of what it was drawn with.

    Measured in two parts, exposed messages and the rest, they tell more of each factor.
    """
    draw = np.random.default_rng(seed)
    for _ in range(2):
        truth = draw.normal(0.0, TYPICAL.spread)
        effects = draw.normal(0, TYPICAL.model, 5)
        anchors = list[Anchor]()
        for at in range(40):
            j, share = draw.dirichlet(np.ones(5)), draw.uniform(0.2, 0.8)
            for part, of in ((j * MESSAGES, share), (j * (1 - MESSAGES), 1 - share)):
                noise = sqrt(of) * draw.normal(0, TYPICAL.row)
                ratio = float(part @ truth + of * effects[at % 5] + noise)
                own = tuple(part.tolist())
                anchors.append(
                    Anchor(model=str(at % 5), sensitivity=own, log_ratio=ratio, share=of)
                )
        pairs = zip(anchors[::2], anchors[1::2], strict=True)
        deviations = list[np.ndarray]()
        for steps in (anchors, [whole(one, other) for one, other in pairs]):
            known = Machine.new(TYPICAL).updated(steps)
            deviations.append(np.sqrt(np.diag(np.array(known.covariance))[:5]))
            assert (np.abs(np.array(known.mean[:5]) - truth) < 4 * deviations[-1]).all()
        assert (deviations[0] < deviations[1]).all() and (deviations[1] < TYPICAL.spread).all()


def whole(one: Anchor, other: Anchor) -> Anchor:
    """The step of two parts."""
    pairs = zip(one.sensitivity, other.sensitivity, strict=True)
    ratio = one.log_ratio + other.log_ratio
    return Anchor(model=one.model, sensitivity=tuple(map(sum, pairs)), log_ratio=ratio)


def test_exposed_messages_move_only_the_factors_they_speak_of() -> None:
    """A quarter of the step, all network, a ratio of 0.2: variances 0.25**2 (0.16 + 0.01), row."""
    part = Anchor(model="a", sensitivity=(0, 0, 0, 0.25, 0), log_ratio=0.2, share=0.25)
    known = Machine.new(TYPICAL).updated([part])
    variance = 0.25**2 * (0.16 + 0.01) + 0.25 * 0.0025
    assert log(known.factors().network) == pytest.approx(0.25 * 0.16 * 0.2 / variance)
    assert known.mean[:3] == (0, 0, 0)
    assert known.interval("products") == Machine.new(TYPICAL).interval("products")


def test_the_order_of_anchors_does_not_matter() -> None:
    anchors = [
        Anchor(model="a", sensitivity=ALONE, log_ratio=0.3),
        Anchor(model="b", sensitivity=FAR, log_ratio=-0.1),
    ]
    one, other = Machine.new(TYPICAL).updated(anchors), Machine.new(TYPICAL).updated(anchors[::-1])
    assert one.factors().logs == pytest.approx(other.factors().logs)
    assert one.half_width(FAR, "a") == pytest.approx(other.half_width(FAR, "a"))
