"""Which ops are priced in place of those that no model has seen."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pandas as pd
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
from itercast.microbench.ops.matrix.attention import Attention
from itercast.microbench.ops.matrix.conv import Conv
from itercast.microbench.ops.matrix.gemm import Gemm
from itercast.microbench.ops.matrix.recurrent import CALL as NETWORK
from itercast.microbench.ops.matrix.recurrent import Recurrent
from itercast.microbench.ops.memory.elementwise import memory_copy
from itercast.microbench.ops.memory.fused import Fused
from itercast.microbench.ops.memory.norm import Norm
from itercast.microbench.ops.memory.reduction import Reduction

GROWS_US = 30.0
PERSISTENT_US = 7.0  # a step of several kernels takes longer


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


def test_tensor_cores_run_no_depthwise_convolution_in_tf32() -> None:
    """So that rows, which are of NCHW, tell of NHWC as in fp32; of other kinds they do not."""
    sizes = {"batch": 2, "in_channels": 16, "out_channels": 16, "h": 8, "w": 8}
    conv = Conv(op="forward", kernel_h=3, kernel_w=3, groups=16, **sizes)

    def falls_back(dtype: str, groups: int = 16) -> bool:
        models = {**MODELS, "conv": learned("forward in groups", dtype=dtype)}
        params = replace(conv, dtype=dtype, groups=groups)
        return bool(fallback_parts(params, models, True, GPU))

    assert not falls_back("fp32") and not falls_back("tf32")
    assert falls_back("bf16") and falls_back("tf32", groups=4)


LAYER = Conv(
    op="forward", batch=2, in_channels=75, out_channels=75, h=8, w=8, kernel_h=1, kernel_w=1
)


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 1 + 2),  # (2400 / 75) ** 0.2 = 2
        ({"need_input_grad": False}, 2),
        ({"need_weight_grad": False}, 1),
        ({"stride": 2}, 4 + 2),  # 32 ** 0.4
        ({"stride": 2, "transposed": True}, 1 + 2),
        ({"kernel_w": 32, "padding_w": 16}, 1 + 1),  # sums of 75 * 32 terms
        ({"in_channels": 7500, "stride": 2}, 1.2 + 0.85),  # (2400 / 7500) ** 0.2 = 0.8
        ({"in_channels": 1, "stride": 2}, 4 + 2.5),
    ],
)
def test_gradients_take_longer_the_shorter_the_sums_of_a_convolution_are(
    changes: dict[str, Any], forwards: float
) -> None:
    """Where only forwards have rows."""
    layer = replace(LAYER, **changes)
    models = {**MODELS, "conv": learned("forward", "forward transposed")}
    (part,) = fallback_parts(replace(layer, op="backward"), models, False, GPU)
    assert part.params == layer and part.times == pytest.approx(forwards)


def test_a_depthwise_convolution_in_fp32_takes_clocks_for_each_output_and_tap() -> None:
    """64 outputs a channel, 16 channels, 2 images, 0.7 + 9 * 0.15 clocks each, at 8 GHz in all."""
    depthwise = replace(LAYER, in_channels=16, out_channels=16, groups=16, kernel_h=3, kernel_w=3)
    depthwise, gpu = replace(depthwise, padding_h=1, padding_w=1), replace(GPU, clock_hz=1e9)
    (forward,) = fallback_parts(depthwise, MODELS, False, gpu)
    nbytes, busy_s = 2 * 2 * 16 * 64 * 4, 2 * 16 * 64 * (0.7 + 9 * 0.15) / 8e9
    assert forward == replace(memory_copy(nbytes), times=pytest.approx(1 + busy_s * 1e12 / nbytes))
    (both,) = fallback_parts(replace(depthwise, op="backward"), MODELS, False, gpu)
    assert both.times == pytest.approx((1 + 2.5) * forward.times)


def test_a_grouped_convolution_reaches_part_of_the_peak() -> None:
    """Sums of 1024 * 9 terms: 2 * 9216 FLOP for each of 2 * 64 * 2048 outputs, at 0.4 * 10 TFLOP/s.

    Short sums take passes over memory: 1 + sqrt(4 * 9 / 9) = 3.
    """
    sizes: dict[str, Any] = {
        "groups": 2,
        "kernel_h": 3,
        "kernel_w": 3,
        "padding_h": 1,
        "padding_w": 1,
    }
    wide = replace(LAYER, in_channels=2048, out_channels=2048, **sizes)
    (part,) = fallback_parts(wide, MODELS, False, GPU)
    nbytes, outputs = 2 * 2 * 2048 * 64 * 4, 2 * 2048 * 64
    compute_s = 2 * 9216 * outputs / 4e12
    assert part == replace(memory_copy(nbytes), times=pytest.approx(compute_s / (nbytes / 1e12)))
    narrow = replace(LAYER, in_channels=8, out_channels=8, **sizes)
    assert fallback_parts(narrow, MODELS, False, GPU)[0].times == 3


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


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("gpu", ["h100-sxm-80gb", "a100-sxm-80gb"])
def test_fused_attention_in_fp32_takes_as_long_as_in_tf32(gpu: str, op: str) -> None:
    """By TF32's rows, and nothing of it is assumed; not where it is unfused or units are few."""
    call = Attention(
        op=op, batch=8, heads=12, kv_heads=12, q_len=512, kv_len=512, head_dim=64, causal=False
    )
    bundle = Bundle.load(SHIPPED)

    def priced_us(p: Attention, on: str) -> tuple[float, Any]:
        asked = Priceable(
            op="itercast.sdpa",
            phase="forward",
            family=family_of(p),
            params=p,
            bytes_moved=0.0,
            cold=1.0,
        )
        (found,) = PriceBook(bundle, load_gpu(on), 0).price([asked])
        return found.duration_us, found.assumed

    in_tf32, grouped = replace(call, dtype="tf32"), replace(call, kv_heads=4)
    assert priced_us(call, gpu) == (pytest.approx(priced_us(in_tf32, gpu)[0]), ())
    assert priced_us(grouped, gpu)[0] > 1.05 * priced_us(replace(grouped, dtype="tf32"), gpu)[0]
    for few in ("v100-sxm-16gb", "rtx-4090", "mi300x"):
        parts = fallback_parts(call, bundle.models, False, load_gpu(few))
        assert "tf32" not in [part.params.dtype for part in parts]


def test_a_recurrent_network_never_seen_is_products_one_step_after_the_other() -> None:
    """Gates of 4 x 8 and 3 x 8 rows; the second layer reads both directions of the first."""
    layer = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)
    inputs, gates, state = fallback_parts(layer, MODELS, False, GPU)
    old = fallback_parts(layer, MODELS, False, replace(GPU, architecture="volta"))
    assert gates == replace(memory_copy(2 * 3 * 32 * 4), times=5)
    assert old == [inputs, gates, replace(memory_copy(1), times=5 * 10), state]
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


def test_rows_of_a_gpu_price_steps_on_that_gpu_alone_up_to_their_largest_state() -> None:
    known = {**MODELS, "recurrent": learned("lstm")}
    layer = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8, layers=2)
    alone = Recurrent(op="lstm", steps=5, batch=3, inputs=1, hidden=8)
    *products, steps = fallback_parts(layer, known, False, GPU)
    assert (steps.params, steps.times) == (alone, 2)
    assert [p.params.k for p in products] == [6, 8]
    assert fallback_parts(alone, known, False, GPU) == []
    others = [fallback_parts(alone, known, False, replace(GPU, name="other"))]
    small = replace(known["recurrent"], envelope={"log_hidden": (0.0, 2.0)})  # up to 4
    others.append(fallback_parts(alone, {**known, "recurrent": small}, False, GPU))
    assert [{p.family for p in parts} for parts in others] == [{"gemm", "elementwise"}] * 2


def test_steps_of_our_h100_take_a_product_and_a_pass_unless_they_are_one_kernel() -> None:
    """By its rows, which no model prices here; ``pytest -s`` prints measured over this law."""
    files = sorted((SHIPPED.parents[1] / "datasets/gpu/recurrent/h100-sxm-80gb").rglob("*.parquet"))
    names = [f.name for f in fields(Recurrent)]
    rows = pd.concat([pd.read_parquet(file) for file in files]).query("status == 'ok'")
    medians = rows.groupby(names)["time_us"].median().reset_index().to_dict("records")
    bundle = Bundle.load(SHIPPED)
    others = {name: model for name, model in bundle.models.items() if name != "recurrent"}
    book = PriceBook(replace(bundle, models=others), load_gpu("h100-sxm-80gb"), 0)
    ratios = []
    for row in medians:
        words = ("op", "dtype")
        p = Recurrent(**{n: row[n] if n in words else int(row[n]) for n in names})
        (law,) = book.price([priceable(OpCall(op=NETWORK, args=(), kwargs=asdict(p)))])
        each_us = row["time_us"] / p.steps
        print(f"{p.op} {p.dtype} {each_us:.1f} us a step, {row['time_us'] / law.duration_us:.2f}")
        ratios += [row["time_us"] / law.duration_us] if each_us > PERSISTENT_US else []
    assert len(ratios) == 17 and np.median(ratios) == pytest.approx(1.0, abs=0.1)
    assert sum(0.8 < ratio < 1.4 for ratio in ratios) == 13


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
