"""What a GPU runs otherwise than the CPU that was captured, and how its ops are priced."""

import math
from dataclasses import asdict, replace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from unseen_ops import GPU, MODELS, OfFew, learned

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings
from itercast.compose.graph.cuda_variants import (
    with_byte_masks,
    with_cuda_variants,
    with_memory_format,
    with_whole_networks,
)
from itercast.compose.pricing.fallbacks import fallback_parts
from itercast.compose.pricing.optimizer import scaled_update
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops.matrix.recurrent import CALL as NETWORK
from itercast.microbench.ops.matrix.recurrent import Recurrent, saved_numel
from itercast.microbench.ops.memory.fused import CALL

CPU = replace(GPU, name="cpu", kind="cpu")


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
    found = with_cuda_variants(
        with_byte_masks(StepCapture(calls=calls, parameters=(weight,))), load_gpu("a10")
    )
    names = [c.op.split(".")[1] for c in found.calls]
    assert names == ["native_dropout", "mul", "native_dropout_backward"]
    for tensors in (found.calls[0].outputs, found.calls[2].args):
        assert [(t.dtype, t.storage) for t in tensors][1:] == [("bool", 1)]
    assert found.parameters[0].ready_after == 2


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3), ("rnn", 1)])
def test_products_of_recurrent_networks_count_in_mfu(cell: str, gates: int) -> None:
    """Three layers of 1,024 over 35 x 160 tokens: 2 flops a weight forward, 4 backward.

    A V100 has 15.7 TFLOP/s in fp32, also where TF32 is allowed.
    """
    sizes = {"steps": 35, "batch": 160, "inputs": 1024, "hidden": 1024, "layers": 3}
    both = [Recurrent(op=op, dtype="tf32", **sizes) for op in (cell, f"{cell}_backward")]
    ops = [priceable(OpCall(op=NETWORK, args=(), kwargs=asdict(p))) for p in both]
    weights = 3 * gates * 1024 * (1024 + 1024)
    found_s = sum(op.matmul_s(load_gpu("v100-sxm-16gb")) for op in ops)
    assert found_s == pytest.approx(6 * weights * 35 * 160 / 15.7e12)


def test_products_of_sparse_matrices_count_in_mfu() -> None:
    """Five values times two columns."""
    sparse = TensorSpec(shape=(3, 4), dtype="fp32", storage=0, layout="csr", nnz=5)
    product = call("mm.default", sparse, tensor(1, shape=(4, 2)), out=2)
    assert priceable(product).matmul_s(load_gpu("v100-sxm-16gb")) == 2 * 5 * 2 / 15.7e12


@pytest.mark.parametrize("known", [True, False])
def test_an_lstm_is_priced_with_and_without_a_model(known: bool) -> None:
    class Pricer(OfFew):
        models = {**MODELS, "recurrent": learned("lstm")} if known else MODELS

    args = (tensor(0, shape=(5, 3, 6)), tensor(1, shape=(32, 6)))
    op = priceable(call("mkldnn_rnn_layer.default", *args, out=2))
    (found,) = PriceBook(Pricer(), GPU, 0).price([op])
    assert found.family == ("recurrent" if known else "unmodelled")
    # all inputs and the steps; else at each step a pass and a product
    assert found.duration_us == 10 * (1 + 1 if known else 1 + 5 * (1 + 1))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_a_capture_knows_the_calls_of_each_recurrent_network(cell: str) -> None:
    """Two layers and directions on bf16 under autocast; the linear layers belong to none."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = getattr(nn, cell)(6, 8, 2, batch_first=True, bidirectional=True)
            self.before, self.after = nn.Linear(6, 6), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.after(self.cells(self.before(x))[0])

    step = capture_step(
        Model,
        lambda: {"x": torch.randn(3, 5, 6)},
        lambda y, _: y.square().mean(),
        StepSettings(dtype="bf16", amp=True, optimizer="none"),
    )
    facts = {"steps": 5, "batch": 3, "inputs": 6, "hidden": 8, "layers": 2, "directions": 2}
    ops = [cell.lower(), f"{cell.lower()}_backward"]
    assert list(step.networks) == [{**facts, "dtype": "bf16", "op": op} for op in ops]
    inside = [(c.within, c.phase) for c in step.calls if c.within]
    assert set(inside) == {(1, "forward"), (2, "backward")}
    whole = with_whole_networks(step)
    names = [c.op for c in whole.calls if c.op.endswith(("mm.default", NETWORK))]
    add, mm = "aten.addmm.default", "aten.mm.default"
    assert names == [add, NETWORK, mm, mm, mm, NETWORK, mm]  # no gradient of the batch
    casts = [c for c in whole.calls if c.op == "aten._to_copy.default" and c.phase == "forward"]
    assert len(casts) == 16 + 2 * 2 + 1  # four of each layer and direction, the linear ones, x
    forward, backward = (c for c in whole.calls if c.op == NETWORK)
    assert forward.outputs[0].shape == (5, 3, 16)  # steps first
    assert forward.outputs[-1] == backward.args[-1]  # what cuDNN keeps
    assert forward.outputs[-1].shape == (saved_numel(Recurrent(**forward.kwargs)),)
    assert whole.host["autograd_node"] < step.host["autograd_node"]
    assert whole.host["module_call"] == step.host["module_call"]
    assert with_whole_networks(whole) == whole
    assert with_whole_networks(step, ()) == step


def test_a_cpu_runs_networks_in_one_call_whose_steps_it_has_rows_of() -> None:
    """All but LSTMs, which oneDNN runs layer by layer; a layer is a product and its steps."""

    rows = {"gemm": learned("mm", gpu=CPU), "recurrent": learned("lstm", "gru", gpu=CPU)}

    class Pricer(OfFew):
        models = MODELS | rows

    book = PriceBook(Pricer(), CPU, 1)
    assert book.whole_cells == ("gru",)
    assert PriceBook(OfFew(), CPU, 1).whole_cells == ()
    layer = Recurrent(op="gru", steps=5, batch=3, inputs=6, hidden=8)
    step = StepCapture(
        calls=(replace(call("mm.default", tensor(0), tensor(1), out=2), within=1),),
        networks=(asdict(layer),),
    )
    (op,) = rank_graph(step, ParallelPlan(), CPU, cells=book.whole_cells).to_price()
    product, steps = fallback_parts(op.params, Pricer.models, False, CPU)
    assert (product.params.m, product.params.n, product.params.k) == (15, 24, 6)
    assert steps.params == replace(layer, inputs=1)


class ByElement(OfFew):
    """A copy takes 1 us for each element."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return 1.0 * rows["numel"]


@pytest.mark.parametrize(
    ("vendor", "units", "op", "runs"),
    [
        ("nvidia", ["tf32"], "conv", "tf32"),
        ("nvidia", [], "conv", "fp32"),
        ("nvidia", [], "mm", "fp32"),
        ("amd", ["tf32"], "conv", "fp32"),
        ("amd", ["tf32"], "mm", "tf32"),
    ],
)
def test_tf32_runs_where_the_gpu_has_it(vendor: str, units: list[str], op: str, runs: str) -> None:
    peaks = dict.fromkeys(["fp32", *units], 1e13)
    gpu = replace(GPU, name="other", vendor=vendor, peak_flops_per_s=peaks)
    image, weight = tensor(0, "tf32", (1, 4, 8, 8)), tensor(1, "tf32", (4, 4, 3, 3))
    options = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
    convolution = OpCall(
        op="aten.convolution.default",
        args=(image, weight, *options),
        outputs=(tensor(2, "tf32", (1, 4, 6, 6)),),
    )
    product = call("mm.default", tensor(0, "tf32", (8, 8)), tensor(1, "tf32", (8, 8)), out=2)
    found = priceable(convolution if op == "conv" else product)
    assert found.params.dtype == "tf32" and found.run_by(gpu).params.dtype == runs


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


def test_an_op_without_a_model_costs_a_copy_of_its_bytes_and_stays_unmodelled() -> None:
    op = priceable(call("unknown.default", tensor(0), out=1))
    (found,) = PriceBook(OfFew(), GPU, 0).price([op])
    assert (found.family, found.duration_us) == ("unmodelled", 10.0)


def test_a_fused_kernel_is_priced_by_the_model_of_pointwise_ones() -> None:
    """Its bytes at their rate: nothing is assumed; without that model nobody priced it."""
    fused = OpCall(op=CALL, args=(tensor(0),), kwargs={"ops": 3, "numel": 32}, outputs=(tensor(1),))
    indexed = call("index_select.default", tensor(0), out=1)
    indexed = replace(indexed, args=(tensor(0), 0, tensor(2, "int64", (3,))))
    (one, other) = PriceBook(OfFew(), GPU, 0).price([priceable(fused), priceable(indexed)])
    assert (one.family, one.duration_us, one.assumed) == ("fused", 10.0, ())
    assert (other.family, other.assumed) == ("unmodelled", (("fallbacks.index", 1.0),))
    none = PriceBook(OfFew(), GPU, 0)
    none.models = {}
    assert none.price([priceable(fused)])[0].family == "unmodelled"


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


def test_a_stand_in_is_priced_as_what_it_consists_of() -> None:
    args = (tensor(0, "fp16", (2, 16, 8, 8)), tensor(1, "fp16", (32, 16, 3, 3)), None)
    steps = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    op = priceable(OpCall(op="aten.convolution.default", args=(*args, *steps)))
    (found,) = PriceBook(OfFew(), GPU, 0).price([op])
    assert found.family == "conv"
    assert found.duration_us == pytest.approx(20)  # a product and a turn


def test_ops_are_priced_at_their_mean() -> None:
    """A factor e**0.5 between median and mean where s is 1: quantiles 2.563 apart in the log."""

    class Spread(OfFew):
        inside = True

        def price(self, family: str, rows: pd.DataFrame, gpus: Any = None) -> pd.DataFrame:
            wide = {"predicted_us_p90": 10.0 * math.exp(2.563), "in_envelope": self.inside}
            return super().price(family, rows).assign(**wide)

    class Strange(Spread):
        inside = False

    op = priceable(call("mul.Tensor", tensor(0), tensor(1), out=2))
    assert PriceBook(OfFew(), GPU, 0).price([op])[0].duration_us == pytest.approx(10)
    found = PriceBook(Spread(), GPU, 0).price([op])[0]
    assert found.duration_us == pytest.approx(10 * math.exp(0.5))
    assert PriceBook(Strange(), GPU, 0).price([op])[0].duration_us == pytest.approx(10)
