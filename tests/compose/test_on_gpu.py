"""What a GPU runs otherwise than the CPU that was captured, and what stands in for ops unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from compose.channels import with_memory_format
from compose.gpu_variants import as_on_gpu
from compose.priced import PriceBook, priceable
from compose.stand_ins import copy, stand_ins
from compose.update import scaled_update
from microbench.hardware.spec import Gpu
from microbench.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from microbench.ops.conv import Conv
from microbench.ops.elementwise import Elementwise
from microbench.ops.gemm import Gemm
from microbench.ops.norm import Norm
from microbench.ops.recurrent import Recurrent
from microbench.ops.reduction import Reduction

GPU = Gpu(name="toy", sm_count=8, peak_flops_per_s={"fp32": 1e13}, hbm_bytes_per_s=1e12)


def learned(*words: str) -> Any:
    vocabulary = {"op": list(words)}
    envelope = {"log_groups": (0.0, 0.0)}
    return SimpleNamespace(encoder=SimpleNamespace(vocabulary=vocabulary), envelope=envelope)


MODELS: Mapping[str, Any] = {
    "gemm": learned("mm"),
    "elementwise": learned("mul"),
    "conv": learned("forward", "fp32"),
    "norm": learned("layer"),
    "reduction": learned("_softmax"),
}


class Fixed:
    """Everything takes 10 us."""

    models = MODELS

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        us = pd.Series(10.0, index=rows.index)
        columns = {"predicted_us": us, "predicted_us_p10": us, "predicted_us_p90": us}
        return pd.DataFrame({**columns, "in_envelope": True})

    def inside(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> list[bool]:
        return [True] * len(rows)


def tensor(storage: int, dtype: str = "fp32", shape: tuple[int, ...] = (4, 8)) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, storage=storage)


def call(name: str, *args: TensorSpec, out: int, phase: str = "forward") -> OpCall:
    return OpCall(op=f"aten.{name}", args=args, outputs=(tensor(out),), phase=phase)


def test_dropout_is_one_kernel_with_a_mask_of_bytes() -> None:
    calls = (
        call("empty_like.default", tensor(0), out=1),
        call("bernoulli_.float", tensor(1), out=1),
        call("div_.Scalar", tensor(1), out=1),
        call("mul.Tensor", tensor(0), tensor(1), out=2),
        call("mul.Tensor", tensor(2), out=3),  # not a dropout's
        call("mul.Tensor", tensor(3), tensor(1), out=4, phase="backward"),
    )
    weight = ParamSpec(name="w", shape=(1,), dtype="fp32", storage=9, ready_after=5)
    found = as_on_gpu(StepCapture(calls=calls, parameters=(weight,)))
    names = [c.op.split(".")[1] for c in found.calls]
    assert names == ["native_dropout", "mul", "native_dropout_backward"]
    assert [t.dtype for t in found.calls[0].outputs] == ["fp32", "bool"]
    assert [t.dtype for t in found.calls[2].args] == ["fp32", "bool"]
    assert found.parameters[0].ready_after == 2


def convolution(**changed: Any) -> Conv:
    facts = {"op": "forward", "batch": 2, "in_channels": 16, "out_channels": 32, "h": 8, "w": 8}
    facts |= {"kernel_h": 3, "kernel_w": 3, "padding_h": 1, "padding_w": 1, "dtype": "fp16"}
    return Conv(**{**facts, **changed})


def test_a_half_precision_convolution_is_a_product_and_two_turned_tensors() -> None:
    """2*8*8 pixels, 32 channels, 16*9 taps; nine taps read a pixel, so m is 128 // 9, n 9 * 32.

    x and y are read and written in 2 bytes an element.
    """
    product, turned = stand_ins(convolution(), MODELS, False, GPU)
    assert (product.params.m, product.params.n, product.params.k) == (14, 288, 144)
    assert turned == copy(2 * (2 * 64 * 16 + 2 * 64 * 32) * 2)
    (alone,) = stand_ins(convolution(), MODELS, True, GPU)
    assert alone == product
    _, wider = stand_ins(convolution(dtype="tf32"), MODELS, False, GPU)
    assert wider == copy(2 * (2 * 64 * 16 + 2 * 64 * 32) * 4)


def test_each_half_of_a_half_precision_backward_turns_its_tensors() -> None:
    product, turned = stand_ins(convolution(op="backward"), MODELS, False, GPU)
    assert product.times == 2
    assert turned == copy(2 * 2 * (2 * 64 * 16 + 2 * 64 * 32) * 2)
    product, turned = stand_ins(
        convolution(op="backward", need_input_grad=False), MODELS, False, GPU
    )
    assert product.times == 1
    assert turned == copy(2 * (2 * 64 * 16 + 2 * 64 * 32) * 2)


def test_a_strided_pointwise_convolution_is_no_wider_than_its_channels() -> None:
    """A quarter of the pixels is read: 2*4*4 rows, 32 channels, 16 taps."""
    facts = {"kernel_h": 1, "kernel_w": 1, "padding_h": 0, "padding_w": 0, "stride": 2}
    product = stand_ins(convolution(**facts), MODELS, True, GPU)[0].params
    assert (product.m, product.n, product.k) == (32, 32, 16)


def test_a_grouped_convolution_passes_over_its_tensors_more_often() -> None:
    """4 channels of 9 taps in a group: 1 + sqrt(36 / 9) passes; nobody measured groups in fp32."""
    (found,) = stand_ins(convolution(groups=4), MODELS, True, GPU)
    assert replace(found, times=1) == copy((2 * 64 * 16 + 2 * 64 * 32) * 2)
    assert found.times == 3
    (found,) = stand_ins(convolution(groups=4, dtype="fp32", op="backward"), MODELS, True, GPU)
    assert found.times == 6
    seen = {**MODELS, "conv": learned("forward", "fp32")}
    seen["conv"].envelope["log_groups"] = (0.0, 5.0)
    assert stand_ins(convolution(groups=4, dtype="fp32"), seen, True, GPU) == []


def test_a_backward_in_a_known_dtype_is_two_forwards() -> None:
    known = convolution(dtype="fp32")
    assert stand_ins(known, MODELS, False, GPU) == []
    (found,) = stand_ins(convolution(dtype="fp32", op="backward"), MODELS, False, GPU)
    assert (found.params, found.times) == (known, 2)


def test_a_batch_norm_passes_three_times_and_a_layer_norm_is_known() -> None:
    norm = Norm(op="batch", rows=2, cols=64, channels=16)
    assert stand_ins(norm, MODELS, False, GPU) == [copy(3 * 2 * 64 * 16 * 4)]
    assert stand_ins(Norm(op="layer", rows=2, cols=64), MODELS, False, GPU) == []
    back = Norm(op="layer_backward", rows=2, cols=64)
    assert stand_ins(back, MODELS, False, GPU) == [copy(5 * 2 * 64 * 4)]


def test_a_half_batch_norm_in_nhwc_stays_on_chip() -> None:
    """Read once and written once; backward reads input and gradient and writes one."""
    norm = Norm(op="batch", rows=2, cols=64, channels=16, dtype="fp16")
    back = replace(norm, op="batch_backward")
    elements = 2 * 64 * 16
    assert stand_ins(norm, MODELS, True, GPU) == [copy(2 * elements * 2)]
    assert stand_ins(back, MODELS, True, GPU) == [copy(3 * elements * 2)]
    assert stand_ins(back, MODELS, False, GPU) == [copy(5 * elements * 2)]
    assert stand_ins(replace(norm, dtype="fp32"), MODELS, True, GPU) == [copy(3 * elements * 4)]


def test_a_product_in_fp8_loses_the_cast_it_was_measured_with() -> None:
    """What it takes beyond one of 32 columns, and the time to read a byte an element."""
    product = Gemm(op="scaled_mm", m=4096, n=1024, k=512, layout="nt", dtype="fp8")
    whole, cast, read = stand_ins(product, MODELS, False, GPU)
    assert (whole.params, whole.times, cast.times) == (product, 1, -1)
    assert (cast.params.n, cast.params.m, cast.params.k) == (32, 4096, 512)
    assert read == copy(4096 * 512)
    assert stand_ins(replace(product, n=64), MODELS, False, GPU) == []


def test_an_lstm_layer_never_seen_is_products_one_step_after_the_other() -> None:
    layer = Recurrent(op="lstm", steps=5, batch=3, inputs=6, hidden=8)
    gates, inputs, state = stand_ins(layer, MODELS, False, GPU)
    assert gates == replace(copy(2 * 3 * 32 * 4), times=5)
    assert [(p.params.m, p.params.n, p.params.k, p.times) for p in (inputs, state)] == [
        (15, 32, 6, 1),
        (3, 32, 8, 5),
    ]
    _, *back = stand_ins(replace(layer, op="lstm_backward"), MODELS, False, GPU)
    flops = sum(2 * p.params.m * p.params.n * p.params.k * p.times for p in back)
    assert flops == 2 * sum(
        2 * p.params.m * p.params.n * p.params.k * p.times for p in (inputs, state)
    )
    assert stand_ins(layer, {**MODELS, "recurrent": learned("lstm")}, False, GPU) == []


@pytest.mark.parametrize("known", [True, False])
def test_an_lstm_is_priced_with_and_without_a_model(known: bool) -> None:
    class Pricer(Fixed):
        models = {**MODELS, "recurrent": learned("lstm")} if known else MODELS

    args = (tensor(0, shape=(5, 3, 6)), tensor(1, shape=(32, 6)))
    op = priceable(call("mkldnn_rnn_layer.default", *args, out=2))
    (found,) = PriceBook(Pricer(), GPU, 0).price([op])
    assert found.family == ("recurrent" if known else "unmodelled")
    assert found.duration_us == (10 if known else 10 * (5 + 1 + 5))


class ByElement(Fixed):
    """A copy takes 1 us for each element."""

    def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
        return super().price(family, rows).mul(rows["numel"] / 10, axis=0).assign(in_envelope=True)


def test_without_a_model_a_lookup_moves_the_rows_it_reads_not_the_table() -> None:
    """Three rows of 8 numbers of four bytes read and written, and three indices of eight bytes."""
    index, rows = tensor(1, "int64", (3,)), tensor(2, shape=(3, 8))
    found = OpCall(
        op="aten.embedding.default", args=(tensor(0, shape=(1000, 8)), index), outputs=(rows,)
    )
    (priced,) = PriceBook(ByElement(), GPU, 0).price([priceable(found)])
    assert priced.duration_us == (2 * 3 * 8 * 4 + 3 * 8) / 8


def test_without_a_model_an_optimizer_passes_over_what_a_rank_holds() -> None:
    """In place: read and written. A rank may hold more than was captured, or a share of it."""
    captured = call("_foreach_mul_.Scalar", tensor(0, shape=(64, 8)), out=0, phase="optimizer")
    captured = replace(captured, args=(captured.args, 0.9), outputs=())
    for numel in (512, 4096, 128):
        update = scaled_update([priceable(captured)], numel, tensors=1)
        (priced,) = PriceBook(ByElement(), GPU, 0).price(update)
        assert priced.duration_us == 2 * numel * 4 / 8


def test_a_softmax_casts_its_own_input_and_gradient() -> None:
    """Of half precision; a cast that something else reads stays."""
    calls = (
        call("_to_copy.default", tensor(0, "fp16"), out=1),
        call("_softmax.default", tensor(1), out=2),
        call("_to_copy.default", tensor(0, "fp16"), out=3),
        call("exp.default", tensor(3), out=4),
        call("_softmax_backward_data.default", tensor(4), tensor(2), out=5, phase="backward"),
        replace(call("_to_copy.default", tensor(5), out=6), outputs=(tensor(6, "fp16"),)),
    )
    found = as_on_gpu(StepCapture(calls=calls))
    names = [c.op.split(".")[1] for c in found.calls]
    assert names == ["_softmax", "_to_copy", "exp", "_softmax_backward_data"]


def test_softmax_backward_multiplies_gradient_and_output_first() -> None:
    back = Reduction(op="_softmax_backward_data", outer=6, size=8)
    itself, product = stand_ins(back, MODELS, False, GPU)
    assert itself.params is back
    assert product.params == Elementwise(op="mul", numel=48, inner=48, tensors=2)
    seen = {**MODELS, "reduction": learned("_softmax", "_softmax_backward_data")}
    assert stand_ins(back, seen, False, GPU) == []
    assert stand_ins(Reduction(op="_softmax", outer=6, size=8), MODELS, False, GPU) == []


def test_an_op_without_a_model_costs_a_copy_of_its_bytes_and_stays_unmodelled() -> None:
    op = priceable(call("unknown.default", tensor(0), out=1))
    (found,) = PriceBook(Fixed(), GPU, 0).price([op])
    assert (found.family, found.duration_us) == ("unmodelled", 10.0)


def test_images_in_nhwc_are_seen() -> None:
    images, weight = tensor(0, shape=(2, 16, 8, 8)), tensor(1, shape=(32, 16, 3, 3))
    args = (images, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    step = StepCapture(calls=(OpCall(op="aten.convolution.default", args=args),))
    assert with_memory_format(step, "nchw") is step
    turned = with_memory_format(step, "nhwc").calls[0]
    assert not priceable(step.calls[0]).channels_last
    assert priceable(turned).channels_last
    assert turned.args[0].stride == (1024, 1, 128, 16)
    normed = replace(step, calls=(*step.calls, call("native_group_norm.default", images, out=2)))
    assert with_memory_format(normed, "nhwc") is normed


def test_a_stand_in_is_outside_the_envelope() -> None:
    args = (tensor(0, "fp16", (2, 16, 8, 8)), tensor(1, "fp16", (32, 16, 3, 3)), None)
    steps = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    op = priceable(OpCall(op="aten.convolution.default", args=(*args, *steps)))
    (found,) = PriceBook(Fixed(), GPU, 0).price([op])
    assert not found.in_envelope
    assert found.family == "conv"
    assert found.duration_us == pytest.approx(20)  # a product and a turn


def test_ops_are_priced_at_their_mean() -> None:
    """A factor e**0.5 between median and mean where s is 1: quantiles 2.563 apart in the log."""

    class Spread(Fixed):
        inside = True

        def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
            wide = {"predicted_us_p90": 10.0 * math.exp(2.563), "in_envelope": self.inside}
            return super().price(family, rows).assign(**wide)

    class Strange(Spread):
        inside = False

    op = priceable(call("mul.Tensor", tensor(0), tensor(1), out=2))
    assert PriceBook(Fixed(), GPU, 0).price([op])[0].duration_us == pytest.approx(10)
    found = PriceBook(Spread(), GPU, 0).price([op])[0]
    assert found.duration_us == pytest.approx(10 * math.exp(0.5))
    assert PriceBook(Strange(), GPU, 0).price([op])[0].duration_us == pytest.approx(10)
