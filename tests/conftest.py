"""What tests share: the same draws in every run, and a small GPT's step, captured once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from plan_case import capture_at

from microbench.opcall import StepCapture


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Weights, tokens and dropped layers of a real run come out alike every time."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def gpt() -> StepCapture:
    """Two layers, four heads, four sequences of 64 tokens."""
    return capture_at(4, 64)
