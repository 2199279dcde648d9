"""A small GPT's step, captured once."""

from __future__ import annotations

import pytest
from plan_case import capture_at

from microbench.opcall import StepCapture


@pytest.fixture(scope="session")
def gpt() -> StepCapture:
    """Two layers, four heads, four sequences of 64 tokens."""
    return capture_at(4, 64)
