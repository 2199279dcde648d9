"""Rules that correct forecasts, by name: each can be switched off, to see what it buys.

    with switching_off("power_limit"):
        ...  # processes started in here forecast without the rule

``make ablate`` switches them off one by one, and assumed numbers as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SWITCHED_OFF = "ITERCAST_SWITCHED_OFF"  # environment variable: the name of a rule or number
RULES: Mapping[str, str] = {
    "peak_rate": "GeForce cards halve the peak of products; strided convolutions do not pass it",
    "attention_kernels": "attention takes as long as the kernel that the software runs",
    "power_limit": "products in long steps run at the clock that the power limit leaves",
    "cache_reuse": "what was touched a moment ago is read from the cache",
    "fallbacks": "an op without rows is priced as other ops",
}


def is_on(rule: str) -> bool:
    """Whether a rule of ``RULES`` applies; ValueError for another name."""
    if rule not in RULES:
        raise ValueError(f"unknown rule {rule!r}; known: {sorted(RULES)}")
    return switched_off() != rule


def switched_off() -> str:
    """The rule or number (as "module.name") that forecasts of this process go without, or ''."""
    return os.environ.get(SWITCHED_OFF, "")


@contextmanager
def switching_off(name: str) -> Iterator[None]:
    """Switch off a rule or number in processes that are started inside; '' switches off none."""
    with environment(SWITCHED_OFF, name):
        yield


def start_with(variables: Mapping[str, str]) -> None:
    """Replace this process's environment, before it imports modules that read their switches."""
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def environment(variable: str, value: str) -> Iterator[None]:
    """Set an environment variable inside, and put back what was there."""
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
