"""The host lane, op by op: what rows tell of a call, counted by hand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_case import CPU, Fixed, call, tensor
from unseen_ops import GPU, MODELS, learned

from itercast.capture.opcall import OpCall, ParamSpec, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.compose.forecast import forecast
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.pricing.host import host_cost, launch_costs
from itercast.compose.pricing.price_book import PriceBook
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.simulate.replicas import micro_batches
from itercast.extras.trace.forecasts import shown_rank
from itercast.learners.features.host_calls import KERNEL_SHARE, HostCall
from itercast.microbench.hardware.host import EVENT_US, HostMachine
from itercast.microbench.ops.step.host import EVENTS

# assumed where no host was measured (itercast.compose.pricing.host)
LAUNCH_US, MODULE_US = 5.0, 3.0


def taking(us: float, kernels: int = 1, per_tensor_us: float = 0.0) -> HostCall:
    """The call that takes so long where a pointwise op takes LAUNCH_US."""
    python = LAUNCH_US * (1 - KERNEL_SHARE)
    fixed = (us - LAUNCH_US * KERNEL_SHARE * kernels) / python
    return HostCall(fixed=fixed, per_tensor=per_tensor_us / python, kernels=kernels)


CALLS = {
    "elementwise": {"toy": {"relu": taking(4.0)}},
    "embedding_bag": {"toy": {"backward, few": taking(30.0, kernels=6)}},
    "optimizer": {"toy": {"_foreach_mul_": taking(10.0, kernels=2, per_tensor_us=0.5)}},
}


class Short(Fixed):
    """Every op takes the GPU 6 us; the host takes what CALLS say."""

    always_us = 6.0
    models: Mapping[str, Any] = {
        **MODELS,
        "elementwise": learned("mul", calls=CALLS["elementwise"]),
        "embedding_bag": learned("backward", calls=CALLS["embedding_bag"]),
        "optimizer": learned("_foreach_mul_", calls=CALLS["optimizer"]),
    }

    def us(self, family: str, rows: Any) -> float:
        return self.always_us


def relu(phase: str = "forward") -> OpCall:
    x, y = tensor(0, 4, 8), tensor(1, 4, 8)
    return OpCall(op="aten.relu.default", args=(x,), outputs=(y,), phase=phase)


def bag_backward() -> OpCall:
    """Sorted on the GPU, in six launches."""
    index = tensor(2, 16, dtype="int64")
    args = (tensor(1, 4, 8), index, index, index, index, index, 100, False, 0)
    out = (tensor(3, 100, 8),)
    name = "aten._embedding_bag_backward.default"
    return OpCall(op=name, args=args, outputs=out, phase="backward")


def foreach(count: int) -> OpCall:
    some = tuple(tensor(10 + i, 4) for i in range(count))
    return OpCall(op="aten._foreach_mul_.Scalar", args=(some, 0.9), phase="optimizer")


def iteration_us(step: StepCapture, pricer: Any = None) -> tuple[float, float]:
    """Folded, and with a task for each kernel."""
    book = PriceBook(pricer or Short(), GPU, 0)
    folded = forecast(step, ParallelPlan(), book)
    spans = micro_batches(shown_rank(step, ParallelPlan(), book), step.optimizer)[1].spans
    return folded.iteration_us, max(span.end_us for span in spans)


def test_a_backward_of_six_launches_waits_longer_than_a_relu() -> None:
    #  host    |4 |-5-|-5-|-5-|-5-|-5-|-5-|       relu's launch, and six of the sort
    #  compute    |==6==|1  |1  |1  |1  |1  |1|   at 4; pieces of 1 us at 10, 14, 19, 24, 29, 34
    step = StepCapture(calls=(relu(), bag_backward()))
    assert iteration_us(step) == (pytest.approx(35), pytest.approx(35))
    alone = StepCapture(calls=(relu(), relu("backward")))
    assert iteration_us(alone) == (pytest.approx(4 + 6 + 6), pytest.approx(16))


def test_python_is_spread_over_the_calls() -> None:
    """Two module calls are 3 us for each op: relu 7, the sort 33; its last piece comes after 40."""
    step = StepCapture(calls=(relu(), bag_backward()), host={"module_call": 2})
    assert iteration_us(step) == (pytest.approx(7 + 33 + 1), pytest.approx(41))
    costs = launch_costs(step, step.host, PriceBook(Short(), GPU, 0))
    assert costs.python_us == MODULE_US


def test_an_op_that_no_row_tells_of_costs_a_usual_launch() -> None:
    book = PriceBook(Short(), GPU, 0)
    other = replace(relu(), op="aten.tanh.default")
    step = StepCapture(calls=(relu(), other))
    costs = launch_costs(step, step.host, book)
    ops = book.price([priceable(c) for c in step.calls])
    assert [costs.us(op) for op in ops] == pytest.approx([4.0, LAUNCH_US])
    assert [costs.us(op, added=True) for op in ops] == pytest.approx([4.0, LAUNCH_US])


def test_another_gpu_takes_the_host_costs_of_the_one_that_was_swept() -> None:
    (op,) = PriceBook(Short(), replace(GPU, name="other"), 0).price([priceable(relu())])
    assert op.call_launches == pytest.approx(4.0 / LAUNCH_US)
    (op,) = PriceBook(Short(), replace(GPU, kind="cpu"), 1).price([priceable(relu())])
    assert op.call_launches == 1.0  # the call is the op


def test_a_list_of_tensors_is_launched_by_its_length() -> None:
    """10 us and half of one for each of 100 tensors, in two launches."""
    (op,) = PriceBook(Short(), GPU, 0).price([priceable(foreach(100))])
    assert (op.call_launches, op.kernels) == (pytest.approx(60.0 / LAUNCH_US), 2)


def test_a_graph_is_launched_once_whatever_its_ops_cost() -> None:
    """5 us, then ops of 6 us: no op of a lone forward starts before the graph it is in."""
    forward = with_engine(StepCapture(calls=(relu(), relu())), "graph")
    assert iteration_us(forward) == (pytest.approx(5 + 6 + 6), pytest.approx(17))


def test_a_training_step_is_launched_while_the_one_before_it_runs() -> None:
    """Launched in 5 us behind 12 us of kernels; by a slow host in 50, of which 6 end after it."""
    step = with_engine(StepCapture(calls=(relu(), bag_backward())), "graph")
    assert iteration_us(step) == (pytest.approx(6 + 6), pytest.approx(12))
    slow = HostMachine(name="slow", slowdown=1.0, launch_us=50.0, source="by hand")
    found = forecast(step, ParallelPlan(), PriceBook(Short(), GPU, 0, host=slow))
    assert found.iteration_us == pytest.approx(50 + 6)


def test_the_next_training_step_is_launched_while_one_runs() -> None:
    """Two ops of 6 us: a lone step awaits its first launch of 4 us, steps in a loop do not."""
    step = StepCapture(calls=(relu(), relu()))
    assert iteration_us(step) == (pytest.approx(4 + 6 + 6), pytest.approx(16))
    assert iteration_us(replace(step, optimizer="sgd")) == (pytest.approx(12), pytest.approx(12))


def test_a_graph_is_launched_once_whatever_its_layers_count() -> None:
    """Blocks of one op, of which the capture holds two of ten: 5 us, then ten times 6 us."""
    spec: dict[str, Any] = {"shape": (4, 8), "dtype": "fp32", "ready_after": -1}
    weights = tuple(ParamSpec(name=f"blocks.{i}.w", storage=10 + i, **spec) for i in range(2))
    calls = tuple(
        call("mul.Tensor", [tensor(i, 4, 8), tensor(10 + i, 4, 8)], tensor(i + 1, 4, 8))
        for i in range(2)
    )
    step = StepCapture(calls=calls, parameters=weights, repeats={"blocks": 8})
    graph = with_engine(step, "graph")
    found = forecast(graph, ParallelPlan(), PriceBook(Short(), GPU, 0))
    assert found.compute_us == pytest.approx(60)
    assert found.iteration_us == pytest.approx(5 + 60)
    assert found.host_us == pytest.approx(5)


def product() -> OpCall:
    return call("mm.default", [tensor(0, 4, 8), tensor(4, 8, 8)], tensor(5, 4, 8))


def test_a_named_host_sets_the_times_of_all_events_and_calls() -> None:
    """Twice as slow, 8 us a launch, of which relu's call takes 0.8, and a product's one."""
    mine = HostMachine(name="mine", slowdown=2.0, launch_us=8.0, source="by hand")
    step = StepCapture(calls=(relu(), product()), host={"module_call": 2})
    book = PriceBook(Short(), GPU, 0, host=mine)
    costs = launch_costs(step, step.host, book)
    ops = book.price([priceable(c) for c in step.calls])
    assert [costs.us(op) for op in ops] == [6.0 + 0.8 * 8.0, 6.0 + 8.0]
    assert costs.total(ops).shares == ()  # known, not assumed
    wrapper = host_cost({"fsdp_layer": 4}, book)
    assert wrapper.duration_us == 2 * 400
    assert wrapper.assumed == (("host.event_us.fsdp_layer", 1.0),)  # no host file knows of it


def test_a_host_measured_beside_one_gpu_answers_for_others() -> None:
    class Host(Short):
        always_us = 2.0
        models: Mapping[str, Any] = {**MODELS, "host": learned("module_call", "launch")}

    own, other = (PriceBook(Host(), g, 0) for g in (GPU, replace(GPU, name="other")))
    found = [host_cost({"module_call": 4}, book) for book in (own, other)]
    assert [op.duration_us for op in found] == [8.0, 8.0]
    cpu = host_cost({"module_call": 4}, PriceBook(Host(), replace(GPU, kind="cpu"), 1))
    assert cpu.duration_us == 4 * MODULE_US  # assumed: a GPU's host is another machine


def test_events_without_rows_are_as_slow_on_a_cpu_as_those_with_rows() -> None:
    """All take four times as long as assumed, in the median; FSDP's hooks are assumed at 400 us."""
    slower = dict(zip(EVENTS, (1, 2, 4, 4, 5, 6), strict=True))

    class Host(Short):
        models: Mapping[str, Any] = {**MODELS, "host": learned(*EVENTS, gpu=CPU)}

        def us(self, family: str, rows: Any) -> Any:
            times = [slower[op] * EVENT_US[op] if op in slower else 0.0 for op in rows["op"]]
            return np.array(times) if family == "host" else super().us(family, rows)

        def price(self, family: str, rows: Any, gpus: Any = None) -> Any:
            return super().price(family, rows).assign(in_envelope=rows["op"].isin(EVENTS))

    book = PriceBook(Host(), CPU, 1)
    assert host_cost({"backward": 1}, book).duration_us == 6 * EVENT_US["backward"]
    assert host_cost({"fsdp_layer": 4}, book).duration_us == 4 * 400


def test_dtensor_is_of_torch_alone() -> None:
    """Three products of 650 us; AdamW over ten parameters 130 + 10 x 15 us. Megatron has none."""
    for stack, product_us, update_us in (("torch-2.11", 650, 280), ("megatron-core", 0, 0)):
        book = PriceBook(Short(), GPU, 0, stack=stack)
        assert host_cost({"tp_product": 3}, book).duration_us == 3 * product_us
        assert host_cost({"adamw_dtensor_step": 10}, book).duration_us == update_us
