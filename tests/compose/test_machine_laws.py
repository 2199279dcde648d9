"""Laws over machines and policies: a better machine is never slower, what saves memory saves it.

Held to small models under plans drawn by a seed; a longer run is ``tests/endurance/laws.py``.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from drawn_plans import drawn, is_legal
from law_case import Bare, Knowing, model, node_of, outcome, rank_for
from plan_case import GPU, Flat

from itercast.compose.forecast import rank_of
from itercast.compose.machines.factors import NAMES, Factors
from itercast.compose.pricing.host import PYTHON
from itercast.compose.pricing.layer_prices import PricedLayer
from itercast.compose.simulate.iteration import quick_us
from itercast.compose.simulate.memory.stage_memory import memory
from itercast.compose.simulate.pipeline import KEPT, Ending, StageTimes, endings
from itercast.compose.simulate.stage_rank import pipeline_of
from itercast.microbench.hardware.node import load_node
from itercast.microbench.hardware.spec import load_gpu

# Messages slow compute on the second kind of machine as they take of its SMs and memory.
MACHINES = [(GPU, node_of()), (GPU, node_of(gpus_per_node=2))]
MACHINES += [(load_gpu("a100-sxm-80gb"), load_node("dgx-a100"))]
EPSILON = 1e-9


def slack(text: str) -> float:
    """By how much a better machine may be slower: not at all but for rounding.

    What a budget recomputes is chosen by the machine's prices, to save most time of kernels; a
    schedule may gain more by another choice.
    """
    return 0.01 if "budget" in text else EPSILON


def faster(seed: int) -> tuple[Factors, Factors]:
    """Factors of a machine, and of one where some of them are lower."""
    draw = random.Random(seed)
    logs = [draw.uniform(-1, 1) for _ in NAMES]
    one = draw.randrange(2 * len(NAMES))  # as often one factor alone as all of them
    better = [
        x - draw.choice((0.01, 0.1, 0.5, 1.0)) * (one in (at, len(NAMES) + at % 1) or one >= 6)
        for at, x in enumerate(logs)
    ]
    return Factors.of_logs(logs), Factors.of_logs(better)


def check_faster(name: str, text: str, seed: int) -> None:
    """A machine none of whose factors is higher is not slower."""
    gpu, node = MACHINES[seed % len(MACHINES)]
    rank = rank_for(name, text, gpu, (Bare, Flat, Knowing)[seed // 3 % 3], node)
    times_us = []
    for factors in faster(seed):
        made = rank_of(model(name), rank.plan, rank.book.on(factors), rank.cluster)
        times_us.append(quick_us(made, "adamw"))
    assert times_us[1] <= times_us[0] * (1 + slack(text))


DRAWN = list(enumerate(drawn(70, 5)))
STAGES = list(enumerate(drawn(50, 6, least="pp")))


@pytest.mark.parametrize(("seed", "case"), [*DRAWN, *STAGES])
def test_a_machine_with_lower_factors_is_never_slower(seed: int, case: tuple[str, str]) -> None:
    check_faster(*case, seed)


RATES = [
    ("link_bytes_per_s", "node"),
    ("network_bytes_per_s", "node"),
    ("hbm_bytes_per_s", "gpu"),
    ("pcie_bytes_per_s", "gpu"),
]


def check_bandwidth(name: str, text: str, rate: str, of_what: str) -> None:
    """A machine is not slower with four times a rate."""
    times_us = []
    for factor in (1, 4):
        node, gpu = node_of(gpus_per_node=2), GPU
        changed = {rate: factor * getattr(node if of_what == "node" else gpu, rate)}
        if of_what == "node":
            node = replace(node, **changed)
        else:
            gpu = replace(gpu, name=f"{rate}-{factor}", **changed)
        times_us.append(quick_us(rank_for(name, text, gpu, Bare, node), "adamw"))
    assert times_us[1] <= times_us[0] * (1 + slack(text))


@pytest.mark.parametrize(("rate", "of_what"), RATES)
@pytest.mark.parametrize(("name", "text"), [*drawn(10, 7), *drawn(5, 8, least="pp")])
def test_four_times_a_rate_is_never_slower(name: str, text: str, rate: str, of_what: str) -> None:
    check_bandwidth(name, text, rate, of_what)


def check_smaller(name: str, text: str) -> None:
    """Half the samples, priced by flops and bytes, take no longer and need no more memory."""
    half, whole = (outcome(model(name, n), text, pricer=Bare) for n in (2, 4))
    assert half.iteration_us <= whole.iteration_us * (1 + slack(text))
    assert half.memory_bytes <= whole.memory_bytes


@pytest.mark.parametrize(("name", "text"), [*drawn(30, 9)])
def test_a_smaller_batch_is_never_slower(name: str, text: str) -> None:
    check_smaller(name, text)


@pytest.mark.parametrize(("name", "text"), [*drawn(40, 10)])
def test_lanes_of_drawn_plans_add_up_to_the_iteration(name: str, text: str) -> None:
    found = outcome(name, text)
    lanes_us = found.compute_us + found.exposed_comm_us + found.idle_us
    assert lanes_us == pytest.approx(found.iteration_us)
    assert quick_us(rank_for(name, text), "adamw") == pytest.approx(found.iteration_us)


def peak(name: str, text: str) -> int:
    """Bytes of the fullest rank."""
    return sum(memory(rank_for(name, text), "adamw").values())


def without(text: str, *keys: str) -> str:
    """A plan without some of its keys."""
    return ",".join(part for part in text.split(",") if part.partition("=")[0] not in keys)


def check_offload(name: str, text: str) -> None:
    """What is offloaded needs no more memory than if it stays."""
    kept = without(text, "offload")
    for what in ("activations", "optimizer", "parameters"):
        moved = f"{kept},offload={what}".strip(",")
        assert not is_legal(name, moved) or peak(name, moved) <= peak(name, kept)


@pytest.mark.parametrize(("name", "text"), [*drawn(60, 11)])
def test_offloading_never_raises_peak_memory(name: str, text: str) -> None:
    check_offload(name, text)


def check_zero(name: str, text: str) -> None:
    """Sharded states need no more memory but for what FSDP gathers.

    Beside a layer's parameters in use, the next ones and a copy of them to unpack: three units, or
    the same of gradients in fp32 that are packed and sent. Rows are padded.
    """
    layers = rank_for(name, text).model.layers
    units = [x.layer.parameter_bytes for x in layers if x.numbered]
    root = sum(x.layer.parameter_bytes for x in layers if not x.numbered)
    sharded = ("zero", "hsdp", "no_sync", *(["offload"] if "offload=parameters" in text else []))
    whole = peak(name, without(text, *sharded))
    assert peak(name, text) <= 1.02 * whole + 3 * max([root, *units])


@pytest.mark.parametrize(("name", "text"), [*drawn(40, 12, least="zero")])
def test_sharding_raises_peak_memory_by_gathered_layers_at_most(name: str, text: str) -> None:
    check_zero(name, text)


def check_recompute(name: str, text: str) -> None:
    """Recomputation saves no more; a policy of ops keeps results that no backward reads, too."""
    plain = without(text, "recompute", "offload")
    for how in ("full", "budget:0.2", "budget:0.5", "budget:0.9"):
        assert peak(name, f"{plain},recompute={how}".strip(",")) <= peak(name, plain)


@pytest.mark.parametrize(("name", "text"), [*drawn(30, 13)])
def test_recomputation_never_raises_peak_memory(name: str, text: str) -> None:
    check_recompute(name, text)


def check_budgets(name: str, text: str) -> None:
    """A larger budget keeps no less, and takes no longer."""
    plain = without(text, "recompute", "offload", "pp", "micro", "schedule")
    texts = [f"{plain},recompute=budget:{n / 10:g}".strip(",") for n in range(1, 11)]
    held = [sum(x.saved_bytes for x in rank_for(name, t, pricer=Bare).layers) for t in texts]
    assert held == sorted(held)
    again_us = [again(rank_for(name, t, pricer=Bare).layers) for t in texts]
    assert again_us == sorted(again_us, reverse=True)


def again(layers: Sequence[PricedLayer]) -> float:
    """Time of backward's kernels, without the Python of a policy, which is there or not."""
    kernels = (op for x in layers for op in x.backward if op.phase != PYTHON)
    return round(sum(op.duration_us for op in kernels), 6)


@pytest.mark.parametrize(("name", "text"), [*drawn(20, 14)])
def test_a_larger_budget_keeps_no_less(name: str, text: str) -> None:
    check_budgets(name, text)


def test_a_rank_s_gradients_are_complete_after_its_chunks_last_backwards() -> None:
    """Two ranks, two chunks each, two micro-batches: forwards of 1, backwards of 2.

    The last rank turns round: its chunks end at 6 + 2 and 12. The first one has F F F F to 4, waits
    for 3's backwards at 7 and 9, and runs B0 B1 of its second chunk from 7 to 11; B0 of its first
    one, which waits for the other rank's at 11, from 11 to 13, and B1 to 15: its chunks' last
    backwards start at 9 and 13, with one of 2 between them.
    """
    chunks = [StageTimes(forward_us=1, backward_us=2)] * 4
    first, _ = endings("interleaved", chunks, 2, 2)
    assert first == [
        Ending(kind="A", variant=KEPT, chunk=2, start_us=9, busy_us=0),
        Ending(kind="A", variant=KEPT, chunk=0, start_us=13, busy_us=2),
    ]


def test_backward_is_cut_into_what_earlier_layers_wait_for_and_the_rest() -> None:
    """Of five linear layers of a block of a GPT the products for weights and the sums for biases.

    In the small mixture four linear layers, one without bias, and two stacks of experts. Norms
    compute all gradients in one call, which earlier layers wait for.
    """
    linear = ["aten.mm.default", "aten.sum.dim_IntList"]
    experts = ["aten.bmm.default", "aten.bmm.default", "aten.mm.default"]
    for name, expected in (("gpt", 5 * linear), ("moe", experts + 3 * linear)):
        x = rank_for(name, "").layers[1]
        weights, inputs = x.to_weights, x.to_inputs
        assert [op.op for op in weights.backward] == expected
        assert sorted([*weights.backward, *inputs.backward], key=repr) == sorted(
            x.backward, key=repr
        )
        ready = [p.ready_after for p in weights.layer.parameters]
        assert min(ready) >= 0 and max(ready) == len(expected) - 1


def test_slower_products_do_not_shorten_what_earlier_stages_wait_for() -> None:
    """Launches of 100 us a call: both parts of backward take their launches, products of 10 or 20.

    Where the part of weights was subtracted from a backward that waits for its host, slower
    products left less of it.
    """
    rank = rank_for("gpt", "pp=2,micro=4,schedule=zb", pricer=Launched)
    found = []
    for factor in (1.0, 2.0):
        slow = rank.book.on(Factors(products=factor))
        rank_made = rank_of(model("gpt"), rank.plan, slow, rank.cluster)
        found.append(pipeline_of([rank_made] * 2, "adamw").times[0])
    assert found[0].input_us <= found[1].input_us
    assert found[0].weight_us <= found[1].weight_us
    assert found[0].input_us + found[0].weight_us >= found[0].backward_us - EPSILON


class Launched(Flat):
    """A host event takes 100 us."""

    def us(self, family: str, rows: pd.DataFrame) -> Any:
        return 100.0 if family == "host" else super().us(family, rows)


def test_what_tensor_parallel_ranks_gather_is_no_input() -> None:
    """256 tokens of 8 bytes; all that sp gathers in forward, 65,536 bytes a time, is made there."""
    for text in ("", "tp=2", "tp=2,sp"):
        assert rank_for("frozen", text).model.graph.input_bytes == 256 * 8
    one, sp = (rank_for("gpt", text).model.graph.input_bytes for text in ("tp=2", "tp=2,sp"))
    assert one == sp == 256 * 8 + 256 * 4  # and a number per token in the loss
