"""What is known of tensors without data, and what follows for comparisons of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf
from typing import Any

import torch

KNOWN_LIMIT = 2**17  # elements of a tensor whose values are followed one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is known of a tensor's elements.

    ``mean``: the value expected of each (masks and counts). ``top``: they are uniform over
    0..top (indices, running counts; tokens up to infinity). ``values``: a real tensor of the shape.
    """

    mean: float | None = None
    top: float | None = None
    values: Any = None


def worth_following(tensor: Any) -> bool:
    """Whether these are integers or a mask, and few enough."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= KNOWN_LIMIT


def flat(values: Any) -> list[Any]:
    """Values with their lists taken apart, one level deep."""
    return [one for v in values for one in (v if isinstance(v, list | tuple) else [v])]


def finite(name: str, args: Any) -> float | None:
    """The share of finite numbers of which a look for infinite ones, or none, is true."""
    if name in ("isnan", "isinf"):
        return 0.0
    if name not in ("eq", "ne"):
        return None
    same = args[1] is args[0]
    infinite = isinstance(args[1], float) and isinf(args[1])
    return float((name == "eq") == same) if same or infinite else None


def is_mask(value: Any) -> bool:
    """Whether this chooses elements, of indexed tensors."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def is_number(value: Any, number: int) -> bool:
    """Whether this is that number, and no tensor."""
    return isinstance(value, int | float) and value == number


def index_axis(name: str, args: Any, kwargs: Any) -> int | None:
    """The axis that an index runs over; None where max and min reduce everything."""
    place = {"topk": 2, "sort": 1}.get(name, 1)
    default = {"topk": -1, "sort": -1}.get(name)
    found = kwargs.get("dim", args[place] if len(args) > place else default)
    return found if isinstance(found, int) else None


def compared(
    name: str, known: Fact | None, other: Any, second: Fact | None, args: Any
) -> Fact | None:
    """The fact of a comparison or of masks combined; None where nothing follows."""
    if known is None:
        return None
    if known.top:
        share = min(1.0, float(other) / known.top) if isinstance(other, int | float) else None
        shares = {"eq": 1 / known.top, "ne": 1 - 1 / known.top}
        if share is not None:
            shares |= {"le": share, "lt": share, "gt": 1 - share, "ge": 1 - share}
        if name == "cumsum" or name not in shares:
            return None
        return Fact(mean=shares[name])
    if known.mean is None:
        return None
    if name == "cumsum":
        return Fact(top=known.mean * args[0].shape[args[1]])
    if name == "eq" and args[0].dim() == 0 and isinstance(other, int | float):
        return Fact(mean=float(known.mean == other))  # a sum: whether all are
    if name in ("gt", "ne") and is_number(other, 0):
        return Fact(mean=min(1.0, known.mean))
    if name in ("logical_not", "bitwise_not"):
        return Fact(mean=1 - known.mean)
    if name in ("mul", "bitwise_and", "logical_and") and second is not None and second.mean:
        return Fact(mean=known.mean * second.mean)
    return None
