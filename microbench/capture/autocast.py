"""Automatic mixed precision as on CUDA, while a step is captured on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# what runs in fp32, and what takes fp32 as its dtype where none is given: ATen/autocast_mode.h
IN_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow __pow__
    __rpow__ __rdiv__ __rtruediv__ softplus layer_norm native_layer_norm rms_norm group_norm norm
    interpolate logsumexp cosine_similarity dist pdist cdist renorm cross_entropy nll_loss l1_loss
    smooth_l1_loss huber_loss mse_loss kl_div binary_cross_entropy_with_logits poisson_nll_loss
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss
"""
TO_FP32 = "softmax log_softmax prod sum cumsum cumprod vector_norm"
HOMES = (torch, torch.Tensor, torch.nn.functional, torch.linalg)
HALF = (torch.float16, torch.bfloat16)
ATTENTION = torch.nn.functional.scaled_dot_product_attention


def _named(names: str) -> frozenset[Any]:
    """The functions of these names, wherever torch has them."""
    homes = [(home, name) for home in HOMES for name in names.split() if hasattr(home, name)]
    return frozenset(getattr(home, name) for home, name in homes)


class _OnCuda(TorchFunctionMode):
    """Ops that CUDA's autocast runs in fp32 and the CPU's does not; attention, logged before it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.wide, self.told = dtype, _named(IN_FP32), _named(TO_FP32)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self.wide:
            args = tuple(map(_wide, args))
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        elif func is ATTENTION:
            args = tuple(map(self._narrow, args))
            kwargs = {name: self._narrow(value) for name, value in kwargs.items()}
        elif func in self.told and _is_half(args[0] if args else kwargs.get("input")):
            stated = any(isinstance(a, torch.dtype) for a in (*args, kwargs.get("dtype")))
            kwargs |= {} if stated else {"dtype": torch.float32}
        return func(*args, **kwargs)

    def _narrow(self, value: Any) -> Any:
        wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self.dtype) if wide else value


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _wide(value: Any) -> Any:
    return value.float() if _is_half(value) else value


@contextmanager
def autocast_as_on_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Inside, products and convolutions take ``dtype``, norms and losses fp32.

    A weight is cast once, and again after the context was left.
    """
    with torch.autocast("cpu", dtype=dtype), _OnCuda(dtype):
        yield
