"""Elements chosen by a mask: torch looks for their positions first."""

import pytest
import torch

from itercast.capture.opcall import OpCall
from itercast.compose.capture_model import capture


class Chosen(torch.nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = torch.nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, rows = self.linear(x), torch.ones(64, dtype=torch.bool)
        if self.how == "index":
            return x[rows]
        if self.how == "masked_select":
            return x.masked_select(rows[:, None])
        x = x.clone()
        x[rows] = 1.0 if self.how == "fill" else torch.ones(64, 8)
        return x


def calls(how: str) -> list[OpCall]:
    step = capture(Chosen(how), (torch.randn(64, 8),), loss="none", optimizer="none")
    known = ("nonzero", "index", "index_put_", "masked_fill_")
    return [call for call in step.calls if call.op.split(".")[1] in known]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("index", ["nonzero", "index", "nonzero", "index_put_"]),  # backward looks again
        ("put", ["nonzero", "index_put_", "nonzero", "index_put_"]),
        ("masked_select", ["nonzero", "index"]),
        ("fill", ["masked_fill_"]),
    ],
)
def test_a_mask_becomes_positions(how: str, expected: list[str]) -> None:
    """All 64 rows are chosen: 64 positions of 1 axis; of masked_select's 64 * 8 elements 2 axes."""
    found = calls(how)
    assert [call.op.split(".")[1] for call in found][: len(expected)] == expected
    positions = {call.outputs[0].shape for call in found if "nonzero" in call.op}
    assert positions == {"masked_select": {(512, 2)}, "fill": set()}.get(how, {(64, 1)})
    assert not any(t.dtype == "bool" for c in found if "index" in c.op for t in c.tensors())
