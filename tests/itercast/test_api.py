"""The Python API on modules of one's own, and its captures."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from itercast import api
from itercast.capture.opcall import StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.capture_model import capture, micro_size
from itercast.compose.predict import predict
from itercast.compose.pricing.priced_op import priceable


def products(step: StepCapture, phase: str) -> list[tuple[int, ...]]:
    kinds = ("aten.mm.default", "aten.addmm.default")
    return [c.outputs[0].shape for c in step.calls if c.phase == phase and c.op in kinds]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def test_every_public_name_is_there() -> None:
    assert all(callable(getattr(api, name)) for name in api.__all__)


def test_a_batch_that_changes_no_input_is_said() -> None:
    """Samples a second grew with --batch, the time did not: 32 rows are 32 rows."""

    def fixed() -> tuple[Any, ...]:
        return torch.nn.Linear(8, 8), torch.ones(32, 8), torch.sum

    def sized(batch: int = 32) -> tuple[Any, ...]:
        return torch.nn.Linear(8, 8), torch.ones(batch, 8), torch.sum

    told = "batch 64 only counts: the inputs stay as they are, of 32, as "
    assert told in "".join(predict(fixed, gpu="a10", batch=64).notes)
    assert capture(fixed, batch=64).samples == 64
    assert not capture(fixed, batch=32).remarks and not capture(sized, batch=64).remarks


def test_an_error_names_no_line_of_pythons_own() -> None:
    """torch calls the module through contextlib."""
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'y'$"):
        capture(torch.nn.Linear(8, 8), {"y": torch.ones(2, 8)}, torch.sum)


def test_a_module_with_a_tensor_and_a_loss() -> None:
    target = torch.zeros(5, dtype=torch.int64)
    step = capture(mlp(), torch.randn(5, 8), lambda y: nn.functional.cross_entropy(y, target))
    assert products(step, "forward") == [(5, 6), (5, 3)]
    assert [c.op for c in step.calls if c.phase == "loss"] == [
        "aten._log_softmax.default",
        "aten.nll_loss_forward.default",
    ]
    assert (step.samples, step.tokens) == (5, 0)
    assert [p.name for p in step.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert step.optimizer == "adamw"


def test_the_module_is_left_as_it_was() -> None:
    module, x = mlp().eval(), torch.randn(5, 8)
    before = module(x)
    capture(module, x, lambda y: y.sum(), optimizer="sgd")
    assert not module.training
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(module(x), before)


def test_tied_weights_stay_tied_and_large_ones_take_no_memory() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(1000, 16)
            self.head = nn.Linear(16, 1000, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Any, scale: float = 1.0) -> Any:
            return self.head(self.tokens(tokens)) * scale

    step = capture(Tied(), (torch.zeros(4, 7, dtype=torch.int64),), loss=lambda y: y.mean())
    assert len(step.parameters) == 1
    assert (step.samples, step.tokens) == (4, 28)
    with torch.device("meta"):
        huge = nn.Linear(200_000, 200_000)  # 160 GB
    assert products(capture(huge, torch.empty(2, 200_000), "none"), "forward") == [(2, 200_000)]


def test_dtype_converts_a_module_or_leaves_it() -> None:
    for dtype, stored in ((None, "fp32"), ("bf16", "bf16")):
        step = capture(mlp(), {"input": torch.randn(5, 8)}, lambda y: y.sum(), dtype=dtype)
        assert {p.dtype for p in step.parameters} == {stored}


def test_a_function_is_given_its_size_and_builds_without_memory() -> None:
    def make(batch: int) -> Any:
        model = nn.Linear(100_000, 100_000, bias=False)  # 40 GB if it were real
        return model, torch.randn(batch, 100_000), lambda y: y.sum()

    step = capture(make, batch=3, optimizer="none")
    assert products(step, "forward") == [(3, 100_000)]
    assert step.optimizer == "none"


class Deep(nn.Module):
    """Layers that are left out the more often the deeper they are, as timm has them."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        rates = [part.tolist() for part in read(torch.linspace(0, 0.3, 4)).split([1, 3])]
        self.layers = nn.ModuleList([nn.Linear(8, 8) for stage in rates for _ in stage])
        self.rates = [rate for stage in rates for rate in stage]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rate, layer in zip(self.rates, self.layers, strict=True):
            x = x + nn.functional.dropout(layer(x), rate)
        return x


@pytest.mark.parametrize("read", [torch.clone, torch.unique])
def test_numbers_read_off_tensors_while_a_model_is_made(read: Any) -> None:
    step = capture(lambda: (Deep(read), torch.randn(3, 8)), loss="none")
    kept = [c.args[1] for c in step.calls if c.op == "aten.bernoulli_.float"]
    assert kept == pytest.approx([0.9, 0.8, 0.7])  # the first layer has nothing to drop


def test_balanced_routing_in_a_module_of_ones_own() -> None:
    class Routed(nn.Module):
        """Ten experts picked by argmax; each takes the rows of a mask."""

        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(4, 10)
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))

        def forward(self, x: Any) -> Any:
            chosen, y = self.router(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                mask = chosen == number
                if mask.any():
                    y[mask] = expert(x[mask])
            return y

    step = capture(Routed(), torch.randn(60, 4), lambda y: y.sum())
    assert products(step, "forward") == [(60, 10), *10 * [(6, 4)]]  # 60 rows over 10 experts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((mlp(), torch.randn(5, 8)), r"no scalar loss, got \(5, \d+\)"),
        ((lambda depth: mlp(),), "the model's function: missing a required argument: 'depth'"),
        ((mlp(),), "inputs of Sequential: missing a required argument: 'input'"),
        ((lambda: 3,), r"returns a torch module, \(module, inputs\) or .*, got int"),
        (("gpt-s", torch.randn(3)), "'gpt-s' brings its own inputs and loss"),
    ],
)
def test_what_cannot_be_captured_is_one_line(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capture(*arguments)


def test_a_captured_step_under_fsdps_mixed_precision_is_one_in_bf16() -> None:
    """Its forecast is that of the model by its name; under autocast, or in fp32, it is refused."""
    where: dict[str, Any] = {"gpu": "h100-sxm-80gb", "plan": "dp=8,zero=3,amp"}
    half, whole, mixed = (
        capture("gpt-s", dtype=dtype, amp=amp)
        for dtype, amp in (("bf16", False), ("fp32", False), ("bf16", True))
    )
    assert predict(half, **where).iteration_us == predict("gpt-s", **where).iteration_us
    for step in (whole, mixed):
        with pytest.raises(ValueError, match='is captured with dtype="bf16" or "fp16"'):
            predict(step, **where)
    with pytest.raises(ValueError, match="captured with amp=True or without"):
        predict(mixed, gpu="h100-sxm-80gb", plan="dp=8,amp")


def test_errors_in_a_module_are_one_line_that_says_where() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with pytest.raises(ValueError, match=r"without data: RuntimeError: .* \(test_api\.py:\d+\)$"):
        capture(Broken(), torch.randn(5, 8), optimizer="none")


def test_inputs_without_names_are_passed_in_order() -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 6)

        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return self.inner(given[0]) - given[1]

    step = capture(Difference(), (torch.randn(5, 8), torch.randn(5, 6)), lambda y: y.sum())
    assert products(step, "forward") == [(5, 6)]
    assert step.samples == 5


def test_a_module_without_parameters_is_left_as_it_was() -> None:
    class Product(nn.Module):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return given[0] * given[1]

    module, x = Product(), torch.ones(3, requires_grad=True)
    capture(module, (x, x), lambda y: y.sum(), optimizer="none")
    assert "forward" not in vars(module)
    assert module(x, x).tolist() == [1, 1, 1]


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(**options)
    return module


@pytest.mark.parametrize("compiled_by", [torch.compile, in_place])
def test_a_module_under_torch_compile_is_forecast_so(compiled_by: Any) -> None:
    """As the same module under ``engine``, which it was forecast without: eager, in silence."""
    x, gpu = torch.randn(5, 8), "h100-sxm-80gb"
    plain, compiled = (capture(m, x, torch.sum) for m in (mlp(), compiled_by(mlp())))
    assert [c.op for c in compiled.calls] == [c.op for c in plain.calls]
    assert (plain.engine, compiled.engine) == ("eager", "compile")
    assert compiled.host["compiled_call"] == 3 and "module_call" not in compiled.host
    eager, asked = (predict(plain, gpu=gpu, engine=how) for how in ("eager", "compile"))
    assert asked.host_us < eager.host_us
    assert predict(compiled, gpu=gpu) == asked
    assert predict(compiled_by(mlp()), x, torch.sum, gpu=gpu) == asked
    graphed = compiled_by(mlp(), mode="reduce-overhead")
    assert capture(graphed, x, torch.sum).engine == "compile+graph"


def test_torch_compile_of_parts_of_a_module_is_said() -> None:
    layers = [torch.compile(nn.Linear(8, 6)), nn.ReLU(), in_place(nn.Linear(6, 3))]
    partly = capture(nn.Sequential(*layers), torch.randn(5, 8), torch.sum)
    assert partly.engine == "eager"
    (told,) = partly.remarks
    assert told.startswith("0 and 1 more: torch.compile of parts of a model is forecast eager; ")


def test_an_encoder_is_written_out_in_inference_as_in_training() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2), torch.randn(2, 8, 16)
    steps = [capture(encoder, x, lambda y: y.sum(), mode=m) for m in ("train", "infer")]
    trained, inferred = (products(step, "forward") for step in steps)
    assert trained == inferred and len(trained) == 2 * 4
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("masked", [True, False])
def test_flex_attention_is_one_op_and_causal_where_it_has_a_mask(masked: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Flex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, "cpu")
            how = {"block_mask": mask} if masked else {}
            return flex_attention(x, x[:, :2], x[:, :2], enable_gqa=True, **how)

    x = torch.randn(2, 4, 128, 16, requires_grad=True)
    calls = capture(Flex(), x, lambda y: y.sum(), optimizer="none").calls
    (forward, backward) = (c for c in calls if c.op.startswith("itercast.sdpa"))
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert forward.kwargs["is_causal"] is masked
    assert [t.shape[1] for t in forward.args[:3]] == [4, 2, 2]


def test_data_that_nothing_is_known_of_is_named() -> None:
    class Masked(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[x > 0]

    with pytest.raises(ValueError, match=r"depends on data in aten\.nonzero"):
        capture(Masked(), torch.randn(5, requires_grad=True), "none", optimizer="none")


def test_masks_and_indices_given_for_real_are_followed() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 3)

        def forward(self, x: Any, labels: Any) -> Any:
            kept, kinds = labels != -100, labels.unique()
            y = self.head(x[kept])
            return y.sum() * kinds.numel() + x.masked_select(kept[:, None]).sum()

    labels = torch.tensor([-100, 4, 2, -100, 4])
    step = capture(Masked(), (torch.randn(5, 8), labels))
    assert products(step, "forward") == [(3, 3)]  # of five rows three have a label
    count = next(c.args[1] for c in step.calls if c.op == "aten.mul.Tensor")
    assert count == 3  # kinds of label
    rows, chosen = (c.outputs[0] for c in step.calls if c.op == "aten.index.Tensor")
    assert rows.shape == (3, 8) and chosen.shape == (24,)  # masked_select: at positions, too


def test_a_loop_over_experts_waits_for_the_gpu() -> None:
    """Counts, and each expert's tokens: the host must know their number before it goes on.

    The list of counts is read once.
    """

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            chosen, y = x[:, :4].argmax(-1), torch.zeros_like(x)
            assert chosen.bincount(minlength=4).tolist() == [16] * 4
            for i, expert in enumerate(self.experts):
                (tokens,) = torch.where(chosen == i)
                y = y.index_add(0, tokens, expert(x[tokens]))
            return y + expert(x[chosen == 0]).sum()

    calls = capture(Loop(), torch.randn(64, 8), "none").calls
    waiting = [c.op.split(".")[1] for c in calls if priceable(c).waits]
    assert waiting == ["bincount", "_local_scalar_dense", *["nonzero"] * 5]


def test_inputs_are_left_as_they_were() -> None:
    class Emptying(nn.Module):
        def forward(self, x: Any, kinds: Any) -> Any:
            kinds.zero_()
            return x.sum()

    kinds = torch.tensor([1, 2])
    capture(Emptying(), (torch.randn(3, requires_grad=True), kinds), optimizer="none")
    assert kinds.tolist() == [1, 2]


def test_large_batches_have_no_padding() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(10, 2)

        def forward(self, tokens: Any) -> Any:
            if (tokens == 0).any() or not tokens.ne(0).all() or tokens.ne(0).sum(1).max() < 2:
                raise ValueError
            return self.tokens(tokens)[tokens != -100].sum()

    tokens = torch.zeros(2**13, 2**12, dtype=torch.int64)
    looked_up = [c for c in capture(Padded(), tokens, batch=2).calls if c.op == "aten.index.Tensor"]
    assert looked_up[0].outputs[0].shape == (2**25, 2)


def test_numbers_are_finite() -> None:
    class Careful(nn.Module):
        def forward(self, x: Any) -> Any:
            if x.isnan().any() or x.isinf().any() or not x.isfinite().all():
                raise FloatingPointError
            return x * 2

    x = torch.randn(5, requires_grad=True)
    assert capture(Careful(), x, "none", optimizer="none").calls


def test_a_plan_splits_the_batch_of_a_replica() -> None:
    plan = ParallelPlan.parse("dp=2,pp=2,micro=4")
    assert micro_size("gpt2-small", plan, None, None) == {"batch": 2, "seq": 1024}  # 8 over 4
    assert micro_size(Path("x.json"), plan, 16, 128) == {"batch": 4, "seq": 128}
    assert micro_size(mlp(), plan, None, None) == {"batch": None, "seq": None}
