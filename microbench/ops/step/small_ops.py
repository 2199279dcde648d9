"""Small ops of many kinds: run between two timed calls, and to average the cost of a launch."""

from __future__ import annotations

from collections.abc import Callable

from itercast.capture.base.slow_imports import torch


def small_ops(device: str) -> list[Callable[[], object]]:
    """Calls of some thirty kinds of ops on tensors of a few hundred elements."""
    functions = torch.nn.functional
    shapes = ((16, 32), (32, 32), (2, 16, 32), (1, 2, 8, 16))
    x, w, cube, heads = (torch.randn(*shape, device=device) for shape in shapes)
    index, mask = torch.arange(8, device=device), x > 0
    lists = [x.clone(), w.clone()]
    return [
        lambda: torch.addmm(w[0], x, w),
        lambda: torch.mm(x, w),
        lambda: torch.bmm(cube, cube.transpose(1, 2)),
        lambda: torch.softmax(x, -1),
        lambda: torch.log_softmax(x, -1),
        lambda: torch.layer_norm(x, (32,)),
        lambda: functions.gelu(x),
        lambda: functions.silu(x),
        lambda: torch.tanh(x),
        lambda: torch.sigmoid(x),
        lambda: torch.exp(x),
        lambda: torch.mul(x, x),
        lambda: torch.sub(x, x),
        lambda: torch.div(x, 2.0),
        lambda: torch.pow(x, 2),
        lambda: torch.cat((x, x)),
        lambda: torch.stack((x, x)),
        lambda: torch.sum(x, 0),
        lambda: torch.mean(x, -1),
        lambda: torch.max(x, -1),
        lambda: x.t().contiguous(),
        lambda: torch.index_select(x, 0, index),
        lambda: functions.embedding(index, w),
        lambda: torch.where(mask, x, x),
        lambda: torch.zeros_like(x),
        lambda: torch._foreach_mul(lists, 0.5),
        lambda: torch._foreach_sqrt(lists),
        lambda: functions.scaled_dot_product_attention(heads, heads, heads),
    ]
