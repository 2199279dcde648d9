"""Finds the ops that price an op which no model has seen on a device (its fallback).

Each family says so itself (``Family.fallback``); this module decides what counts as seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from itercast.capture.base.switches import is_on
from itercast.learners.family_model import FamilyModel
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.hardware.stack import USUAL, software_name
from itercast.microbench.ops import families, family_of
from itercast.microbench.ops.family import Part, Point

Models = Mapping[str, FamilyModel | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """Tells a family's fallback what was measured (``itercast.microbench.ops.family.Measured``).

    ``stack`` is the software that is forecast; ``channels_last``: images are NHWC in memory.
    """

    models: Models
    gpu: Gpu
    channels_last: bool
    stack: str

    def has_model(self, family: str) -> bool:
        """Whether the family has a model learned from rows."""
        return self.models.get(family) is not None

    def seen(self, family: str, op: str, dtype: str) -> bool:
        """Whether rows of this GPU, or of close enough others, have this op in this dtype."""
        model = self.models.get(family)
        return model is not None and bool(model.covers(self.gpu, op, dtype))

    def measured_here(self, family: str, op: str, dtype: str) -> bool:
        """Whether this very GPU has rows of this op in this dtype."""
        model = self.models.get(family)
        return model is not None and bool(model.has_measured(self.gpu, op, dtype))

    def largest(self, family: str, feature: str) -> float:
        """The largest value of a feature in a family's rows; infinite if unknown, 0 without any."""
        model = self.models.get(family)
        return 0.0 if model is None else model.envelope.get(feature, (0.0, math.inf))[1]

    def software_shares(self, family: str, op: str, dtype: str) -> Mapping[str, float]:
        """Weight of each software (torch, vllm...) whose rows forecast this op on this GPU."""
        model, shares = self.models.get(family), defaultdict[str, float](float)
        if model is not None:
            own_family = families()[family]
            stacks = model.stack_shares(self.gpu, op, dtype, self.stack, own_family)
            for stack, share in stacks.items():
                shares[software_name(stack)] += share
        return shares


def fallback_parts(
    params: Point, models: Models, channels_last: bool, gpu: Gpu, stack: str = USUAL
) -> list[Part]:
    """The ops that price an op; empty where its own model can price it on this GPU.

    Also empty if one of these ops' families has no model learned from rows.
    """
    family = family_of(params)
    if family is None or family.fallback is None or not is_on("fallbacks"):
        return []
    rows = MeasuredRows(models=models, gpu=gpu, channels_last=channels_last, stack=stack)
    parts = list(family.fallback(params, rows))
    return parts if all(rows.has_model(part.family) for part in parts) else []
