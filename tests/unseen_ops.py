"""A toy GPU and models of a few ops, for tests of the fallbacks of all others."""

from collections.abc import Mapping
from typing import Any

from plan_case import Fixed

from itercast.learners.family_model import FamilyModel
from itercast.learners.features.host_calls import HostCalls
from itercast.learners.features.table import Encoder
from itercast.learners.models.ensemble import Ensemble
from itercast.learners.transfer.query_rows import EQUAL_SPEED_DTYPE
from itercast.learners.transfer.source_gpus import SourceGpus
from itercast.microbench.hardware.spec import Gpu

GPU = Gpu(
    name="toy", contention=1.0, sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12
)


def learned(
    *ops: str,
    dtype: str = "fp32",
    gpu: Gpu = GPU,
    stack: str = "torch-2.11.0",
    calls: HostCalls | None = None,
) -> FamilyModel:
    """A model of a family whose rows are of these ops on one GPU, in one dtype, of one software."""
    vocabulary = {"op": list(ops), "dtype": [dtype]}
    encoder = Encoder(["op", "dtype"], vocabulary)
    measured = {gpu.name: {EQUAL_SPEED_DTYPE.get(dtype, dtype): {op: [stack] for op in ops}}}
    return FamilyModel(
        ensemble=Ensemble(trees=None),
        encoder=encoder,
        source_gpus=SourceGpus(encoder=encoder, measured=measured, gpus={gpu.name: gpu}),
        host_calls=calls or {},
    )


MODELS: Mapping[str, Any] = {
    "gemm": learned("mm", dtype="bf16"),
    "elementwise": learned("mul"),
    "conv": learned("forward"),
    "norm": learned("layer"),
    "reduction": learned("_softmax"),
}


class OfFew(Fixed):
    """Knows these ops alone."""

    models = MODELS
