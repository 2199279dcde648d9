"""Sequences longer than a model's table of positions are refused, as on a GPU."""

import pytest
import torch
from torch import nn

from itercast.compose.capture_model import capture
from itercast.compose.predict import prepare


class Places(nn.Module):
    """Tokens and 16 learned positions; ``last`` stands for all later ones."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.tokens, self.places, self.last = nn.Embedding(50, 8), nn.Embedding(16, 8), last

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, seq) integers to (batch, seq, 8)."""
        place = torch.arange(0, tokens.shape[1])
        if self.last:
            place.clamp_(max=15)
        return self.tokens(tokens) + self.places(place)


@pytest.mark.parametrize("case", ["gpt2-small", "gpt-s", "switch-base"])  # 1024 positions each
def test_a_case_has_no_more_positions_than_its_table(case: str) -> None:
    with pytest.raises(ValueError, match="seq 1025: this model has 1024 positions"):
        capture(case, seq=1025)


def test_ranks_that_share_a_sequence_see_all_of_its_positions() -> None:
    """2048 tokens over two ranks are 1024 each, the second one's from 1024 on."""
    with pytest.raises(ValueError, match="seq 2048: this model has 1024 positions"):
        prepare("gpt-s", gpu="a10", plan="cp=2", seq=2048)
    assert prepare("gpt-s", gpu="a10", plan="cp=2", seq=1024)[0].calls


def test_a_models_own_table_is_read_too() -> None:
    """Positions that are changed in place are other numbers; rotary ones have no table."""
    tokens = torch.zeros(2, 17, dtype=torch.long)
    with pytest.raises(ValueError, match="seq 17: this model has 16 positions"):
        capture(Places(last=False), inputs=tokens, loss=lambda out: out.sum())
    assert capture(Places(last=False), inputs=tokens[:, :16], loss=lambda out: out.sum()).calls
    assert capture(Places(last=True), inputs=tokens, loss=lambda out: out.sum()).calls
    assert capture("llama-300m", seq=5000).calls
