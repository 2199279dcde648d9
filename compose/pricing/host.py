"""What the host costs: events without a kernel and kernel launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compose.graph.launch_modes import launches
from compose.pricing.price_book import PriceBook, PricedOp, price_book
from learners.family_model import FamilyModel
from learners.transfer.source_gpus import apart
from microbench.opcall import StepCapture
from microbench.ops.step.host import Host

# Assumptions where family 'host' has no model, right within a factor of two.
ASSUMED_US = {
    "module_call": 3.0,
    "view_op": 1.0,
    "autograd_node": 2.0,
    "accumulate_grad": 2.0,
    "zero_grad": 1.0,
    "backward": 20.0,
    "adamw_step": 100.0,
    "sgd_step": 50.0,
    "launch": 5.0,
    "fsdp_layer": 400.0,
    "fsdp_layer_kept": 350.0,
    "checkpoint_layer": 300.0,
    "pipeline_micro": 100.0,
    # Megatron's own functions on plain tensors; torch's DTensor is measured
    "tp_product": 0.0,
    "tp_product_bias": 0.0,
    "tp_loss": 0.0,
    "adamw_dtensor_step": 0.0,
    "sgd_dtensor_step": 0.0,
}
WRAPPERS = (
    "fsdp_layer",
    "fsdp_layer_kept",
    "checkpoint_layer",
    "pipeline_micro",
    "tp_product",
    "tp_product_bias",
    "tp_loss",
    "adamw_dtensor_step",
    "sgd_dtensor_step",
)
# One event; its count is that of the parameters, of a checkpoint the tensors it saves.
PER_STEP = (
    "adamw_step",
    "sgd_step",
    "adamw_dtensor_step",
    "sgd_dtensor_step",
    "fsdp_layer",
    "fsdp_layer_kept",
    "checkpoint_layer",
)
PYTHON = "python"  # phase of what the host does without an op


def host_cost(counts: Mapping[str, int], book: PriceBook) -> PricedOp:
    """The host's time in a step as one op: counted events times the price of one.

    The model counts on a CPU, where it was measured on the machine that is asked about, and
    elsewhere, and for wrappers, only inside its envelope; ``in_envelope`` is false where a price
    is assumed, or was measured on the host of another GPU.
    """
    unknown = sorted(set(counts) - set(ASSUMED_US))
    if unknown:
        raise ValueError(f"unknown host events {unknown}; known: {sorted(ASSUMED_US)}")
    events = [name for name in counts if counts[name]]
    points = [Host(op=e, tensors=counts[e] if e in PER_STEP else 1) for e in events]
    beside = _measured_beside(book)
    learned = beside.points("host", points) if "host" in book.models else {}
    us = low_us = high_us = 0.0
    inside = beside is book
    for event, point in zip(events, points, strict=True):
        row = learned[point][0] if learned else {}
        here = book.gpu.kind == "cpu" and event not in WRAPPERS
        if learned and (here or row["in_envelope"]):
            one = (row["predicted_us"], row["predicted_us_p10"], row["predicted_us_p90"])
            inside = inside and bool(row["in_envelope"])
        else:
            guess = ASSUMED_US[event]
            one, inside = (guess, guess / 2, guess * 2), False
        times = 1 if event in PER_STEP else counts[event]
        us, low_us, high_us = us + times * one[0], low_us + times * one[1], high_us + times * one[2]
    return PricedOp(
        op="host",
        family="host",
        phase="host",
        duration_us=us,
        low_us=low_us,
        high_us=high_us,
        flops=0.0,
        in_envelope=inside,
    )


def _measured_beside(book: PriceBook) -> PriceBook:
    """The book of a GPU whose host was measured: this one's own, else the nearest.

    What Python costs is the host's, not the GPU's.
    """
    model = book.models.get("host")
    if not isinstance(model, FamilyModel) or book.gpu.kind == "cpu":
        return book
    known = [model.lenders.gpus[name] for name in model.lenders.measured]
    known = [gpu for gpu in known if gpu.kind == book.gpu.kind]
    if not known or book.gpu.name in model.lenders.measured:
        return book
    nearest = min(known, key=lambda gpu: apart(book.gpu, gpu, "fp32"))
    return price_book(book.pricer, nearest, book.threads, book.stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """What the host spends on the ops of a step, in us for each.

    ``python_us`` is an op's share of Python and autograd. A call itself takes what rows tell of the
    op (``PricedOp.launch_us``), else ``usual_us``; one that C++ adds, and no Python, ``alone_us``.
    With ``by_op`` false rows do not count: one graph launches all.
    """

    python_us: float
    usual_us: float
    alone_us: float
    by_op: bool = True

    def us(self, op: PricedOp, *, added: bool = False) -> float:
        """Host time of one op; ``added``: no module calls it."""
        own_us = op.launch_us if self.by_op else None
        if added:
            return self.alone_us if own_us is None else own_us
        return self.python_us + (self.usual_us if own_us is None else own_us)

    def kernels(self, op: PricedOp) -> int:
        """How many launches these are."""
        return op.kernels if self.by_op else 1


def launch_costs(capture: StepCapture, events: Mapping[str, int], book: PriceBook) -> Launches:
    """Of a step, these events spread over its calls; on a CPU a call itself is part of its op."""
    calls = max(1, len(capture.calls))
    python_us = host_cost(events, book).duration_us / calls
    if book.gpu.kind == "cpu":
        return Launches(python_us=python_us, usual_us=0.0, alone_us=0.0)
    alone_us = host_cost({"launch": 1}, book).duration_us
    return Launches(
        python_us=python_us,
        usual_us=alone_us * launches(capture) / calls,
        alone_us=alone_us,
        by_op=capture.engine != "graph",
    )


def python_op(event: str, count: int, book: PriceBook, share: float = 1.0) -> PricedOp:
    """A wrapper's host time as an op of a layer: it computes nothing and is launched that long."""
    key = (event, count, share)
    if key not in book.python:
        found = host_cost({event: count}, book)
        us = (found.duration_us, found.low_us, found.high_us)
        mid_us, low_us, high_us = (share * x for x in us)
        book.python[key] = replace(
            found, op=event, phase=PYTHON, duration_us=mid_us, low_us=low_us, high_us=high_us
        )
    return book.python[key]
