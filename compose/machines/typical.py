"""How machines differ: spreads of their factors, fitted over sources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from itercast.capture.base.assumptions import LEAVE_OUT
from itercast.capture.base.yaml_text import facts_of
from itercast.compose.machines.factors import NAMES
from itercast.compose.machines.state import Machine, Spread

REST = ("model", "row", "deviates")


@cache
def typical() -> Machine:
    """A machine of which nothing is known, with the spread between the machines of all sources.

    In a process that leaves a source out: of all other sources
    (``itercast.capture.base.assumptions.leaving_out``).
    """
    facts = facts_of(__file__)
    left_out = os.environ.get(LEAVE_OUT, "").casefold()
    return Machine.new(spread_of(facts["without"].get(left_out, facts["all"])))


def spread_of(facts: Mapping[str, Any]) -> Spread:
    """The spreads that typical.yaml or a machine file states, by the names of factors and REST."""
    spread = tuple(float(facts[name]) for name in NAMES)
    return Spread(spread=spread, **{name: facts[name] for name in REST})


def stated(spread: Spread) -> dict[str, Any]:
    """Spreads as ``spread_of`` reads them."""
    factors = dict(zip(NAMES, spread.spread, strict=True))
    return factors | {name: getattr(spread, name) for name in REST}
