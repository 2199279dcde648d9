"""Calls of ops for tests: described without data, or logged as they run."""

from collections.abc import Callable
from typing import Any

from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.capture.recorder.log import OpLog
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops import find_family

TOY = Gpu(name="toy", sm_count=4, peak_flops_per_s={"fp32": 1e12})


def spec(*shape: int, stride: tuple[int, ...] = ()) -> TensorSpec:
    """A tensor of fp32 numbers."""
    return TensorSpec(shape=shape, dtype="fp32", stride=stride)


def logged(run: Callable[[], object]) -> list[OpCall]:
    """The calls that reach the dispatcher."""
    log = OpLog()
    with log:
        run()
    return log.calls


def described(run: Callable[[], object]) -> list[Any]:
    """What the families read out of these calls."""
    return [find_family(call)[1] for call in logged(run)]


def sequence(step: StepCapture) -> list[Any]:
    """All that the calls of a step say but storage numbers."""
    return [
        (c.op, c.phase, [(t.shape, t.dtype, t.stride, t.layout, t.nnz) for t in tensors])
        for c in step.calls
        for tensors in [(*c.tensors(), *c.outputs)]
    ]
