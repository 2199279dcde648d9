"""Layers of captured steps: where they are cut, captures at other sizes, memory that is cold."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from plan_case import GPU, Flat, capture_at, experts_at
from torch import nn

from itercast.capture.cases.registry import case
from itercast.capture.opcall import OpCall, ParamSpec, StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.capture.recorder.truncate import Shortened, capture_shortened, shorten_lists
from itercast.capture.step import StepSettings
from itercast.compose.capture_model import capture, capture_case
from itercast.compose.graph.layers import Layer, split_layers
from itercast.compose.parallel.placement import cluster_for
from itercast.compose.plan_search.sizes import CaptureAt, CapturesBySize
from itercast.compose.pricing.layer_prices import price_model
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.work import Step, Work, fold
from itercast.compose.simulate.rank import Lanes
from itercast.compose.simulate.timeline import simulate


def test_a_block_starts_after_the_residual_sum(gpt: StepCapture) -> None:
    layers = split_layers(gpt)
    assert [(x.name, x.count) for x in layers] == [("first", 1), ("blocks.0", 2), ("last", 1)]
    block = layers[1]
    assert gpt.calls[block.forward[0]].op == "aten.native_layer_norm.default"
    assert block.output_bytes == 4 * 64 * 96 * 4  # batch * tokens * width * fp32: one tensor
    assert sum(x.parameter_bytes * x.count for x in layers) == sum(p.nbytes for p in gpt.parameters)


def test_a_deep_model_captured_by_two_layers_is_the_deep_model() -> None:
    """Four blocks: the same layers, parameters and saved bytes either way."""
    whole, short = (
        split_layers(capture_case(case("gpt-l"), StepSettings(), 1, 64, shallow=shallow))
        for shallow in (False, True)
    )
    facts = [
        [(x.name, x.count, x.parameter_bytes, x.saved_bytes, x.output_bytes) for x in layers]
        for layers in (whole, short)
    ]
    assert facts[0] == facts[1]
    assert facts[0][1][1] == 4


class Pair(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(x))
        return y


class Alternating(nn.Module):
    """Eight layers, each second one wide, or layers of other widths."""

    def __init__(self, widths: Sequence[int] = (8, 32) * 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Pair, widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("widths", "order"),
    [
        ([8, 32] * 4, (0, 1, 2, 1, 2, 1, 2, 3)),  # two periods
        ([8, 8, 8, 8, 32] * 2, (0, 1, 1, 1, 4, 1, 1, 1, 1, 9)),  # of each kind two
        ([8] + [32] * 9, (0, 1, 2, 2, 2, 2, 2, 2, 2, 9)),
        ([8, 32, 8, 8, 32, 8, 32, 32, 8, 32, 32], (0, 1, 2, 2, 4, 2, 4, 4, 2, 4, 10)),  # no period
    ],
)
@pytest.mark.parametrize("shallow", [False, True])
def test_layers_of_two_kinds_are_captured_by_few_of_each(
    widths: list[int], order: tuple[int, ...], shallow: bool
) -> None:
    """Weights and biases in fp32 of 8 x 8 + 8 x 8 + 16 numbers, and of 8 x 32 + 32 x 8 + 40."""
    built = list[Alternating]()

    def build() -> Alternating:
        built.append(Alternating(widths))
        return built[-1]

    step = capture_shortened(
        "two kinds",
        build,
        lambda: {"x": torch.zeros(4, 8)},
        lambda out, _: out.sum(),
        StepSettings(),
        samples=4,
        tokens=0,
        shallow=shallow,
    )
    assert step.order == ({"blocks": order} if shallow else {})
    assert all(isinstance(block, Pair) and not block._forward_hooks for block in built[-1].blocks)
    layers = [x for x in split_layers(step) if x.name.startswith("blocks")]
    found = [x.parameter_bytes for x in layers for _ in range(x.count)]
    assert found == [4 * {8: 144, 32: 552}[width] for width in widths]


def test_layers_for_which_one_stands_are_priced_once() -> None:
    """Eight that alternate are priced as four: the first and the last, and the two between."""
    step = capture(Alternating((8, 32) * 2), {"x": torch.zeros(4, 8)}, lambda out: out.sum())
    step, plan = replace(step, order={"blocks": (0, 1, 2, 1, 2, 1, 2, 3)}), ParallelPlan()
    priced = price_model(step, plan, PriceBook(Flat(), GPU, 0), cluster_for(plan, GPU)).layers
    assert len([x for x in priced if x.numbered]) == 8
    assert len({id(x) for x in priced if x.numbered}) == 4


def test_a_list_inside_a_layer_stays_whole() -> None:
    """Parameters of ``stages.1.blocks.5`` are those of the layer ``stages.1``."""
    stages = nn.ModuleList()
    for width in (8, 32):
        stages.append(nn.ModuleDict({"blocks": nn.ModuleList(Pair(width) for _ in range(6))}))
    assert shorten_lists(nn.ModuleDict({"stages": stages}), ExitStack()) == Shortened()


class Skipping(Alternating):
    """The same, of which a step uses the first three layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in list(self.blocks)[:3]:
            x = block(x)
        return x


def test_a_step_that_skips_layers_of_alternating_kinds_is_captured_whole() -> None:
    for model, lists in ((Alternating, {"blocks"}), (Skipping, set())):
        chosen = replace(case("mlp-s"), name=model.__name__, build=model)
        chosen = replace(chosen, inputs=lambda *_: {"x": torch.zeros(4, 8)})
        chosen = replace(chosen, loss=lambda out, _: out.sum())
        step = capture_case(chosen, StepSettings(), 4, 0, shallow=True)
        assert step.order.keys() == lists


def test_folded_work_is_the_host_and_the_lane_op_by_op() -> None:
    #  host    |5|5|5|5|
    #  compute   |=2=|  |==20==|=1=|=1=|      launches at 5, 10, 15, 20
    steps = [Step(us, 5) for us in (2, 20, 1, 1)]
    work = fold(steps, on_cpu=False)
    assert (work.host_us, work.lane_us, work.path_us) == (20, 24, 10 + 20 + 1 + 1)
    parts = fold(steps[:1], on_cpu=False).then(fold(steps[1:], on_cpu=False))
    assert parts == work
    many = Work()
    for _ in range(7):
        many = many.then(work)
    assert work.times(7) == many
    assert fold(steps, on_cpu=True) == Work(0, 44, 44)


def test_the_host_waits_for_an_op_whose_shape_depends_on_data() -> None:
    #  host    |5|5|      waits      |5|        the last op could have been launched at 15
    #  compute   |======20======|=2=|  |=4=|
    steps = [Step(20, 5), Step(2, 5, waits=True), Step(4, 5)]
    work = fold(steps, on_cpu=False)
    after = (20 + 2 + 5, 20 + 2 + 5 + 4)  # of a host that has launched all but these before
    assert work == Work(5 + 20 + 2 + 5, 26, 5 + 20 + 2 + 5 + 4, 0, (), *after)
    for cut in range(4):
        first, rest = (fold(part, on_cpu=False) for part in (steps[:cut], steps[cut:]))
        assert first.then(rest) == work
    assert work.times(3) == work.then(work).then(work) == fold(3 * steps, on_cpu=False)
    for before in (0, 50):  # lanes that are free; a kernel that runs when the host is done
        ends = []
        for shown in (True, False):
            lanes = Lanes(on_cpu=False)
            lanes.work(fold([Step(before, 1)], on_cpu=False), "before")
            lanes.work(fold(steps, on_cpu=False, shown=shown), "waiting")
            lanes.work(fold([Step(1, 1)], on_cpu=False), "after")
            ends.append(max(s.end_us for s in simulate(lanes.tasks)))
        assert ends == [1 + (36 if before == 0 else 50 + 20 + 2 + 5 + 4) + 1] * 2


def test_shards_hold_whole_rows() -> None:
    """Eight ranks: ten rows are padded to 16; of two stacked experts their 24 rows are cut."""
    shapes = {"weight": (10, 5), "blocks.0.experts": (2, 24, 3), "scale": (1,)}
    parameters = tuple(
        ParamSpec(name=name, shape=shape, dtype="fp32", storage=i, ready_after=-1 if i else 0)
        for i, (name, shape) in enumerate(shapes.items())
    )
    none = {"forward": (0, 0), "backward": (0, 0)}
    sizes = {"saved_bytes": 0, "output_bytes": 0}
    layer = Layer(name="blocks.0", parameters=parameters, **none, **sizes)
    assert layer.padded_bytes(8, trained=False) == 4 * (16 * 5 + 2 * 24 * 3 + 8)
    assert layer.padded_bytes(8, trained=True) == 4 * 16 * 5


SIZES = [(b, s, False) for b in (1, 2, 4, 8) for s in (16, 32, 64, 128)]


def counted(capture: CaptureAt) -> tuple[CapturesBySize, list[tuple[int, int]]]:
    """The captures of a model, and the sizes at which it was run."""
    made: list[tuple[int, int]] = []

    def at(batch: int, seq: int, autocast: bool) -> StepCapture:
        made.append((batch, seq))
        return capture(batch, seq, autocast)

    captures = CapturesBySize(at)
    captures.announce(SIZES)
    return captures, made


@pytest.mark.parametrize("capture", [capture_at, experts_at])
def test_sixteen_sizes_are_derived_from_four(capture: CaptureAt) -> None:
    """Of one sample one is captured, and three of 2 to 8 samples; all equal real captures."""
    captures, made = counted(capture)
    assert [captures.at(size) for size in SIZES] == [capture(*size) for size in SIZES]
    assert sorted(made) == [(1, 128), (2, 16), (8, 16), (8, 128)]


def blocks_of(rows: int) -> CaptureAt:
    """A step of one call, which reads batch x ceil(length / ``rows``) blocks."""

    def at(batch: int, seq: int, autocast: bool) -> StepCapture:
        t = TensorSpec(shape=(batch, -(-seq // rows), seq + 1), dtype="fp32", storage=0)
        return StepCapture(calls=(OpCall(op="aten.exp.default", args=(t,), outputs=(t,)),))

    return at


def test_one_sample_with_strides_of_its_own_is_derived_from_one_sample() -> None:
    """Rows of one sample lie 1 apart, of more 16 * batch: 1 x 128 does not agree with 2 and 8."""

    def at(batch: int, seq: int, autocast: bool) -> StepCapture:
        stride = (16 * batch if batch > 1 else 1, 1)
        t = TensorSpec(shape=(seq, batch), stride=stride, dtype="fp32", storage=0)
        return StepCapture(calls=(OpCall(op="aten.exp.default", args=(t,), outputs=(t,)),))

    captures, made = counted(at)
    assert [captures.at(size) for size in SIZES] == [at(*size) for size in SIZES]
    assert sorted(made) == [(1, 16), (1, 32), (1, 128), (2, 16), (8, 16), (8, 128)]


def test_a_length_with_a_label_more_is_derived() -> None:
    """(4, 64 / 16, 64 + 1), from steps at 2 x 16, 8 x 128 and 8 x 16."""
    captures, made = counted(blocks_of(16))
    assert captures.at((4, 64, False)).calls[0].args[0].shape == (4, 4, 65)
    assert sorted(made) == [(2, 16), (8, 16), (8, 128)]


def test_a_step_that_is_not_a_product_of_its_size_is_captured() -> None:
    """ceil(16 / 24) = 1 and ceil(128 / 24) = 6 blocks, but 6 / 1 is not 128 / 16."""
    captures, made = counted(blocks_of(24))
    assert captures.at((4, 64, False)).calls[0].args[0].shape == (4, 3, 65)
    assert (4, 64) in made


def test_a_size_that_the_model_refuses_stops_no_other() -> None:
    """Without captures at 8 x 128 others are captured rather than derived."""

    def at(batch: int, seq: int, autocast: bool) -> StepCapture:
        if batch * seq == 8 * 128:
            raise ValueError("too long")
        return blocks_of(16)(batch, seq, autocast)

    captures, made = counted(at)
    assert captures.at((4, 64, False)).calls[0].args[0].shape == (4, 4, 65)
    assert (4, 64) in made
    with pytest.raises(ValueError, match="too long"):
        captures.at((8, 128, False))
