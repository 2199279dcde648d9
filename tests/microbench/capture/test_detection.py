"""SSD: how many places it looks at, and what a wrong box and a wrong class cost."""

from __future__ import annotations

from math import log

import torch

from itercast.microbench.cases.models.detection import Ssd, detection_loss


def test_an_image_of_300_pixels_has_8732_places() -> None:
    """Maps of 38, 19, 10, 5, 3 and 1 pixels a side: 4, 6, 6, 6, 4 and 4 boxes at each."""
    assert 4 * 38**2 + 6 * (19**2 + 10**2 + 5**2) + 4 * (3**2 + 1) == 8732
    with torch.device("meta"):
        where, kinds = Ssd(81)(torch.empty(2, 3, 300, 300))
    assert where.shape == (2, 4, 8732)
    assert kinds.shape == (2, 81, 8732)


def test_a_loss_by_hand() -> None:
    """One object among six places: its box is off by 2, its class and three others even odds."""
    where, labels = torch.zeros(1, 4, 6), torch.tensor([[1, 0, 0, 0, 0, 0]])
    boxes = torch.zeros(1, 4, 6)
    boxes[0, 0, 0] = 2  # beyond 1 the distance less a half
    boxes[0, 0, 5] = 9  # no object: does not matter
    kinds = torch.zeros(1, 2, 6)
    kinds[0, 0, 4:] = 50  # surely nothing
    found = detection_loss((where, kinds), boxes, labels)
    torch.testing.assert_close(found, torch.tensor(1.5 + 4 * log(2)))


def test_an_image_without_objects_costs_nothing() -> None:
    found = (torch.zeros(1, 4, 6), torch.zeros(1, 2, 6))
    loss = detection_loss(found, torch.zeros(1, 4, 6), torch.zeros(1, 6, dtype=torch.long))
    assert loss == 0
