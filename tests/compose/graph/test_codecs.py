"""Compressed messages: what is sent, and the kernels around it, counted by hand."""

from collections import Counter

import pytest
from law_case import rank_for
from plan_case import GPU, capture_at, experts_at, product_flops

from itercast.capture.opcall import StepCapture, TensorSpec
from itercast.capture.plan import ParallelPlan
from itercast.compose.graph.codecs import Codec
from itercast.compose.graph.rewrite import COLLECTIVE
from itercast.compose.pricing.rank_graph import rank_graph
from itercast.compose.simulate.iteration import evaluate
from itercast.compose.simulate.replicas import micro_batches
from itercast.compose.simulate.stage_rank import stage_messages
from itercast.microbench.ops.memory.fused import CALL

WIDTH, BATCH, SEQ = 96, 4, 16  # of the small GPT in fp32
ACTIVATION = BATCH * SEQ * WIDTH * 4  # bytes
POSITIONS = SEQ * WIDTH * 4  # bytes
BITS = {"int8": 8 + 16 / 128, "fp8": 8 + 16 / 128, "int4": 4 + 16 / 128}


def graph(text: str, step: StepCapture | None = None) -> StepCapture:
    """The rank's step of the small GPT under a plan."""
    return rank_graph(step or capture_at(BATCH, SEQ), ParallelPlan.parse(text), GPU).capture


def sent(found: StepCapture, axis: str) -> Counter[tuple[str, int]]:
    """Kind and bytes of the messages of activations, of forward and backward."""
    calls = [c for c in found.calls if c.op == COLLECTIVE and c.kwargs["axis"] == axis]
    return Counter((c.kwargs["kind"], c.args[0].nbytes) for c in calls if c.phase != "loss")


def kernels(found: StepCapture) -> Counter[tuple[int, int]]:
    """Bytes that the kernels of codecs read and write."""
    calls = (c for c in found.calls if c.op == CALL)
    return Counter((c.args[0].nbytes, c.outputs[0].nbytes) for c in calls)


@pytest.mark.parametrize("codec", BITS)
def test_blocks_of_128_numbers_share_a_scale_of_16_bits(codec: str) -> None:
    """1,280 numbers in int8: as many bytes, and ten scales of two."""
    found = Codec.of(codec)
    assert found is not None and not found.summable
    assert found.ratio("fp32") == BITS[codec] / 32 and found.ratio("bf16") == BITS[codec] / 16
    t = TensorSpec(shape=(10, 128), dtype="fp32", storage=1)
    if codec == "int8":
        assert found.coded(t, 2).nbytes == 1280 + 10 * 2


def test_quantised_sums_are_exchanged_summed_and_gathered() -> None:
    """tp=2: each all_reduce becomes two messages of the codes, and three kernels."""
    plain, made = graph("tp=2"), graph("tp=2,compress_tp=int8")
    count = sent(plain, "tp")["all_reduce", ACTIVATION]
    codes = round(ACTIVATION / 4 * BITS["int8"] / 32) * 4
    whole = Counter({k: n for k, n in sent(plain, "tp").items() if k[1] != ACTIVATION})
    assert sent(made, "tp") - whole == {("all_to_all", codes): count, ("all_gather", codes): count}
    half = round(ACTIVATION / 8 * BITS["int8"] / 32) * 4
    added = kernels(made) - kernels(plain)
    assert added == {
        (ACTIVATION, codes): count,  # encode
        (codes, half): count,  # sum a part
        (codes, ACTIVATION): count,  # decode
    }
    assert product_flops(made.calls) == product_flops(plain.calls)


def test_parts_are_encoded_before_they_are_gathered() -> None:
    """sp: what is gathered is encoded in parts, what is scattered is decoded to parts."""
    plain, made = graph("tp=2,sp"), graph("tp=2,sp,compress_tp=0.25")
    before, after = sent(plain, "tp"), sent(made, "tp")
    for kind in ("all_gather", "reduce_scatter"):
        assert after[kind, ACTIVATION // 4] == before[kind, ACTIVATION] > 0
    added = kernels(made) - kernels(plain)
    gathers, scatters = (before[k, ACTIVATION] for k in ("all_gather", "reduce_scatter"))
    assert added == {
        (ACTIVATION // 2, ACTIVATION // 8): gathers,
        (ACTIVATION // 4, ACTIVATION): gathers,
        (ACTIVATION, ACTIVATION // 4): scatters,
        (ACTIVATION // 4, ACTIVATION // 2): scatters,
        (POSITIONS // 2, POSITIONS // 8): 1,  # the gradient of the table of positions
        (POSITIONS // 4, POSITIONS): 1,
    }


def test_a_cosine_transform_is_two_products() -> None:
    """A quarter of the coefficients of blocks of 64: 2 * numbers * 16 flops each way, summed."""
    plain, made = graph("tp=2"), graph("tp=2,compress_tp=dct:0.25")
    count = sent(plain, "tp")["all_reduce", ACTIVATION]
    assert sent(made, "tp")["all_reduce", ACTIVATION // 4] == count
    added = product_flops(made.calls) - product_flops(plain.calls)
    assert added == count * 2 * (2 * ACTIVATION // 4 * 16)


def test_tokens_between_experts() -> None:
    step = experts_at(BATCH, SEQ)
    plain, made = graph("dp=2,ep=2", step), graph("dp=2,ep=2,compress_ep=0.5", step)
    assert sent(made, "ep") == {(kind, n // 2): k for (kind, n), k in sent(plain, "ep").items()}
    assert product_flops(made.calls) == product_flops(plain.calls)
    added = kernels(made) - kernels(plain)
    assert sum(added.values()) == 2 * sum(sent(plain, "ep").values())


def test_between_stages_kernels_are_part_of_the_message() -> None:
    """1 us per KiB of a message; encoding and decoding take the price of any such kernel."""

    def times(text: str) -> list[tuple[str, float]]:
        found = stage_messages(rank_for(capture_at(BATCH, SEQ), text, GPU))
        return [(op.op, op.duration_us) for op in found[0]]

    assert times("pp=2,micro=2") == [("send_recv", ACTIVATION / 1024)]
    encode, message, decode = times("pp=2,micro=2,compress_pp=0.25")
    assert message == ("send_recv", ACTIVATION / 4 / 1024)
    assert encode == decode and encode[0] == CALL and encode[1] > 0


def test_quantised_gradients_of_every_bucket() -> None:
    """DDP's all_reduce is an exchange and a gather, of about a quarter of the bytes."""
    step = capture_at(BATCH, SEQ)

    def messages(text: str) -> list[tuple[str, int]]:
        run = micro_batches(rank_for(step, text, GPU), "adamw")[1]
        return [(op.op, round(1024 * op.duration_us)) for op in run.sent]

    plain = [n for kind, n in messages("dp=2") if kind == "all_reduce"]
    coded = messages("dp=2,compress=int8")
    for kind in ("all_to_all", "all_gather"):
        found = [n for k, n in coded if k == kind]
        assert found == [round(n * BITS["int8"] / 32) for n in plain]
    outcomes = [evaluate(rank_for(step, p, GPU), "adamw") for p in ("dp=2", "dp=2,compress=int8")]
    kernels_us = outcomes[1].compute_us - outcomes[0].compute_us
    assert kernels_us > 0  # encode, sum, decode
    assert outcomes[0].memory == outcomes[1].memory
