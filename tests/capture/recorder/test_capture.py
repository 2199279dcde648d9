"""What a capture writes down equals what a real step does."""

import copy
import gc
import gzip
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from op_calls import sequence
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from itercast.capture.cases.registry import case
from itercast.capture.opcall import OpCall, StepCapture, TensorSpec
from itercast.capture.recorder.cache import dumps, loads
from itercast.capture.recorder.log import OpLog, capture_step
from itercast.capture.recorder.zeros import mark_zeros
from itercast.capture.step import StepSettings


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.norm(x + y.transpose(1, 2).reshape(2, 8, 16))


class Bags(nn.Module):
    """Two tables, of which a step sends back only the rows it looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 4, mode="sum", sparse=True)
        self.words = nn.Embedding(30, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bags(x) * self.words(x[:, 0].contiguous())


class Scaled(nn.Module):
    """Multiplies by a table, which it may keep from the first pass on."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.weight, self.keeps, self.table = nn.Parameter(torch.ones(8)), keeps, torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        PASSES.append(gc.isenabled())
        if self.keeps and len(PASSES) == 1:
            self.table = torch.cos(x[0])
        return x * self.weight * self.table


PASSES = list[bool]()  # whether garbage is collected meanwhile


@pytest.mark.parametrize("keeps", [False, True])
def test_only_a_model_that_keeps_something_runs_a_second_time(keeps: bool) -> None:
    """The optimizer's state is there in the captured update, what a model keeps in its forward."""
    PASSES.clear()
    step = capture_step(
        lambda: Scaled(keeps),
        lambda: {"x": torch.zeros(4, 8)},
        lambda out, _: out.sum(),
        StepSettings(),
    )
    assert not any(PASSES) and len(PASSES) == 1 + keeps and gc.isenabled()
    ops = [c.op for c in step.calls]
    assert "aten.cos.default" not in ops
    assert [op for op in ops if "zeros" in op] == []


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight)


class Copies(nn.Module):
    """Blocks that are copies of one, as encoders are built; buffers and all."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.blocks = nn.Sequential(*(copy.deepcopy(block) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Ctc(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        labels = torch.ones(2, 3, dtype=torch.long)
        lengths = (torch.full((2,), n) for n in (6, 3))
        return nn.functional.ctc_loss(x.log_softmax(-1), labels, *lengths, reduction="none")


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2)),
        lambda: torch.randn(3, 8),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten()),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "attention": (Block, lambda: torch.randn(2, 8, 16)),
    "bags": (Bags, lambda: torch.zeros(3, 2, dtype=torch.long)),
    "spectrum": (Spectrum, lambda: torch.randn(3, 8)),
    "copies": (Copies, lambda: torch.randn(3, 8)),
    "ctc": (lambda: nn.Sequential(nn.Linear(8, 5), Ctc()), lambda: torch.randn(6, 2, 8)),
}


def capture(name: str, fake: bool, **settings: str) -> StepCapture:
    build, x = MODELS[name]
    return capture_step(
        lambda: Wrapped(build()),
        lambda: {"x": x()},
        lambda y, _: y.square().mean(),
        StepSettings(**settings),
        fake=fake,
    )


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("name", MODELS)
def test_a_fake_capture_equals_a_real_run(name: str) -> None:
    optimizer = "sgd" if name == "bags" else "adamw"  # which takes no sparse gradients
    steps = (capture(name, fake=fake, optimizer=optimizer) for fake in (True, False))
    assert sequence(next(steps)) == sequence(next(steps))


def test_sparse_gradients_touch_the_rows_looked_up() -> None:
    calls = capture("bags", fake=True, optimizer="sgd").calls
    added = [c for c in calls if c.op == "aten.index_add_.default" and c.phase == "optimizer"]
    assert [c.args[0].shape for c in added] == [(50, 4), (30, 4)]
    assert [c.args[3].shape for c in added] == [(6, 4), (3, 4)]  # 3 bags of 2, 3 words
    (lookups,) = (c for c in calls if c.op == "aten.index_select.default")
    assert lookups.outputs[0].shape == (6, 4)


def test_sparse_tables_may_be_larger_than_memory() -> None:
    found = capture_step(
        lambda: nn.EmbeddingBag(2**40, 64, mode="sum", sparse=True),
        lambda: {"input": torch.randint(0, 9, (3, 2))},
        lambda y, inputs: y.sum(),
        StepSettings(optimizer="sgd"),
    )
    (added,) = (c for c in found.calls if c.op == "aten.index_add_.default")
    assert [t.shape for t in added.tensors()] == [(2**40, 64), (6,), (6, 64)]


def test_complex_weights_are_pairs_of_real_numbers() -> None:
    (weight,) = capture("spectrum", fake=True).parameters
    assert (weight.shape, weight.dtype) == ((3, 5, 2), "fp32")


def test_an_mlp_step_by_hand() -> None:
    found = capture("mlp", fake=True, optimizer="none")
    ops = [c.op.split(".")[1] for c in found.calls if c.phase == "forward"]
    dropout = ["empty_like", "bernoulli_", "div_", "mul"]  # as it decomposes on a CPU
    assert ops == ["addmm", "relu", *dropout, "addmm"]
    products = [c for c in found.calls if c.op == "aten.mm.default"]
    assert len(products) == 3  # two weight gradients, one input gradient
    assert found.host["module_call"] == 6  # wrapper, sequential, four layers


def test_the_batch_is_known_beside_the_ops_that_read_it() -> None:
    """The first product reads the batch, which is no parameter."""
    found = capture("mlp", fake=True, optimizer="none")
    first = next(c for c in found.calls if c.op == "aten.addmm.default")
    batch = first.args[1]
    assert batch in found.inputs
    assert not {t.storage for t in found.inputs} & {p.storage for p in found.parameters}


def test_gradients_are_ready_last_layer_first() -> None:
    found = capture("mlp", fake=True)
    ready = {p.name: p.ready_after for p in found.parameters}
    assert ready["inner.3.weight"] < ready["inner.0.weight"]


def test_attention_is_one_op_each_way() -> None:
    """2 batches, 2 heads, 8 tokens, 8 wide: a token's heads lie side by side."""
    calls = [c for c in capture("attention", fake=True).calls if "sdpa" in c.op]
    assert [c.op for c in calls] == ["itercast.sdpa", "itercast.sdpa_backward"]
    assert calls[0].outputs[0].shape == (2, 2, 8, 8)
    assert calls[0].outputs[0].stride == (128, 8, 16, 1)


class Restricted(nn.Module):
    """Attention by the kernels of a context that backward is outside of."""

    def __init__(self, *kernels: SDPBackend, masked: bool) -> None:
        super().__init__()
        self.kernels, self.masked = list(kernels), masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool) if self.masked else None
        with sdpa_kernel(self.kernels):
            return nn.functional.scaled_dot_product_attention(x, x, x, mask)


FLASH, CUDNN = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("kernels", "masked", "expected"),
    [
        ((FLASH, CUDNN, EFFICIENT, MATH), False, ""),
        ((FLASH, MATH), False, "flash-2"),
        ((FLASH, EFFICIENT), True, "memory-efficient"),
        ((CUDNN,), True, "cudnn"),
    ],
)
def test_attention_runs_the_kernels_that_a_model_leaves_torch(
    kernels: tuple[SDPBackend, ...], masked: bool, expected: str
) -> None:
    calls = capture_step(
        lambda: nn.Sequential(nn.Linear(16, 16), Restricted(*kernels, masked=masked)),
        lambda: {"input": torch.zeros(2, 4, 8, 16)},
        lambda output, _: output.sum(),
        StepSettings(),
    ).calls
    whole = [c for c in calls if "sdpa" in c.op]
    assert [c.kwargs.get("kernel", "") for c in whole] == [expected] * 2


def test_attention_without_fused_kernels_is_computed_op_by_op() -> None:
    calls = capture_step(
        lambda: nn.Sequential(nn.Linear(16, 16), Restricted(MATH, masked=False)),
        lambda: {"input": torch.zeros(2, 4, 8, 16)},
        lambda output, _: output.sum(),
        StepSettings(),
    ).calls
    assert Counter(c.op for c in calls)["aten.bmm.default"] == 2 + 4
    assert not any("sdpa" in c.op for c in calls)


def test_stored_captures_come_back_equal_or_are_not_read() -> None:
    """Tensors are stored by position: one of fewer fields is an error, not another tensor."""
    found = capture("attention", fake=True)
    assert loads(dumps(found)) == found
    stored = json.loads(gzip.decompress(dumps(found)))
    stored["#s"][1][0]["#p"].pop()
    for spoilt in (dumps(found)[:50], *map(gzip.compress, (json.dumps(stored).encode(), b"[1]"))):
        with pytest.raises(ValueError, match="not a captured step"):
            loads(spoilt)


def test_settings_name_what_is_allowed() -> None:
    allowed = "adamw, adamw_fused, sgd, sgd_momentum, lamb, muon, none"
    with pytest.raises(ValueError, match=f"optimizer 'adam': allowed are {allowed}"):
        StepSettings(optimizer="adam")


class Twice(nn.Module):
    """A hidden tensor that two functions read, and a GRU cell's split."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells = nn.Linear(8, 8), nn.GRU(8, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        hidden: torch.Tensor = self.cells(y.exp() * y.tanh())[0]
        return hidden


def test_what_autograd_adds_in_place_is_captured_so() -> None:
    step = capture_step(
        Twice,
        lambda: {"x": torch.randn(2, 3, 8)},
        lambda y, _: y.square().mean(),
        StepSettings(optimizer="none"),
    )
    backward = [c.op for c in step.calls if c.phase == "backward"]
    assert "aten.add_.Tensor" in backward
    assert "aten.add.Tensor" not in backward
    ops = {c.op for c in step.calls}
    assert not any("unsafe_split" in op for op in ops)  # a view, whatever its schema says


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_attention_inside_torchs_own_transformer_layer_is_one_op(attn: str) -> None:
    """Two layers: two calls forward, two backward, with the dropout of the layer."""
    layer = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.1, batch_first=True)
    calls = capture_step(
        lambda: nn.Sequential(layer(), layer()),
        lambda: {"input": torch.zeros(2, 8, 16)},
        lambda output, _: output.sum(),
        StepSettings(attn=attn),
    ).calls
    whole = [call for call in calls if "attention" in call.op or "sdpa" in call.op]
    names = ["itercast.sdpa"] * 2 + ["itercast.sdpa_backward"] * 2
    assert [call.op for call in whole] == (names if attn == "sdpa" else [])
    assert all(call.kwargs["dropout_p"] == 0.1 for call in whole)
    assert sum(call.op == "aten.bmm.default" for call in calls) == (0 if attn == "sdpa" else 12)


@pytest.mark.parametrize("name", ["dlrm-s", "gpt-s"])
def test_zeros_of_adams_squares_are_foreseen(name: str) -> None:
    """Rows of tables that the batch leaves out, against a real optimizer after two steps."""
    chosen = case(name)
    model, inputs = chosen.build(), chosen.inputs(chosen.batch, chosen.seq)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        optimizer.zero_grad()
        chosen.loss(model(**inputs), inputs).backward()
        optimizer.step()
    squares = [state["exp_avg_sq"] for state in optimizer.state.values()]
    zeros = sum(int((x == 0).sum()) for x in squares) / sum(x.numel() for x in squares)
    captured = capture_step(
        chosen.build,
        lambda: chosen.inputs(chosen.batch, chosen.seq),
        chosen.loss,
        StepSettings(),
    )
    [root] = [c for c in captured.calls if c.op.startswith("aten._foreach_sqrt")]
    foreseen = sum(t.zero_frac * t.numel for t in root.args[0]) / sum(t.numel for t in root.args[0])
    assert zeros > 0.2
    assert foreseen == pytest.approx(zeros, abs=0.06)


def test_tied_gradients_are_zero_where_both_parts_are() -> None:
    """An embedding's gradient added to another one, then squared and rooted by hand."""
    table = TensorSpec(shape=(4, 2), dtype="fp32", storage=1)
    dense, square = replace(table, storage=2), replace(table, storage=3)
    indices = TensorSpec(shape=(2,), dtype="int64", storage=4)
    gradient = OpCall(
        op="aten.embedding_dense_backward.default", args=(dense, indices, 4), outputs=(table,)
    )
    tie = OpCall(op="aten.add_.Tensor", args=(table, dense), outputs=(table,))
    adam = [
        OpCall(op="aten._foreach_addcmul_.Scalar", args=((square,), (table,), (table,), 0.1)),
        OpCall(op="aten._foreach_sqrt.default", args=((square,),)),
    ]
    assert mark_zeros([gradient, *adam])[-1].args[0][0].zero_frac == 0.75**2  # two draws of four
    assert mark_zeros([gradient, tie, *adam])[-1].args[0][0].zero_frac == 0.0


@pytest.mark.parametrize("fake", [True, False])
def test_a_bilinear_layer_is_the_ops_that_torch_runs(fake: bool) -> None:
    """As torch's profiler counts them: for each of four outputs products, a sum, both ways."""
    layer, inputs = nn.Bilinear(6, 5, 4), [torch.randn(3, n, requires_grad=True) for n in (6, 5)]
    with torch.profiler.profile() as profile:
        wanted = layer(*inputs)
        wanted.sum().backward()
    ran = Counter(event.name.removeprefix("aten::") for event in profile.events())
    gradient = inputs[0].grad
    layer.zero_grad()
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext() as mode:
        if mode is not None:
            layer, inputs = copy.deepcopy(layer), [mode.from_tensor(x) for x in inputs]
        for x in inputs:
            x.grad = None
        with OpLog(None, lambda _: False) as log:
            found = layer(*inputs)
            found.sum().backward()
    logged = Counter(call.op.split(".")[1] for call in log.calls)
    assert [logged[op] for op in ("bmm", "mul", "add_")] == [20, 12, 16]
    assert [ran[op] for op in ("bmm", "mul", "add_")] == [20, 12, 16]
    assert found.shape == wanted.shape
    if not fake:
        torch.testing.assert_close((found, inputs[0].grad), (wanted, gradient))


def test_dtypes_that_no_op_was_measured_in_are_logged_by_their_size() -> None:
    eight = (torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32)
    with OpLog(None, lambda _: False) as log:
        for dtype in eight:
            torch.zeros(2, dtype=dtype)
    assert [call.outputs[0].dtype for call in log.calls] == ["fp8", "uint8", "int16", "int32"]
