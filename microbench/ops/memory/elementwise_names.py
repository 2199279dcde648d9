"""Names of pointwise ops: which are swept, and which others cost the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from itercast.capture.base.yaml_text import facts_of

FACTS = facts_of(__file__)
UNARY, SCALAR, BINARY, TERNARY, TRANSPOSABLE, BROADCAST, COMMON, FILLS = (
    tuple[str, ...](FACTS[form].split())
    for form in (
        *("unary", "scalar", "binary", "ternary"),
        *("transposable", "broadcast", "common", "fills"),
    )
)
WRITE_ONLY = (*FILLS, "copy_")
ALLOCATIONS = ("empty_like",)

SAME_AS = {other: name for name, some in FACTS["costs_as"].items() for other in some.split()}
SAME_AS |= {f"{op}_": SAME_AS.get(op, op) for op in FACTS["in_place"].split()}
SCALAR_AS: Mapping[str, str] = FACTS["scalar_as"]


def names() -> Iterator[str]:
    """Yields all pointwise ops of the tables in this file as captured names, with all overloads."""
    for op in {*UNARY, *SCALAR, *BINARY, *TERNARY, *SAME_AS} - {"pow_general"}:
        for overload in FACTS["overloads"].split():
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
