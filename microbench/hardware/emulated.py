"""What a script's ``torch.cuda`` says of a GPU that is not there."""

from __future__ import annotations

from itercast.capture.programs.gpus.asked import EmulatedGpu
from itercast.microbench.hardware.spec import COMPUTE_CAPABILITY, Gpu


def emulated(gpu: Gpu) -> EmulatedGpu:
    """The facts that programs can ask; of an architecture we don't know, those of Hopper."""
    return EmulatedGpu(
        name=gpu.name,
        kind=gpu.kind,
        memory_bytes=int(gpu.hbm_bytes),
        sm_count=int(gpu.sm_count),
        compute_capability=COMPUTE_CAPABILITY.get(gpu.architecture, (9, 0)),
    )
