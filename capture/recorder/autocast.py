"""Makes autocast treat ops as on CUDA while a step is captured on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from itercast.capture.opcall import Args, Argument

# Ops that run in fp32; below, ops that take fp32 as their dtype if none is given. Source:
# https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/autocast_mode.h
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
AUTOCAST = torch.autocast  # scripts are given another one


def _named(names: str) -> frozenset[Any]:
    """The functions of these names in torch, Tensor, nn.functional and linalg."""
    homes = [(home, name) for home in HOMES for name in names.split() if hasattr(home, name)]
    return frozenset(getattr(home, name) for home, name in homes)


class _OnCuda(TorchFunctionMode):
    """Casts the inputs of ops that autocast treats differently on CUDA than on the CPU.

    Attention takes the low-precision dtype here, because it is logged before autocast sees it.
    Where autocast is switched off meanwhile, nothing is cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.in_fp32, self.to_fp32 = _named(IN_FP32), _named(TO_FP32)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Args = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Argument:
        """Run a function of torch on inputs that are cast as CUDA's autocast casts them."""
        kwargs = dict(kwargs or {})
        if not torch.is_autocast_enabled("cuda"):
            return func(*args, **kwargs)
        if func in self.in_fp32:
            args = tuple(map(_to_fp32, args))
            kwargs = {name: _to_fp32(value) for name, value in kwargs.items()}
        elif func is ATTENTION:
            args = tuple(map(_to_low, args))
            kwargs = {name: _to_low(value) for name, value in kwargs.items()}
        elif func in self.to_fp32 and _is_half(args[0] if args else kwargs.get("input")):
            stated = any(isinstance(a, torch.dtype) for a in (*args, kwargs.get("dtype")))
            kwargs |= {} if stated else {"dtype": torch.float32}
        return func(*args, **kwargs)


def _is_half(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor in fp16 or bf16."""
    return isinstance(value, torch.Tensor) and value.dtype in HALF


def _to_fp32(value: Argument) -> Argument:
    """A tensor in 16 bits cast to fp32; other values as they are."""
    return value.float() if _is_half(value) else value


def _to_low(value: Argument) -> Argument:
    """A tensor in fp32 cast to autocast's dtype; other values as they are."""
    wide = isinstance(value, torch.Tensor) and value.dtype == torch.float32
    return value.to(torch.get_autocast_dtype("cuda")) if wide else value


@contextmanager
def autocast_as_on_cuda(dtype: torch.dtype, enabled: bool = True) -> Iterator[None]:
    """Autocast to ``dtype`` inside the context as CUDA does: products in it, norms in fp32.

    A weight is cast once per context. Torch is told that autocast is on for CUDA:
    ``torch.utils.checkpoint`` asks it, and switches it on again where it recomputes.
    """
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with AUTOCAST("cpu", dtype=dtype, enabled=enabled), _OnCuda():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def in_tf32(operator: str) -> bool:
    """Whether torch's flags allow TF32 in an operator, "matmul", "conv" or "rnn".

    By torch's defaults it is allowed in conv and rnn.
    """
    return str(torch._C._get_fp32_precision_getter("cuda", operator)) == "tf32"
