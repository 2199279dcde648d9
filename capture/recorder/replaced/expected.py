"""Expected values of counts and masks, from the expected values of what they are made of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.opcall import Args
from itercast.capture.recorder.facts import AND, Fact, is_number


def expected(name: str, args: Args, facts: Sequence[Fact | None]) -> Fact | None:
    """The expected mean of a product of masks, or of counts that are scattered or masked to zero.

    ``facts``: about ``args``. Masking keeps at most what was there; unknown counts begin at zero.
    An unknown number equals exactly one of the distinct values that it is compared with, as where a
    noise schedule is searched for a sample's step.
    """
    name = name.removesuffix("_")
    if name == "eq" and isinstance(args[1], Tensor) and args[1].numel() == 1:
        return Fact(mean=1 / args[0].numel(), guessed=True) if _are_unlike(facts[0]) else None
    if name in AND and (first := _mean(facts[0])) is not None:
        second, guessed = _mean(facts[1]), any(fact is not None and fact.guessed for fact in facts)
        return None if second is None else Fact(mean=first * second, guessed=guessed)
    if name == "masked_fill" and is_number(args[2], 0):
        return Fact(mean=_mean(facts[0]))
    if name not in ("scatter", "scatter_add"):
        return None
    written, before = 1.0 if is_number(args[3], 1) else _mean(facts[3]), _mean(facts[0])
    if written is None or (before is None and args[0].is_floating_point() and written != 1):
        return None
    share = args[2].numel() / max(1, args[0].numel())
    return Fact(mean=written * share + (before or 0.0) * (name == "scatter_add"))


def _mean(fact: Fact | None) -> float | None:
    """The mean of a tensor, if it is known."""
    if fact is None or fact.values is None:
        return None if fact is None else fact.mean
    with _disable_current_modes():
        return float(fact.values.double().mean())


def _are_unlike(fact: Fact | None) -> bool:
    """Whether a tensor's values are known, and all different."""
    if fact is None or fact.values is None:
        return False
    with _disable_current_modes():
        return len(fact.values.unique()) == fact.values.numel() > 1
