"""The rate in FLOP/s of a GPU's units that convolutions of NCHW images use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from itercast.capture.base.assumptions import assumed
from itercast.microbench.hardware.spec import Gpu
from itercast.microbench.ops.family import Numbers, Point, Values

FLOPS_PER_CLOCK: Mapping[str, float] = assumed(__file__, "flops_per_clock")
UNTRANSFORMED_SHARE: Mapping[str, float] = assumed(__file__, "untransformed_share")


def rate(p: Point, gpu: Gpu) -> Numbers:
    """The most FLOP/s that a roofline assumes: an A100's per SM and clock, of all SMs.

    Kernels for images in NCHW do not use the wider units that SMs have had since. Winograd's and
    Fourier transforms exceed it.
    """
    if gpu.kind == "cpu" or gpu.vendor != "nvidia":
        return np.inf
    per_clock = np.select(
        [np.equal(p.dtype, dtype) for dtype in FLOPS_PER_CLOCK], [*FLOPS_PER_CLOCK.values()], np.inf
    )
    return np.asarray(per_clock * gpu.sm_count * gpu.clock_hz)


def most_of_peak(p: Point, gpu: Gpu, of_products: Callable[[str], float]) -> Numbers:
    """The largest share of a GPU's peak that convolutions reach; infinite where transforms help.

    ``of_products``: FLOP/s that large products achieve on the GPU, by dtype. Of 79,000 published
    convolutions that no transform shortens, none ran above 92 % of its GPU's peak; 3 x 3 ones of
    stride 1 reach 2.5 times the peak in fp32.
    """
    in_fp32 = 1.0
    if gpu.architecture in UNTRANSFORMED_SHARE:
        in_fp32 = UNTRANSFORMED_SHARE[gpu.architecture] * of_products("fp32") / gpu.peak("fp32")
    share = np.where(np.equal(p.dtype, "fp32"), in_fp32, 1.0)
    return np.where(_untransformed(p), share, np.inf)


def _untransformed(p: Point) -> Values:
    """Mask of convolutions that no transform shortens: of one tap, with a stride or dilated."""
    one_tap = np.equal(p.kernel_d * p.kernel_h * p.kernel_w, 1)
    return one_tap | np.greater(p.stride, 1) | np.greater(p.dilation, 1)
