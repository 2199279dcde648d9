"""A plan's rewritten graph does what torch's own parallel program does: flops, messages, bytes."""

import runpy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from law_case import rank_for
from plan_case import CPU, GPU
from small_scripts import captured as captured_script
from small_scripts import written
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.optim.optimizer import register_optimizer_step_post_hook

from itercast.capture.cases.registry import case
from itercast.capture.opcall import OpCall
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.capture import capture_program
from itercast.capture.programs.program import COLLECTIVE, HOST_COPY, ON_CPU, launch_order
from itercast.compose.capture_model import capture, micro_size
from itercast.compose.predict import predict
from itercast.compose.pricing.optimizer import update_bytes
from itercast.compose.pricing.priced_op import PricedOp, priceable
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.simulate.memory.rank_memory import Sizes, rank_memory
from itercast.compose.simulate.memory.stage_memory import stage_memory
from itercast.compose.simulate.rank import Rank, Run
from itercast.compose.simulate.replicas import micro_batches
from itercast.compose.simulate.stage_rank import pipeline_of
from itercast.compose.target import find_target
from itercast.extras.benchmarks.programs import captured
from itercast.microbench.iterations.collect import iteration_of
from itercast.microbench.ops import find_family

REPLICAS = ("dp=2", "dp=2,zero=1,accumulate=2", "dp=2,zero=2", "dp=4,hsdp=2,zero=3")
CUT = ("tp=2", "dp=2,tp=2,zero=3", "tp=2,sp", "dp=2,tp=2,sp,zero=3")
STAGED = ("pp=2,micro=4", "pp=2,micro=2,schedule=gpipe", "pp=2,micro=4,schedule=zb")
STAGED += ("dp=2,pp=2,micro=2", "tp=2,pp=2,micro=2")
CASES = [("gpt-s", plan) for plan in (*REPLICAS, CUT[0], CUT[3], *STAGED)]
CASES += [("llama-s", CUT[1]), ("llama-s", CUT[2])]
CASES += [("gpt-m", f"pp=2,micro=2,schedule={s}") for s in ("interleaved", "zbv")]
CASES += [("gpt-m", "pp=2,micro=4,schedule=dualpipev")]
CASES += [("vit-s", "dp=2,compress=0.5"), ("vit-s", REPLICAS[3]), ("moe-s", REPLICAS[3])]
CASES += [("moe-s", STAGED[0]), ("bert-s", REPLICAS[3]), ("bert-s", "tp=2")]
CASES += [("dlrm-s", REPLICAS[0]), ("dlrm-s", REPLICAS[3])]
MORE = [("gpt-m", "dp=2,pp=2,micro=4,schedule=interleaved")]
MORE += [("vit-s", STAGED[0]), ("bert-s", STAGED[0])]
Sent = Counter[tuple[str, int]]  # kind and bytes
# Exceptions, with what differs:
# zero: a plan shards into equal parts; torch's first rank has a row more of each where rows do
#   not divide.
# sp: a plan gathers the inputs of layers cut by columns again in backward, as Megatron-LM does;
#   torch saves what forward gathered. Torch sums gradients of norms and biases over tp in the
#   optimizer, one by one; a plan does not.
# tp beside pp: a plan sends 1/tp of an activation from each rank and gathers it, as Megatron-LM
#   does; each of torch's ranks sends all of it.
# cp: a plan sends keys and values and the gradients that travel along as one message.
# dlrm-s, dp=2: DDP broadcasts all buffers, 168 B of offsets; the plan those of batch norms only.
# moe-s, tp: torch's plan here cuts attention only, a plan in words the experts too.
# vit-s and dlrm-s, tp: three heads, or none. ep: torch has none.


def flops(calls: Sequence[OpCall]) -> float:
    """Those of matrix products, convolutions and attention."""
    found = [(f, p) for c in calls if c.phase != "optimizer" for f, p in [find_family(c)]]
    return sum(float(f.flops(p)) for f, p in found if f is not None and f.matmul)


class Planned:
    """What a plan's ranks do, by the number of the rank: one of each stage."""

    def __init__(self, name: str, text: str) -> None:
        chosen, self.plan = case(name), ParallelPlan.parse(text)
        step = capture(name, **micro_size(name, self.plan, chosen.batch, chosen.seq))
        self.rank = rank_for(step, text, CPU)
        if self.plan.pp == 1:
            before, last = micro_batches(self.rank, "adamw")
            self.ranks = {0: (self.rank, sent_in([*before, (last, 1)]))}
            return
        pipe = pipeline_of([self.rank] * self.plan.pp, "adamw")
        self.ranks = {}
        for r, stage in enumerate(pipe.stages):
            between = [(op, n) for op, n in pipe.others_of(r) if op.phase == "comm"]
            sent = sent_in(pipe.runs_of(r)) + counted(
                op for op, n in between for _ in range(int(n))
            )
            self.ranks[r * self.plan.dp * self.plan.tp] = (stage, sent)

    def flops(self, number: int) -> float:
        """Flops of a rank's step."""
        products_s = sum(x.matmul_s for x in self.ranks[number][0].layers)
        return self.plan.microbatches * products_s * CPU.peak("fp32")

    def sent(self, number: int) -> Sent:
        """Messages of a rank's step."""
        stage, sent = self.ranks[number]
        ops = [op for x in stage.layers for op in (*x.forward, *x.backward) if op.phase == "comm"]
        return sent + counted(self.plan.microbatches * ops)

    def state(self, number: int) -> tuple[int, int]:
        """Bytes of a rank's parameters and of its optimizer."""
        stage: Rank = self.ranks[number][0]
        memory = rank_memory(Sizes.of([(x, 1) for x in stage.layers]), self.plan, "adamw")
        return memory["parameters"], memory["optimizer"]

    def peaks(self) -> list[int]:
        """Peak memory of one rank of each stage."""
        return [sum(memory.values()) for memory in stage_memory(self.rank, "adamw")]

    def padding(self, number: int) -> int:
        """Bytes by which the first rank's shards exceed the mean where rows do not divide."""
        n = self.plan.shards if self.plan.zero else 1
        layers = [x.layer for x in self.ranks[number][0].layers]
        return sum(x.padded_bytes(n, trained=False) - x.parameter_bytes for x in layers) // n


def counted(ops: Iterable[PricedOp]) -> Sent:
    """Kinds and bytes of messages; the test's pricer takes 1 us per KiB."""
    return Counter((op.op, round(1024 * op.duration_us)) for op in ops)


def sent_in(runs: Sequence[tuple[Run, int]]) -> Sent:
    """Kinds and bytes of the messages of runs, each so often."""
    found = Sent()
    for run, n in runs:
        found.update({key: n * each for key, each in counted(run.sent).items()})
    return found


def sent_by(calls: Sequence[OpCall]) -> Sent:
    """Kinds and bytes of a program's messages."""
    facts = [c.kwargs for c in calls if c.op == COLLECTIVE]
    named = {"send": "send_recv", "recv": "send_recv"}
    return Counter((named.get(c["kind"], c["kind"]), c["bytes"]) for c in facts)


@contextmanager
def states_of_optimizers() -> Iterator[dict[int, tuple[int, int]]]:
    """By rank the bytes of what its optimizer updates, and of its state without step counts."""
    found: dict[int, tuple[int, int]] = {}

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        state = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
        found[dist.get_rank()] = (nbytes(parameters), nbytes(state))

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield found
    finally:
        hook.remove()


def nbytes(tensors: Sequence[Any]) -> int:
    """Bytes that this rank holds."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def allowed(plan: ParallelPlan, found: Sent, calls: Sequence[OpCall]) -> Sent:
    """A program's messages, changed by the exceptions above."""
    found = Counter(found)
    if plan.sp:
        for c in calls:
            kind, size = (c.kwargs["kind"], c.kwargs["bytes"]) if c.op == COLLECTIVE else ("", 0)
            found[kind, size] -= kind == "all_reduce" and c.phase != "forward"
            found[kind, size] += kind == "all_gather" and c.phase == "forward" and _is_tp(c, plan)
    if plan.pp > 1 and plan.tp > 1:
        for (kind, size), n in list(found.items()):
            if kind == "send_recv":
                found[kind, size // plan.tp] += n
                found["all_gather", size] += n
                found[kind, size] -= n
    return +found


def _is_tp(call: OpCall, plan: ParallelPlan) -> bool:
    ranks = call.kwargs["ranks"]
    return len(ranks) == plan.tp and ranks[1] - ranks[0] == 1


@pytest.mark.parametrize(
    ("name", "text"), [*CASES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)]
)
def test_a_plan_does_what_the_program_does(name: str, text: str) -> None:
    """On each rank: messages are those that torch sends, byte for byte.

    Peak memory of pipelines is within a ninth.

    FSDP2 pads a parameter to whole rows of every rank: its messages are longer than its bytes.
    """
    planned, plan = Planned(name, text), ParallelPlan.parse(text)
    with states_of_optimizers() as states:
        program = captured(iteration_of(case(name), text))
    assert set(program.ranks) == set(planned.ranks)
    for number, peak in zip(program.ranks, planned.peaks() if plan.pp > 1 else (), strict=False):
        assert program.peak_bytes[number] == pytest.approx(peak, rel=1 / 9)
    for number, step in program.ranks.items():
        assert flops(step.calls) == pytest.approx(planned.flops(number), rel=0.005)
        found = sent_by(step.calls)
        if (name, text) == ("dlrm-s", "dp=2"):
            assert found.pop(("broadcast", 168)) == 1
        assert allowed(plan, found, step.calls) == +planned.sent(number)
        groups = {len(c.kwargs["ranks"]) for c in step.calls if c.op == COLLECTIVE}
        assert groups <= {plan.tp, plan.shards, plan.dp // plan.shards, plan.pp}
        slack = planned.padding(number)
        assert states[number] == (
            pytest.approx(planned.state(number)[0], abs=slack),
            pytest.approx(planned.state(number)[1], abs=2 * slack),
        )


def in_a_ring(name: str, plan: ParallelPlan) -> Callable[[], Callable[[], None]]:
    """A program under torch's context parallelism: keys and values go round."""

    def program() -> Callable[[], None]:
        dist.init_process_group("gloo")
        set_rotate_method("alltoall")
        mesh, chosen = init_device_mesh("cpu", (plan.cp,)), case(name)
        model, batch = chosen.build(), chosen.inputs(chosen.batch, chosen.seq)

        def step() -> None:
            shares = {key: value.clone() for key, value in batch.items()}
            dims = [1] * len(shares)
            with context_parallel(mesh, buffers=list(shares.values()), buffer_seq_dims=dims):
                chosen.loss(model(**shares), shares).backward()

        return step

    return program


@pytest.mark.parametrize(("name", "cp"), [("gpt-s", 2), ("gpt-s", 4)])
def test_a_ring_does_what_torchs_context_parallelism_does(name: str, cp: int) -> None:
    """A remote block is half as large on every rank; gradients take cp hops, their keys cp - 1."""
    text = f"cp={cp}"
    planned = Planned(name, text)
    program = capture_program(in_a_ring(name, ParallelPlan.parse(text)), cp, [0, cp - 1])
    for step in program.ranks.values():
        assert flops(step.calls) == pytest.approx(planned.flops(0), rel=0.005)
        ring = {size: n for (kind, size), n in planned.sent(0).items() if kind == "exchange"}
        total = sum(size * n for size, n in ring.items())
        assert {kind for kind, _ in sent_by(step.calls)} == {"exchange"}
        assert sum(size * n for (_, size), n in sent_by(step.calls).items()) == total


OFFLOADED = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        self.a.requires_grad_(sys.argv[2] == "all")

    def forward(self, x):
        return x + self.b(self.a(x).relu())

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).sum()

def train():
    dist.init_process_group("nccl")
    model = Blocks()
    for part in (*model.blocks, model):
        fully_shard(part, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for step in range(10):
        for _ in range(int(sys.argv[1])):
            model(torch.ones(16, 64, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    train()
"""


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("trained", ["all", "half"])
def test_a_script_with_shards_in_host_memory_copies_what_the_plan_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: int, trained: str
) -> None:
    """To the GPU and back, byte for byte; the CPU updates as much, and adds as many gradients.

    A step takes as long within a tenth.
    """
    path = written(tmp_path, OFFLOADED)
    program = captured_script(path, str(micro), trained, gpus=4)
    calls = [program.ranks[0].calls[i] for i in launch_order(program.ranks[0].calls)]
    monkeypatch.setattr("sys.argv", ["train.py", str(micro), trained])
    model = runpy.run_path(str(path))["Blocks"]()
    step = capture(model, torch.ones(16, 64), batch=16)
    text = f"dp=4,zero=3,offload=parameters,accumulate={micro}"
    before, last = micro_batches(rank_for(step, text, GPU), "adamw")
    sent, on_cpu = Counter[str](), Counter[str]()
    for run, n in [*before, (last, 1)]:
        for op in run.sent:
            sent[op.op] += n * round(op.nbytes)
        for op in run.added:
            on_cpu[op.op.partition(" ")[0]] += n * round(op.nbytes) * (op.family == "host")
    found = Counter[str]()
    for call in (c for c in calls if c.op == HOST_COPY):
        found[call.args[0]] += call.args[1]
    assert found == {way: sent[way] for way in ("h2d", "d2h")}
    host = [c for c in calls if c.stream == ON_CPU]
    updates = [priceable(c) for c in host if c.phase == "optimizer"]
    assert update_bytes(updates) == pytest.approx(on_cpu["optimizer"], rel=0.01)
    added = sum(c.args[0].nbytes for c in host if c.phase != "optimizer")
    assert 3 * added == on_cpu["sum"]
    unchanged = forecast_program(program, find_target("h100-sxm-80gb", text))
    planned_us = predict(step, gpu="h100-sxm-80gb", plan=text).iteration_us
    assert unchanged.iteration_us == pytest.approx(planned_us, rel=0.1)


FSDP1 = (
    OFFLOADED.partition("def train")[0]
    + """
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

dist.init_process_group("nccl")
host = CPUOffload(offload_params=True)
model = FullyShardedDataParallel(
    Blocks(), auto_wrap_policy=ModuleWrapPolicy({Block}), cpu_offload=host, device_id=0,
    use_orig_params=sys.argv[3] == "original")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    model(torch.ones(16, 64, device="cuda")).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
)


@pytest.mark.parametrize("parameters", ["original", "flat"])
def test_fsdp1_s_shards_in_host_memory_are_copied_clipped_and_updated_there(
    tmp_path: Path, parameters: str
) -> None:
    """Of 33,088 numbers of a block a quarter lies on each of four ranks, of 520 of the head, too.

    To the GPU go all in forward and blocks in backward, gradients come back once. The CPU reads
    them for their norm, scales them, and updates: no op of an optimizer is left to the GPU.
    """
    assert 64 * 256 + 256 + 256 * 64 + 64 == 33_088
    program = captured_script(written(tmp_path, FSDP1), "1", "all", parameters, gpus=4)
    calls = program.ranks[0].calls
    copied = Counter[str]()
    for call in (c for c in calls if c.op == HOST_COPY):
        copied[call.args[0]] += call.args[1]
    assert copied == {"h2d": 8 * 33_088 + 520, "d2h": 4 * 33_088 + 520}
    host = [c for c in calls if c.stream == ON_CPU]
    scaled = [c for c in host if c.phase != "optimizer" and c.op.startswith("aten.mul_")]
    assert sum(c.args[0].nbytes for c in scaled) == copied["d2h"]
    updates = [c for c in calls if c.phase == "optimizer" and any(t.shape for t in c.tensors())]
    assert {c.stream for c in updates} == {ON_CPU}  # Adam's counters of steps have no shape
