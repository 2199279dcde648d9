"""Names of pointwise ops: which are swept, and which others cost the same."""

from __future__ import annotations

from collections.abc import Iterator

UNARY: tuple[str, ...] = ("neg", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "relu", "gelu")
UNARY += ("silu", "abs", "cos", "sin", "reciprocal", "floor", "erf", "elu", "softplus", "hardswish")
UNARY += ("mish", "log_sigmoid_forward", "logit", "clone", "empty_like", "zeros_like", "ones_like")
UNARY += ("_to_copy", "logical_not", "fill_", "zero_")
SCALAR: tuple[str, ...] = (
    "mul",
    "add",
    "pow",
    "pow_general",
    "eq",
    "mul_",
    "clamp_min",
    "remainder",
)
BINARY: tuple[str, ...] = ("add", "sub", "mul", "div", "add_", "mul_", "copy_", "maximum", "eq")
BINARY += ("threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "elu_backward")
BINARY += ("sigmoid_backward", "softplus_backward", "hardswish_backward", "mish_backward")
BINARY += ("log_sigmoid_backward", "lerp", "where", "masked_fill", "logical_and", "pow_general")
BINARY += ("atan2", "remainder", "logaddexp")
TERNARY: tuple[str, ...] = ("addcmul", "lerp")
TRANSPOSABLE: tuple[str, ...] = (
    "clone",
    "copy_",
    "add",
    "mul",
    "div",
    "threshold_backward",
    "gelu_backward",
)
BROADCAST: tuple[str, ...] = (
    "add",
    "mul",
    "sub",
    "div",
    "add_",
    "where",
    "masked_fill",
    "eq",
    "clone",
    "copy_",
)
COMMON: tuple[str, ...] = ("add", "mul", "add_", "mul_", "div", "copy_", "clone", "_to_copy")
COMMON += ("relu", "gelu", "silu", "tanh", "threshold_backward", "gelu_backward", "silu_backward")
COMMON += ("tanh_backward", "zeros_like", "ones_like", "empty_like", "where", "masked_fill", "pow")
FILLS: tuple[str, ...] = ("zeros_like", "ones_like", "fill_", "zero_")
WRITE_ONLY = (*FILLS, "copy_")
ALLOCATIONS = ("empty_like",)

# Ops by the swept op that costs the same: bound by memory or with the same instructions.
_GROUPS: dict[str, str] = {
    "eq": "ne lt gt ge le isnan isinf isfinite signbit eq_ ne_ lt_ gt_ ge_ le_",
    "add_": "sub_",
    "sub": "rsub",
    "mul_": "div_",  # division is no slower where memory is the limit
    "floor": "ceil trunc round frac sign sgn heaviside",
    "relu": "leaky_relu threshold softshrink hardshrink nan_to_num positive relu_",
    "clamp_min": "clamp clamp_max hardtanh",
    "hardswish": "hardsigmoid",
    "elu": "celu expm1",
    "exp": "exp2",
    "log": "log2 log10 log1p",
    "sin": "tan asin acos atan sinh cosh asinh acosh atanh sinc",
    "erf": "erfc erfinv lgamma digamma",
    "pow": "square",
    "threshold_backward": "leaky_relu_backward hardtanh_backward softshrink_backward "
    "_prelu_kernel hardshrink_backward",
    "hardswish_backward": "hardsigmoid_backward",
    "maximum": "minimum fmax fmin",
    "logical_and": "bitwise_and bitwise_or bitwise_xor logical_or logical_xor",
    "logical_not": "bitwise_not",
    "remainder": "fmod floor_divide __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift",
    "logaddexp": "logaddexp2 hypot xlogy",
    "addcmul": "addcdiv glu_backward _prelu_kernel_backward logit_backward",
    "silu": "glu",
    "zeros_like": "full_like full zeros ones arange linspace eye new_zeros new_ones new_full fill "
    "scalar_tensor",
    "empty_like": "empty new_empty new_empty_strided empty_strided _unsafe_view",
    "clone": "pixel_shuffle pixel_unshuffle",
}
SAME_AS = {other: name for name, others in _GROUPS.items() for other in others.split()}
_IN_PLACE = (
    "exp log sqrt rsqrt tanh sigmoid abs neg reciprocal floor ceil round clamp clamp_min "
    "clamp_max hardtanh leaky_relu elu silu hardswish hardsigmoid mish threshold pow erf "
    "masked_fill addcmul addcdiv lerp logical_and logical_or logical_not bitwise_and "
    "bitwise_or bitwise_not remainder fmod maximum square cos sin nan_to_num"
)
SAME_AS |= {f"{op}_": SAME_AS.get(op, op) for op in _IN_PLACE.split()}
# with a scalar instead of a second tensor
SCALAR_AS = {"sub": "add", "div": "mul", "add_": "mul_", "maximum": "clamp_min"}


def names() -> Iterator[str]:
    """Yields all pointwise ops of the tables in this file as captured names, with all overloads."""
    overloads: tuple[str, ...] = (
        "default",
        "Tensor",
        "Scalar",
        "self",
        "float",
        "Tensor_Scalar",
        "Tensor_Tensor",
    )
    overloads += ("Tensor_mode", "Scalar_mode", "Scalar_Tensor")
    for op in {*UNARY, *SCALAR, *BINARY, *TERNARY, *SAME_AS} - {"pow_general"}:
        for overload in overloads:
            yield f"aten.{op}.{overload}"
    yield from ("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.arange.start")
    yield from ("aten.empty.memory_format", "aten.arange.start_step", "aten.eye.m")


def canonical(op: str, overload: str, exponent: object) -> str:
    """The name of the swept op that costs the same as a captured one.

    Powers other than these are computed by logarithm and exponential:
    https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cpu/PowKernel.cpp
    """
    op = SAME_AS.get(op, op)
    if op != "pow" or exponent is None:
        return op
    if overload == "Tensor_Scalar" or overload == "Scalar":
        if exponent == 1:
            return "clone"
        if exponent in (2, 3, 0.5, -0.5, -1, -2):
            return "pow"
    return "pow_general"
