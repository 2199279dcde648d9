"""Mixture of experts with static shapes: every expert takes the same number of tokens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    """Mixture of experts by expert choice: each takes its ``tokens * top / experts`` best tokens.

    Balanced by construction, so that no shape depends on data (arXiv:2202.09368).
    """

    def __init__(
        self, width: int, hidden: int, experts: int, top: int, gated: bool = False
    ) -> None:
        super().__init__()
        self.experts, self.top, self.gated = experts, top, gated
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.gate = nn.Parameter(torch.empty(experts, width, hidden)) if gated else None
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        for weight in (self.up, self.gate, self.down):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, seq, width) to the same; tokens that no expert takes become zero."""
        flat = x.reshape(-1, x.shape[-1])
        capacity = max(1, len(flat) * self.top // self.experts)
        scores = F.softmax(self.router(flat), dim=-1).t()
        best, chosen = scores.topk(capacity, dim=1)
        index = chosen.reshape(-1)
        taken = flat.index_select(0, index).view(self.experts, capacity, -1)
        hidden = torch.bmm(taken, self.up)
        if self.gate is not None:
            hidden = F.silu(torch.bmm(taken, self.gate)) * hidden
        else:
            hidden = F.gelu(hidden)
        y = torch.bmm(hidden, self.down) * best.unsqueeze(-1)
        return torch.zeros_like(flat).index_add(0, index, y.view(-1, x.shape[-1])).view_as(x)
