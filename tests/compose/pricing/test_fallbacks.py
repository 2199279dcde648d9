"""Which ops are priced in place of those that no model has seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from unseen_ops import GPU, MODELS, learned

from itercast.capture.opcall import OpCall
from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import Priceable, priceable
from itercast.learners.bundle import SHIPPED, Bundle
from itercast.microbench.hardware.spec import Gpu, load_gpu
from itercast.microbench.ops import family_of
from itercast.microbench.ops.family import Part, itemsize_bytes
from itercast.microbench.ops.lookup.embedding import Embedding
from itercast.microbench.ops.lookup.index_calls import IndexOp
from itercast.microbench.ops.matrix.conv import Conv, pixels
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.matrix.recurrent import CALL as NETWORK
from itercast.microbench.ops.matrix.recurrent import Recurrent
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.fused import Fused
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.ops.memory.pooling import Pooling
from itercast.microbench.ops.memory.reduction import Reduction


def convolution(**changed: Any) -> Conv:
    facts = {"op": "forward", "batch": 2, "in_channels": 16, "out_channels": 32, "h": 8, "w": 8}
    facts |= {"kernel_h": 3, "kernel_w": 3, "padding_h": 1, "padding_w": 1, "dtype": "fp16"}
    return Conv(**{**facts, **changed})


def test_a_half_precision_convolution_is_a_product_and_two_turned_tensors() -> None:
    """2*8*8 pixels, 32 channels, 16*9 taps; nine taps read a pixel, so m is 128 // 9, n 9 * 32.

    x and y are read and written in 2 bytes an element.
    """
    product, turned = fallback_parts(convolution(), MODELS, False, GPU)
    assert (product.params.m, product.params.n, product.params.k) == (14, 288, 144)
    assert turned == memory_copy(2 * (2 * 64 * 16 + 2 * 64 * 32) * 2)
    (alone,) = fallback_parts(convolution(), MODELS, True, GPU)
    assert alone == product
    deep = convolution(dtype="tf32", in_channels=1024, out_channels=1024)
    _, wider = fallback_parts(deep, MODELS, False, load_gpu("h100-sxm-80gb"))
    assert wider == memory_copy(2 * (2 * 64 * 1024 + 2 * 64 * 1024) * 4)


def test_tf32_leaves_thin_convolutions_to_cuda_cores_that_need_no_transposes() -> None:
    """8 to 8 channels of nine taps, 16*1024*1024 pixels: 19 GFLOP, 1.1 GB; as on an A100,
    CUDA cores at 20 TFLOP/s take 1.0 ms; tensor cores 0.5 ms for the bytes, and 1.1 for the
    transposes. With 512 channels, 14x14 pixels, transposes take 0.2 of 1.8 ms.
    """
    a100 = replace(GPU, peak_flops_per_s={"fp32": 2e13, "tf32": 1.5e14}, hbm_bytes_per_s=2e12)
    thin = convolution(batch=16, h=1024, w=1024, in_channels=8, out_channels=8, dtype="tf32")
    for op, forwards in (("forward", 1), ("backward", 2)):
        (found,) = fallback_parts(replace(thin, op=op), MODELS, False, a100)
        assert found.params == replace(thin, dtype="fp32")
        assert found.times == pytest.approx(forwards)
    wide = convolution(batch=256, h=14, w=14, in_channels=512, out_channels=512, dtype="tf32")
    for channels_last, params in (
        (True, thin),
        (False, wide),
        (False, replace(thin, transposed=True)),
    ):
        product = fallback_parts(params, MODELS, channels_last, a100)[0]
        assert product.family == "gemm"


def test_a_convolution_over_volumes_is_its_product_and_two_transposes() -> None:
    """27 taps of 16 channels; the bytes are those of 2*4*8*8 pixels of 16 and of 32 channels."""
    volume = {"depth": 4, "kernel_d": 3, "padding_d": 1}
    product, turned = fallback_parts(convolution(**volume), MODELS, False, GPU)
    assert (product.params.k, product.times) == (16 * 27, 1)
    assert turned == memory_copy(2 * (2 * 256 * 16 + 2 * 256 * 32) * 2)
    known = fallback_parts(convolution(dtype="fp32", **volume), MODELS, False, GPU)
    assert known[0].family == "gemm"  # rows of images say nothing of volumes


GROWS_US = 30.0


@pytest.mark.parametrize("op", ["index", "index_select", "index_add_", "scatter_add_", "fused"])
@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm-80gb"])
def test_times_grow_with_rows_and_bytes(op: str, gpu: str) -> None:
    """By the bundle that ships; fp32 is not faster than bf16, nor a row that is read again.

    Look-ups that take less than GROWS_US are learned from few rows, and may dip; few rows of an
    index_add_ do so in truth, as their sums wait for each other.
    """
    book = PriceBook(Bundle.load(SHIPPED), load_gpu(gpu), 0)

    def us(rows: int, width: int, dtype: str, again: int = 0) -> float:
        params: Any = IndexOp(op=op, outer=1, size=rows, inner=width, source=rows, dtype=dtype)
        if op == "fused":
            size = rows * width * int(itemsize_bytes(dtype))
            sizes = {"read_bytes": size, "written_bytes": size, "again_bytes": again * size}
            row = 2**20 * again
            params = Fused(ops=3, numel=rows * width, row_bytes=row, dtype=dtype, **sizes)
        wanted = Priceable(
            op=op, phase="forward", family=family_of(params), params=params, bytes_moved=0, cold=1.0
        )
        return book.price([wanted])[0].duration_us

    for dtype in ("bf16", "fp32"):
        by_rows = [us(4**n, 2048, dtype) for n in range(2, 9)]
        by_width = [us(4096, 4**n, dtype) for n in range(2, 7)]
        for times in (by_rows, by_width):
            grown = np.maximum(times, GROWS_US)
            assert (np.diff(grown) >= 0).all(), times
    for n in range(2, 9):
        in_16_bit, once, twice = us(4**n, 2048, "bf16"), us(4**n, 2048, "fp32"), 0.0
        twice = us(4**n, 2048, "fp32", 1)
        assert in_16_bit <= 1.25 * max(once, GROWS_US) and once <= twice * (1 + 1e-9)


def test_a_pooling_computes_a_window_for_each_output() -> None:
    """Of 3 * 4 * 4 outputs with 9 taps each takes 0.7 + 9 * 0.15 clocks of one of 8 SMs."""
    sizes: dict[str, Any] = {"batch": 1, "channels": 3, "h": 8, "w": 8, "out_h": 4, "out_w": 4}
    pool = Pooling(op="avg_pool2d", kernel_h=3, kernel_w=3, **sizes)
    (found,) = fallback_parts(pool, MODELS, False, GPU)
    bytes_s = 3 * (64 + 16) * 4 / 1e12
    assert replace(found, times=1) == memory_copy(3 * (64 + 16) * 4)
    busy_s = 48 * (0.7 + 9 * 0.15) / (8 * GPU.clock_hz)
    assert found.times == pytest.approx((bytes_s + busy_s) / bytes_s)


@pytest.mark.parametrize(
    ("facts", "forwards"),
    [
        ({}, 2.0),  # 3 x 3 at stride 1: each gradient takes a forward
        ({"stride": 2}, 1.7 + 1.0),
        ({"kernel_h": 1, "kernel_w": 1, "padding_h": 0, "padding_w": 0}, 1.0 + 1.4),
        ({"kernel_h": 1, "kernel_w": 1, "padding_h": 0, "padding_w": 0, "stride": 2}, 1.7 + 1.4),
        ({"stride": 2, "need_weight_grad": False}, 1.7),
        ({"stride": 2, "need_input_grad": False}, 1.0),
        ({"stride": 2, "transposed": True}, 2.0),  # its input's gradient reads what is strided
    ],
)
def test_gradients_of_a_convolution_take_longer_than_its_forward(
    facts: dict[str, Any], forwards: float
) -> None:
    """The input's where a stride leaves gaps, the weights' of one tap; both are products alone.

    Tensors are turned as often as there are gradients: x and y, read and written, in 2 bytes.
    """
    forward = convolution(**facts)
    back = replace(forward, op="backward")
    product, turned = fallback_parts(back, MODELS, False, GPU)
    assert product.params == fallback_parts(forward, MODELS, False, GPU)[0].params
    assert product.times == pytest.approx(forwards)
    y = pixels(forward)[1]
    gradients = back.need_input_grad + back.need_weight_grad
    assert turned == memory_copy(2 * gradients * (2 * 64 * 16 + int(y) * 32) * 2)


def test_a_strided_pointwise_convolution_is_no_wider_than_its_channels() -> None:
    """A quarter of the pixels is read: 2*4*4 rows, 32 channels, 16 taps."""
    facts = {"kernel_h": 1, "kernel_w": 1, "padding_h": 0, "padding_w": 0, "stride": 2}
    product = fallback_parts(convolution(**facts), MODELS, True, GPU)[0].params
    assert (product.m, product.n, product.k) == (32, 32, 16)


def test_a_grouped_convolution_passes_over_its_tensors_more_often() -> None:
    """4 channels of 9 taps in a group: 1 + sqrt(36 / 9) passes; nobody measured groups in fp32."""
    (found,) = fallback_parts(convolution(groups=4), MODELS, True, GPU)
    assert replace(found, times=1) == memory_copy((2 * 64 * 16 + 2 * 64 * 32) * 2)
    assert found.times == 3
    (found,) = fallback_parts(
        convolution(groups=4, dtype="fp32", op="backward"), MODELS, False, GPU
    )
    assert found.times == 6
    seen = {**MODELS, "conv": learned("forward", "forward in groups")}
    assert fallback_parts(convolution(groups=4, dtype="fp32"), seen, True, GPU) == []


def test_depthwise_convolutions_of_torch_compute_windows() -> None:
    """2 images of 32 channels, 8x8 pixels: 4096 numbers; 7x7 taps leave 4x4, 1024 of them.

    Each output costs 0.7 clocks and 0.15 a tap of one of 8 SMs; the gradient of the weights reads
    everything once per tap. What cuDNN runs passes 1 + sqrt(taps / 9) times instead.
    """
    wide = {"in_channels": 32, "groups": 32, "kernel_h": 7, "kernel_w": 7, "op": "backward"}

    def times(channels_last: bool = False, **changed: Any) -> float:
        (found,) = fallback_parts(convolution(**{**wide, **changed}), MODELS, channels_last, GPU)
        return found.times

    def window(outputs: int, taps: int, moved: int) -> float:
        return 1 + outputs * (0.7 + 0.15 * taps) / (8 * GPU.clock_hz) * 1e12 / moved

    once = 1 + 7 / 3
    both = (4096 + 1024) * 2
    assert times(op="forward") == pytest.approx(window(1024, 49, both))
    assert times() == pytest.approx(window(4096, 49, both) + 49)
    assert times(need_weight_grad=False) == pytest.approx(window(4096, 49, both))
    assert times(channels_last=True) == 2 * once  # of cuDNN
    small = {"kernel_h": 3, "kernel_w": 3}
    assert times(**small) == 4  # of cuDNN too
    assert times(kernel_h=5, kernel_w=5) == 2 * (1 + 5 / 3)
    assert times(**small, stride=2) == pytest.approx(window(4096, 9, both) + 9)
    assert times(**small, dtype="fp32") == pytest.approx(window(4096, 9, 2 * 4096 * 4) + 9)
    assert times(groups=8) == 2 * (1 + 14 / 3)  # four channels a group


def test_few_or_wide_groups_are_summed_slowly_in_nhwc() -> None:
    """Backward passes of 64 channels of 9 taps: 2 * (1 + sqrt(64)); 2 * 576 / 5 in NHWC."""

    def passes(channels_last: bool, channels: int, groups: int) -> float:
        facts = {"in_channels": channels, "out_channels": channels, "groups": groups}
        params = convolution(op="backward", **facts)
        return fallback_parts(params, MODELS, channels_last, GPU)[0].times

    assert passes(False, 256, 4) == 2 * (1 + 8)
    assert passes(True, 256, 4) == passes(True, 2048, 32) == 2 * 576 / 5
    assert passes(True, 256, 32) == 2 * (1 + 8**0.5)  # 32 groups of 8


def test_a_backward_in_a_known_dtype_is_two_forwards() -> None:
    known = convolution(dtype="fp32")
    assert fallback_parts(known, MODELS, False, GPU) == []
    (found,) = fallback_parts(convolution(dtype="fp32", op="backward"), MODELS, False, GPU)
    assert (found.params, found.times) == (known, 2)


THIN = Gemm(op="mm", m=64, n=1, k=1000, dtype="fp32")
NORM = Norm(op="batch", rows=2, cols=64, channels=16)
LOOKUP = Embedding(op="backward", rows=5, dim=4, lookups=3)
LOOKED_UP = {**MODELS, "embedding": learned("forward")}
BATCHED = {**MODELS, "norm": learned("batch")}
TOTAL = Reduction(op="sum", outer=64, size=1000)
COPIES: list[tuple[Any, Any, bool, list[float]]] = [  # and bytes that a copy in its place moves
    (THIN, MODELS, False, [(64 * 1000 + 1000 + 64) * 4]),  # a pass over the matrix
    (replace(THIN, n=2), MODELS, False, []),
    (NORM, MODELS, True, [3 * 2 * 64 * 16 * 4]),  # three passes
    (NORM, BATCHED, True, [3 * 2 * 64 * 16 * 4]),  # rows are of NCHW
    (NORM, BATCHED, False, []),
    (replace(NORM, channels=128), MODELS, False, [3 * 2 * 64 * 128 * 4]),
    # 25 blocks of 8 GB/s read a fifth of 1 TB/s: each pass over statistics takes five times
    (replace(NORM, channels=25), MODELS, False, [(2 + 5) * 2 * 64 * 25 * 4]),
    (replace(NORM, op="batch_backward", channels=25), MODELS, False, [13 * 2 * 64 * 25 * 4]),
    (replace(NORM, op="batch_eval", channels=25), MODELS, False, [2 * 2 * 64 * 25 * 4]),
    (Norm(op="layer", rows=2, cols=64), MODELS, False, []),  # known
    (Norm(op="layer_backward", rows=2, cols=64), MODELS, False, [8 * 2 * 64 * 4]),
    # 3 look-ups read and written, 5 rows zeroed, of 4 numbers of 4 bytes; indices of 8 bytes
    (LOOKUP, MODELS, False, [(2 * 3 + 5) * 4 * 4 + 8 * 3]),
    (LOOKUP, LOOKED_UP, False, [(2 * 3 + 5) * 4 * 4 + 8 * 3]),
    (replace(LOOKUP, op="forward"), LOOKED_UP, False, []),
    *((replace(TOTAL, op=op), MODELS, False, [64 * 1001 * 4]) for op in ("sum", "argmax", "var")),
    (replace(TOTAL, op="_softmax"), MODELS, False, []),
]


@pytest.mark.parametrize(("params", "models", "channels_last", "copied"), COPIES)
def test_what_no_model_has_seen_is_a_copy_of_its_bytes(
    params: Any, models: Any, channels_last: bool, copied: list[float]
) -> None:
    assert fallback_parts(params, models, channels_last, GPU) == [memory_copy(n) for n in copied]


def fp8(stack: str, gpu: Gpu = GPU) -> dict[str, Any]:
    """Models with rows of products in fp8 on a GPU under a stack."""
    return {**MODELS, "gemm": learned("scaled_mm", dtype="fp8", stack=stack, gpu=gpu)}


def test_a_product_in_fp8_loses_the_cast_it_was_measured_with() -> None:
    """What it takes beyond one of 32 columns, and the time to read a byte an element."""
    product = Gemm(op="scaled_mm", m=4096, n=1024, k=512, layout="nt", dtype="fp8")
    whole, cast, read = fallback_parts(product, fp8("vllm-0.24.0"), False, GPU)
    assert (whole.params, whole.times, cast.times) == (product, 1, -1)
    assert (cast.params.n, cast.params.m, cast.params.k) == (32, 4096, 512)
    assert read == memory_copy(4096 * 512)
    assert fallback_parts(replace(product, n=64), fp8("vllm-0.24.0"), False, GPU) == []


def test_products_in_fp8_of_our_own_sweeps_were_measured_without_a_cast() -> None:
    """Nothing is taken off where torch's rows answer; half where two GPUs do."""
    product = Gemm(op="scaled_mm", m=4096, n=1024, k=512, layout="nt", dtype="fp8")
    assert fallback_parts(product, fp8("torch-2.11.0+cu130"), False, GPU) == []
    both = fp8("torch-2.11.0+cu130")["gemm"].source_gpus
    other = replace(GPU, name="twin")
    measured = {**both.measured, "twin": {"fp8": {"scaled_mm": ["vllm-0.24.0"]}}}
    source_gpus = replace(both, measured=measured, gpus={**both.gpus, "twin": other})
    gemm = replace(MODELS["gemm"], source_gpus=source_gpus)
    parts = fallback_parts(product, {**MODELS, "gemm": gemm}, False, replace(GPU, name="new"))
    assert [part.times for part in parts] == [1, -0.5, 0.5]
    assert len(fallback_parts(product, {**MODELS, "gemm": gemm}, False, other, "torch")) == 3
    two = {"twin": {"fp8": {"scaled_mm": ["vllm-0.24.0", "torch-2.11.0"]}}}
    gemm = replace(gemm, source_gpus=replace(source_gpus, measured=two))
    assert fallback_parts(product, {**MODELS, "gemm": gemm}, False, other, "torch") == []
    assert len(fallback_parts(product, {**MODELS, "gemm": gemm}, False, other, "vllm")) == 3


def test_rows_of_one_gpu_leave_fallbacks_of_other_generations() -> None:
    """A Hopper's batch norms in bf16 answer for Ampere and Blackwell, not for Volta or in fp32."""

    def on(architecture: str) -> Gpu:
        return replace(GPU, name=architecture, architecture=architecture)

    hopper = learned("batch", "layer", dtype="bf16", gpu=on("hopper"))
    models = {**MODELS, "norm": hopper}
    norm = Norm(op="batch", rows=2, cols=64, channels=16, dtype="bf16")

    def falls_back(architecture: str, models: Any = models, dtype: str = "bf16") -> bool:
        return bool(fallback_parts(replace(norm, dtype=dtype), models, False, on(architecture)))

    answers = ("pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell-ultra", "cdna2")
    assert [falls_back(a) for a in answers] == [1, 1, 1, 0, 0, 0, 0, 1]
    assert falls_back("hopper", dtype="fp32")
    measured = {**hopper.source_gpus.measured, "volta": hopper.source_gpus.measured["hopper"]}
    gpus = {name: on(name) for name in measured}
    several = replace(hopper, source_gpus=replace(hopper.source_gpus, measured=measured, gpus=gpus))
    assert not falls_back("pascal", {**MODELS, "norm": several})  # what both showed holds for all


def test_convolutions_measured_on_one_gpu_leave_the_forwards_of_another() -> None:
    """A Volta's backward is two of its own forwards though a Hopper's was measured."""
    hopper, volta = (replace(GPU, name=name, architecture=name) for name in ("hopper", "volta"))
    model = learned("forward", gpu=volta)
    measured = {
        **model.source_gpus.measured,
        "hopper": {"fp32": {"forward": ["a"], "backward": ["a"]}},
    }
    gpus = {"hopper": hopper, "volta": volta}
    conv = replace(model, source_gpus=replace(model.source_gpus, measured=measured, gpus=gpus))
    back = convolution(dtype="fp32", op="backward")
    (found,) = fallback_parts(back, {**MODELS, "conv": conv}, False, volta)
    assert (found.params.op, found.times) == ("forward", 2)
    assert fallback_parts(back, {**MODELS, "conv": conv}, False, hopper) == []


def test_a_recurrent_network_never_seen_is_products_one_step_after_the_other() -> None:
    """Gates of 4 x 8 and 3 x 8 rows; the second layer reads both directions of the first."""
    layer = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)
    inputs, gates, starts, state = fallback_parts(layer, MODELS, False, GPU)
    assert gates == replace(memory_copy(2 * 3 * 32 * 4), times=5)
    assert starts == replace(memory_copy(1), times=5 * 10)
    assert [(p.params.m, p.params.n, p.params.k, p.times) for p in (inputs, state)] == [
        (15, 32, 6, 1),
        (3, 32, 8, 5),
    ]
    network = replace(layer, op="gru", layers=2, directions=2)
    for p, forward in (
        (layer, [inputs, state]),
        (network, fallback_parts(network, MODELS, False, GPU)),
    ):
        back = fallback_parts(replace(p, op=f"{p.op}_backward"), MODELS, False, GPU)
        assert _product_flops(back) == 2 * _product_flops(forward)
    first, below, *_, steps = fallback_parts(network, MODELS, False, GPU)
    assert [(p.params.n, p.params.k, p.times) for p in (first, below, steps)] == [
        (24, 6, 2),
        (24, 16, 2),
        (24, 8, 5 * 4),
    ]


def _product_flops(parts: Sequence[Part]) -> float:
    products = [p for p in parts if p.family == "gemm"]
    return sum(2 * p.params.m * p.params.n * p.params.k * p.times for p in products)


def test_rows_of_a_gpu_price_the_steps_of_a_layer_on_that_gpu_alone() -> None:
    known = {**MODELS, "recurrent": learned("lstm")}
    layer = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8, layers=2)
    alone = Recurrent(op="lstm", steps=5, batch=3, inputs=1, hidden=8)
    *products, steps = fallback_parts(layer, known, False, GPU)
    assert (steps.params, steps.times) == (alone, 2)
    assert [p.params.k for p in products] == [6, 8]
    assert fallback_parts(alone, known, False, GPU) == []
    other = fallback_parts(alone, known, False, replace(GPU, name="other"))
    assert {p.family for p in other} == {"gemm", "elementwise"}


@pytest.mark.parametrize("gpu", ["v100-sxm-16gb", "h100-sxm-80gb"])
@pytest.mark.parametrize("op", ["lstm", "gru_backward"])
def test_networks_take_longer_with_steps_sequences_width_and_directions(gpu: str, op: str) -> None:
    """By the bundle that ships; two directions or layers take twice as long as one."""
    book = PriceBook(Bundle.load(SHIPPED), load_gpu(gpu), 0)

    def us(**sizes: int) -> float:
        base = {"steps": 64, "batch": 32, "inputs": 512, "hidden": 512, "dtype": "fp16"}
        call = OpCall(op=NETWORK, args=(), kwargs={"op": op, **base, **sizes})
        return book.price([priceable(call)])[0].duration_us

    for name, sizes in (
        ("steps", (1, 16, 64, 512)),
        ("batch", (8, 32, 128, 512)),
        ("hidden", (128, 512, 1024, 2048)),
        ("inputs", (64, 512, 4096)),
    ):
        times = [us(**{name: size}) for size in sizes]
        least = 0.7 if book.models["recurrent"] and gpu.startswith("h") else 1.0  # 66 rows
        assert (np.array(times[1:]) >= least * np.array(times[:-1])).all(), name
    assert us(directions=2) == pytest.approx(2 * us())
    assert us(layers=2) == pytest.approx(2 * us())
