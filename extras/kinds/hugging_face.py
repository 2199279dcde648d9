"""Small models of transformers as a kind of cases: random weights, sizes from kind_cases.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from itercast.capture.cases.evalcase import EvalCase
from itercast.capture.cases.external.huggingface import HfConfig, case_of
from itercast.capture.cases.kinds import Sizes
from itercast.capture.step import Inputs


def model(architecture: str, **config: Any) -> Any:
    """The model of a class of transformers, with values of its configuration."""
    return _case(architecture, config).build()


def inputs(batch: int, seq: int, sizes: Sizes) -> Inputs:
    """A full batch with labels; ``sizes``: the class as architecture, and its configuration."""
    config = {name: value for name, value in sizes.items() if name != "architecture"}
    return _case(sizes["architecture"], config).inputs(batch, seq)


def _case(architecture: str, config: dict[str, Any]) -> EvalCase:
    read = HfConfig(
        path=Path(architecture), values=config, architecture=architecture, of_timm=False, digest=""
    )
    return case_of(read, "sdpa")
