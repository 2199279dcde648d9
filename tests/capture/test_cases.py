"""Named models: published sizes, layers by hand, a capture that equals its run."""

import math
import subprocess
import sys
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from clockwork import ticking

from itercast.capture.cases.inputs import token_loss
from itercast.capture.cases.registry import case, case_names, cases_of
from itercast.capture.opcall import TensorSpec
from itercast.capture.recorder.log import capture_step
from itercast.capture.step import StepSettings, make_step
from itercast.compose.capture_model import capture
from itercast.compose.predict import predict
from itercast.extras.graphs.sampled import sampled_vertices
from itercast.extras.published.examples.course_lm import CourseLm, written_loss
from itercast.extras.published.examples.detection import Ssd, detection_loss
from itercast.extras.published.examples.transformer_xl import TransformerXL, by_distance
from itercast.extras.recommenders.models.ranking import CrossNetwork, DeepFm
from itercast.extras.recommenders.models.sequences import Hstu
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.iterations.measure import PHASES, measure_iteration
from itercast.microbench.ops import families, find_family

MEASURED = [n for n in case_names() if case(n).measured]
SMALL = [n for n in (*MEASURED, *(c.name for c in cases_of("others"))) if n.endswith("-s")]
SMALL_RECOMMENDERS = [c.name for c in cases_of("recommenders") if c.name.endswith("-s")]
BOTTOM = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 128 + 128
OVER = 1024 * 1024 + 1024 + 1024 * 512 + 512 + 512 * 256 + 256 + 256 + 1
CROSSED = 27 * 128  # dense features and 26 tables
CROSS = 3 * (2 * CROSSED * 512 + CROSSED)  # three layers of rank 512
ITEMS = 26_744  # of MovieLens 20M
VOLUMES = [3, 32, 32, 64, 64, *3 * [128], *3 * [256], *6 * [512]]

PUBLISHED_PARAMETERS = {
    "cs336-xl": 3_406_809_600,  # as a run of it printed
    # embeddings, last norm, layers: one of transformers itself
    "hf-gpt2": (4000 + 1024) * 256 + 512 + 3 * (12 * 256**2 + 13 * 256),
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # arXiv:2005.14165 rounds it to 175 B
    "vgg13": 133_047_848,
    # convolutions of 27 weights, biases, norms; the last layer
    "vgg3d": sum(27 * a * b + 3 * b for a, b in pairwise(VOLUMES)) + 512 * 10 + 10,
    # layers, 14 tables (ends, every other layer), gates of 32 channels, two factors a layer
    "nanochat-d24": 24 * 12 * 1536**2 + 14 * 32_768 * 1536 + 12 * 32 * 12 + 2 * 24,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "llama-1b": 1_100_048_384,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "mixtral-8x7b": 46_702_792_704,
    "vit-b": 86_567_656,
    "vit-large": 304_326_632,
    "resnet-50": 25_557_032,
    "dlrm-criteo": 32_709_138 * 128 + 171_392 + 2_197_505 + 1024,  # tables, bottom, top, pad
    # bottom, top over 128 features and 351 products
    "dlrm-mlperf": 204_184_588 * 128 + BOTTOM + (128 + 351) * 1024 + 1024 + OVER,
    "dlrm-dcnv2": 204_184_588 * 128 + BOTTOM + CROSS + CROSSED * 1024 + 1024 + OVER,
    # items, positions; layers: two norms, u v q k, output, biases of distances
    "hstu-large": ITEMS * 256 + 200 * 256 + 16 * (1024 + 256 * 1024 + 256 * 256 + 256 + 399),
    # table and bias; biases of distances; layers: 5 w^2, 2 w h + w + h, norms
    "transformer-xl-base": 267_735 * 513 + 1024 + 16 * (1_310_720 + 2_099_712 + 2048),
    "transformer-xl-large": 267_735 * 1025 + 2048 + 18 * (5_242_880 + 8_393_728 + 4096),
    # ResNet-50 less its last stage and head; added maps; boxes and classes
    "ssd300": 25_557_032 - 14_964_736 - 2_049_000 + 3_773_696 + 9 * 13_824 * 85 + 30 * 85,
}


@pytest.mark.parametrize("name", [*SMALL, *SMALL_RECOMMENDERS])
def test_every_op_that_a_step_calls_can_be_measured(name: str) -> None:
    points = {(family.name, p) for family, p in map(find_family, capture(name).calls) if family}
    assert len(points) > 5
    for family, point in points:
        families()[family].build(point, "cpu").run()


def described(t: TensorSpec) -> tuple[Any, ...]:
    """Shape, dtype and strides; how far apart elements lie along a dimension of one is left out.

    Kernels choose it freely: a convolution's gradient has other numbers there with one thread.
    """
    strides = tuple(step for size, step in zip(t.shape, t.stride, strict=False) if size > 1)
    return t.shape, t.dtype, strides


def sequence(name: str, fake: bool) -> list[Any]:
    """Everything that the calls of a step of a quarter of the batch say but storage numbers."""
    chosen = case(name)
    batch = max(2, chosen.batch // 4)
    inputs = chosen.inputs
    found = capture_step(
        chosen.build, lambda: inputs(batch, chosen.seq), chosen.loss, StepSettings(), fake=fake
    )
    return [
        (c.op, c.phase, [described(t) for t in (*c.tensors(), *c.outputs)]) for c in found.calls
    ]


@pytest.mark.parametrize("name", SMALL)
def test_a_measured_case_runs_and_its_capture_equals_its_run(name: str) -> None:
    """But for a workspace of LSTMs."""
    fake, real = (sequence(name, fake=f) for f in (True, False))
    if "lstm" in name:
        fake, real = ([call[:2] for call in some] for some in (fake, real))
        assert [op for op, _ in fake].count("aten.mkldnn_rnn_layer.default") == 2
    assert fake == real


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_published_architectures_have_their_published_parameters(name: str) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in case(name).build().parameters())
    assert count == PUBLISHED_PARAMETERS[name]
    assert not case(name).measured


def test_experts_share_the_tokens_evenly() -> None:
    chosen, inputs = case("moe-s"), case("moe-s").inputs(2, 32)
    calls = capture_step(chosen.build, lambda: inputs, chosen.loss, StepSettings()).calls
    forward = [c for c in calls if c.op == "aten.topk.default"]
    assert [c.outputs[0].shape for c in forward] == [(4, 16), (4, 16)]  # 64 tokens, 4 experts


def test_names_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None\n"
    code += "import itercast.capture.cases.registry as r; print(len(r.case_names()))"
    subprocess.run([sys.executable, "-c", code], check=True)
    known = r"gpt-s, .*; all \d+: itercast list cases"
    with pytest.raises(ValueError, match=f"unknown case 'gpt-9'; known: {known}$"):
        case("gpt-9")


def test_measured_rows_state_phases_and_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock ticks 0.1 s at the start, at each of 5 phases and at the end."""
    ticking(monkeypatch)
    times = iter([{"anchor_us": 4.0, "serial_us": 1.0}, {"anchor_us": 9.0, "serial_us": 1.0}] * 500)
    asked = iteration_of(case("mlp-s"))
    row = measure_iteration(case("mlp-s"), asked, "cpu", repetitions=6, anchor=lambda: next(times))
    assert row["samples"] >= 6
    assert row["anchor_us"] == pytest.approx(6, rel=0.2)  # sqrt(4 * 9)
    assert row["serial_us"] == 1.0
    assert [row[f"{p}_us"] for p in PHASES] == [0.1e6] * 5
    assert row["time_us"] == 6 * 0.1e6


def test_no_other_work_is_between_short_steps() -> None:
    """The anchor runs before, and once in a quarter of a second: of short steps not beside each."""
    asked, anchors = iteration_of(case("mlp-s")), list[float]()

    def anchor() -> dict[str, float]:
        anchors.append(5.0)
        return {"anchor_us": 5.0, "serial_us": 1.0}

    begin_s = time.monotonic()
    row = measure_iteration(case("mlp-s"), asked, "cpu", anchor=anchor)
    whole_s = time.monotonic() - begin_s  # a busy machine stops between steps
    assert row["samples"] >= 20 and row["anchor_us"] == pytest.approx(5.0)
    assert 2 <= len(anchors) <= min(row["samples"] / 2, 2 + whole_s / 0.25)


def test_a_cross_layer_by_hand() -> None:
    """W = 2 I, b = 1: x * (2 x + 1) + x = 2 x^2 + 2 x; the second layer starts from its result."""
    net = CrossNetwork(1, 2)
    for up in net.up:
        up.weight.data.fill_(2.0)
        up.bias.data.fill_(1.0)
    assert net(torch.tensor([[3.0]])).item() == 3 * (2 * 24 + 1) + 24


def test_deepfm_sums_the_products_of_all_pairs() -> None:
    """Three tables, two columns: v0 v1 + v0 v2 + v1 v2, beside zero weights of all else."""
    model = DeepFm(features=1, rows=(4, 4, 4), pooling=(1, 1, 1), width=2, hidden=(3,))
    for name, p in model.named_parameters():
        if not name.startswith("tables"):
            p.data.zero_()
    index = torch.tensor([1, 2, 3])
    a, b, c = (bag.weight[i] for bag, i in zip(model.tables.bags, index, strict=True))
    found = model(torch.zeros(1, 1), index, torch.zeros(3, 1, dtype=torch.int64))
    torch.testing.assert_close(found[0], a @ b + a @ c + b @ c)


def test_hstu_does_not_look_ahead() -> None:
    model = Hstu(items=20, width=8, layers=2, heads=2, head=4, seq=5)
    history, candidates = torch.randint(0, 20, (1, 5)), torch.randint(0, 20, (1, 5, 3))
    changed = history.clone()
    changed[0, 4] = (history[0, 4] + 1) % 20
    before, after = model(history, candidates), model(changed, candidates)
    torch.testing.assert_close(before[:4], after[:4])
    assert not torch.allclose(before[4], after[4])


@pytest.mark.parametrize("name", SMALL_RECOMMENDERS)
def test_small_recommenders_train(name: str) -> None:
    """A step changes the parameters; sizes of the batch are those asked for."""
    chosen = case(name)
    model, inputs = chosen.build(), chosen.inputs(4, chosen.seq)
    before = [p.detach().clone() for p in model.parameters()]
    make_step(model, inputs, chosen.loss, StepSettings(optimizer=chosen.optimizer))()
    assert any(not torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("name", [*SMALL_RECOMMENDERS, "dlrm-mlperf", "dlrm-dcnv2"])
def test_recommenders_are_forecast_alone_and_with_sharded_tables(name: str) -> None:
    """Nothing is allocated: the tables of MLPerf have 105 GB. Adam refuses sparse gradients."""
    small: dict[str, Any] = {"gpu": "h100-sxm-80gb", "batch": 64}
    alone, sharded = (predict(name, plan=plan, **small) for plan in ("", "dp=4,shard=greedy"))
    assert 0 < alone.iteration_us < 1e7 and sharded.fits
    assert sharded.memory_by_bytes["parameters"] <= alone.memory_by_bytes["parameters"]
    if name == "dlrm-dcnv2":
        with pytest.raises(ValueError, match="sparse gradients"):
            predict(name, optimizer="adamw", **small)


UGACHE = {  # distinct vertices of a step: bytes of features over those of a row (run logs, SOSP'23)
    "sage-papers": 540_121_498 / 512,
    "sage-friendster": 1_213_328_261 / 1024,
    "sage-mag": 1_621_350_154 / 1536,
}


def test_distinct_vertices_of_a_sample() -> None:
    """100 of a million draw 5 each: 500 - 0.1 distinct; then these 600 draw 4: 2,900 in all.

    Published steps within a third, with one exponent, which was chosen on these three graphs.
    """
    sizes = {"vertices": 1_000_000, "degree": 9, "fanout": (5, 4), "skew": 0.0}
    assert sampled_vertices(100, sizes) == [100, 600, 100 + round(1e6 * -math.expm1(-0.0029))]
    assert sampled_vertices(100, {**sizes, "degree": 2}) == [100, 300, 900]  # as it has
    assert sampled_vertices(100, {**sizes, "vertices": 150})[-1] == 150
    for name, published in UGACHE.items():
        read = len(case(name).inputs(8000, 0)["vertices"])
        assert abs(math.log(read / published)) < math.log(4 / 3)


@pytest.mark.parametrize(
    "name, numbers",
    [  # as https://github.com/kuangliu/pytorch-cifar prints; one table and 12 of 12 width^2
        ("resnet18-cifar10", 11_173_962),
        ("speedrun-gpt", 50_304 * 768 + 12 * 12 * 768**2),
        ("speedrun-gpt-modern", 50_304 * 768 + 12 * 12 * 768**2),
    ],
)
def test_models_of_published_steps_have_their_parameters(name: str, numbers: int) -> None:
    model, inputs = case(name).build(), case(name).inputs(1, 8)
    assert sum(p.numel() for p in model.parameters()) == numbers
    assert torch.isfinite(model(**inputs)).all()


def test_the_course_s_decoder_and_its_loss_are_written_op_by_op() -> None:
    """As token_loss; with the loop its step ends by updating all parameters."""
    tokens, looped = torch.arange(16).view(2, 8), CourseLm(32, 2, 4, 64, 16, loop=True)
    plain = CourseLm(32, 2, 4, 64, 16, loop=False)
    plain.load_state_dict(looped.state_dict())
    logits = plain(tokens)
    loss = token_loss(logits, {"tokens": tokens})
    torch.testing.assert_close(written_loss(logits, {"tokens": tokens}), loss)
    torch.testing.assert_close(looped(tokens), logits)
    pairs = zip(looped.parameters(), plain.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)


def test_a_sampled_network_sums_over_blocks_from_the_features_to_the_batch() -> None:
    chosen = case("sage-s")
    inputs = chosen.inputs(16, 0)
    first, last = inputs["blocks"]
    assert first.shape[1] == len(inputs["vertices"]) and first.shape[0] == last.shape[1]
    assert last.shape[0] == len(inputs["labels"]) == 16
    assert chosen.build()(**inputs).shape == (16, 10)


def test_features_in_host_memory_are_fetched_as_often_as_the_cache_lacks_them() -> None:
    plans = ("", "tables=uvm:0.5", "tables=uvm:0.1", "tables=uvm")
    asked = {"gpu": "a100-sxm-80gb", "indices": "zipf:0.85:distinct"}
    times = [predict("sage-s", plan=p, **asked).exposed_comm_us for p in plans]
    assert times == sorted(times) and times[0] == 0 and len(set(times)) == 4
    bytes_read = len(case("sage-s").inputs(128, 0)["vertices"]) * 64 * 4
    assert times[-1] == pytest.approx(bytes_read / 24.57e3, rel=0.01)  # each distinct vertex once


def test_an_image_of_300_pixels_has_8732_places() -> None:
    """Maps of 38, 19, 10, 5, 3 and 1 pixels a side: 4, 6, 6, 6, 4 and 4 boxes at each."""
    assert 4 * 38**2 + 6 * (19**2 + 10**2 + 5**2) + 4 * (3**2 + 1) == 8732
    with torch.device("meta"):
        where, kinds = Ssd(81)(torch.empty(2, 3, 300, 300))
    assert (where.shape, kinds.shape) == ((2, 4, 8732), (2, 81, 8732))


def test_a_detection_s_loss_by_hand() -> None:
    """One object among six places: its box is off by 2, its class and three others even odds."""
    where, labels = torch.zeros(1, 4, 6), torch.tensor([[1, 0, 0, 0, 0, 0]])
    boxes = torch.zeros(1, 4, 6)
    boxes[0, 0, 0] = 2  # beyond 1 the distance less a half
    boxes[0, 0, 5] = 9  # no object: does not matter
    kinds = torch.zeros(1, 2, 6)
    kinds[0, 0, 4:] = 50  # surely nothing
    found = detection_loss((where, kinds), boxes, labels)
    torch.testing.assert_close(found, torch.tensor(1.5 + 4 * math.log(2)))
    nothing = (torch.zeros(1, 4, 6), torch.zeros(1, 2, 6))
    assert detection_loss(nothing, torch.zeros(1, 4, 6), torch.zeros_like(labels)) == 0


def test_transformer_xl_attends_by_distance_and_remembers() -> None:
    """Scores of 3 places by how far back they are: row i moves left by what is ahead of it.

    Words ahead do not matter, the memory does. Its capture equals its run but for copies in the
    backward of ReLU in place on a view, which fake tensors go without.
    """
    scores = torch.tensor([[2, 1, 0], [12, 11, 10]]).float().view(1, 1, 2, 3)
    found = by_distance(scores)[0, 0]
    assert found[0, :2].tolist() == [1, 0]  # the third place is ahead
    assert found[1].tolist() == [12, 11, 10]

    def model() -> TransformerXL:
        return TransformerXL(width=8, layers=2, heads=2, hidden=16, vocab=11, dropped=0.1)

    def inputs() -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(0, 11, (5, 3)), "memory": torch.randn(2, 5, 3, 8)}

    one, given = model().eval(), inputs()
    before, states = one(**given)
    later = given["tokens"].clone()
    later[3:] = (later[3:] + 1) % 11
    after, _ = one(later, given["memory"])
    torch.testing.assert_close(after[: 3 * 3], before[: 3 * 3])
    assert not torch.allclose(after[3 * 3 :], before[3 * 3 :])
    assert not torch.allclose(one(given["tokens"], states)[0], before)

    def calls(fake: bool) -> list[object]:
        loss = lambda output, given: token_loss(output[0], given)  # noqa: E731
        found = capture_step(model, inputs, loss, StepSettings(), fake=fake)
        alike = [c for c in found.calls if c.phase != "backward" or "mm" in c.op]
        return [(c.op, c.phase, [(t.shape, t.dtype) for t in c.outputs]) for c in alike]

    assert calls(fake=True) == calls(fake=False)
