"""The model that a script trains is found, and its step is the script's own, in any batch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from small_scripts import H100, written

from itercast.capture.input.batches import TakenBatches
from itercast.capture.opcall import OpCall, StepCapture
from itercast.capture.plan import ParallelPlan
from itercast.capture.programs.gpus.machine import gpus_that_are_not_there
from itercast.capture.programs.gpus.streams import recorded_streams
from itercast.capture.programs.log import ProgramLog
from itercast.capture.programs.program import ProgramCapture
from itercast.capture.programs.script import Script, capture_script
from itercast.capture.programs.trained.finder import Finder
from itercast.capture.programs.trained.serve import TrainedModel
from itercast.capture.step import StepSettings
from itercast.compose.graph.launch_modes import with_engine
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.programs.script_model import engine_of
from itercast.compose.target import Target, find_target, forecast_step
from itercast.extras.trace.forecasts import trace_program
from itercast.learners.bundle import Bundle
from itercast.microbench.hardware.spec import load_gpu

pytestmark = pytest.mark.usefixtures("groups_end")
DECODER = """
import torch, torch.nn as nn, torch.nn.functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.norm(x)).split(256, 2)
        q, k, v = (p.view(b, t, 4, 64).transpose(1, 2) for p in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)
                         .transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.silu(self.up(x)))
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers = nn.ModuleList(Block() for _ in range(4))
    def forward(self, ids, *, scale=1.0):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.head(x) * scale}
model = Decoder().cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
while True:
    ids = torch.randint(0, 1000, (4, 128), device="cuda")
    logits = model(ids, scale=0.5)["logits"]
    F.cross_entropy(logits[:, :-1].reshape(4 * 127, 1000), ids[:, 1:].reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
IMAGES = """
import torch, torch.nn as nn
from torch.utils.checkpoint import checkpoint
class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 192, 16, 16), nn.Linear(192, 10)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(192, 3, 768, 0.0, batch_first=True) for _ in range(4))
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean(1))
model = Images().cuda()
optimizer = torch.optim.Adam(model.parameters())
while True:
    for micro in range(2):
        x, y = torch.randn(8, 3, 224, 224).cuda(), torch.zeros(8, dtype=torch.long).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.CrossEntropyLoss(label_smoothing=0.1)(model(x), y) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
UNUSUAL = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.set_float32_matmul_precision("high")
torch.distributed.init_process_group("nccl")
torch.distributed.new_group(backend="gloo").monitored_barrier()
torch.distributed.monitored_barrier()
class Told(nn.GELU):
    def forward(self, x):
        torch.distributed.all_reduce(torch.ones(1, device="cuda"))  # among the ranks of a group
        return super().forward(x)
net = nn.Sequential(nn.Linear(512, 8192), Told(), nn.Linear(8192, 512)).cuda()
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    x, y = torch.randn(4096, 512).cuda(), torch.randn(4096, 512).cuda()
    alike = F.normalize(model(x)) @ F.normalize(y).t() / 0.07
    penalty = sum(p.square().sum() for p in net.parameters())
    loss = torch.logsumexp(alike, 1).mean() - alike.diagonal().mean() + 1e-4 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

SEVERAL = """
import torch, torch.nn as nn
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()
    @staticmethod
    def backward(ctx, grad):
        return grad
encoder, decoder = nn.Linear(512, 4096).cuda(), nn.Linear(4096, 512).cuda()
parameters = [*encoder.parameters(), *decoder.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
while True:
    x, y = torch.randn(64, 512).cuda(), torch.randn(64, 512).cuda()
    codes = Sign.apply(encoder(x)), Sign.apply(encoder(y))
    loss = sum((decoder(code) - x).square().mean() for code in codes)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
"""
RECURRENT = """
import torch, torch.nn as nn, torch.nn.functional as F
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.rnn = nn.LSTM(256, 256, 2)
    def forward(self, ids, state):
        x, state = self.rnn(self.embed(ids), state)
        return self.head(x), state
model = Words().cuda()
state = (torch.zeros(2, 20, 256).cuda(), torch.zeros(2, 20, 256).cuda())
while True:
    for micro in range(2):
        ids = torch.randint(0, 1000, (35, 20)).cuda()
        state = tuple(part.detach() for part in state)
        out, state = model(ids, state)
        loss = F.cross_entropy(out.view(-1, 1000), ids.view(-1))
        torch.autograd.Variable._execution_engine.run_backward(
            tensors=(loss,), grad_tensors=(torch.ones_like(loss),), keep_graph=False,
            create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
    model.zero_grad()
"""
SCRIPTS = {"decoder": DECODER, "images": IMAGES, "unusual": UNUSUAL, "several": SEVERAL}


def found(folder: Path, text: str, gpus: int = 1) -> tuple[TrainedModel, ProgramCapture]:
    """The model that a script trains, and the step that it was found in."""
    script, finder = Script(path=written(folder, text), steps=2), Finder()
    program = capture_script(script, H100, gpus, gpus, TakenBatches(), finder)
    return TrainedModel.of(finder, on_gpu=True), program


def captured(
    model: TrainedModel, batch: int = 0, seq: int = 0, *, shallow: bool = False, dtype: str = ""
) -> StepCapture:
    """One micro-batch of it as the script trains it, unless another size or dtype is given."""
    log, facts = ProgramLog(), model.facts
    how = StepSettings(dtype=dtype or facts.dtype, amp=facts.amp, optimizer=facts.optimizer)
    with recorded_streams(log), gpus_that_are_not_there(H100, 1, 0, log):
        return model.capture(how, batch or facts.batch, seq or facts.seq, shallow=shallow)


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """One GPU, of which no family is known: all is priced by its roofline."""
    gpu = load_gpu("h100-sxm-80gb")
    Bundle(models={}, gpus={gpu.name: gpu}).save(tmp_path / "bundle")
    return find_target(gpu.name, bundle=tmp_path / "bundle")


@pytest.mark.usefixtures("flags_of_the_test")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plan_of_one_gpu_is_the_script_as_it_is(
    name: str, tmp_path: Path, target: Target
) -> None:
    """Within 6 %: what the script draws at random, and gradients of zero_grad, are beside it."""
    model, program = found(tmp_path, SCRIPTS[name])
    facts = model.facts
    plan = ParallelPlan(accumulate=facts.micro, amp=facts.amp, recompute=facts.recompute)
    assert facts.recompute == ("full" if name == "images" else "")
    whole = forecast_program(program, target)
    whole_us = whole.iteration_us
    assert round(whole.tokens_per_s * whole_us * 1e-6) == (4 * 128 if name == "decoder" else 0)
    many = forecast_program(replace(program, world_size=8), target)  # of which none sends anything
    assert name == "unusual" or many.iteration_us == whole_us
    step = captured(model, shallow=True)
    assert bool(step.repeats) == (name in ("decoder", "images"))
    planned = forecast_step(step, replace(target, plan=plan))
    assert planned.iteration_us == pytest.approx(whole_us, rel=0.06)


SHARDED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
torch.distributed.init_process_group("nccl")
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for part in (*model.layers, model):
    fully_shard(part, mp_policy=policy)
"""


@pytest.mark.usefixtures("flags_of_the_test")
def test_a_plan_of_fsdp_is_the_script_under_fsdp(tmp_path: Path, target: Target) -> None:
    """In mixed precision, with a loss that casts its logits: the same memory and launches."""
    text = DECODER.replace(".cuda().bfloat16()", ".cuda()").replace("fused=True", "foreach=True")
    text = text.replace('logits = model(ids, scale=0.5)["logits"]', "")  # held until the next step
    text = text.replace("logits[:", 'model(ids)["logits"].float()[:')
    begin = text.index("optimizer =")
    (tmp_path / "alone").mkdir()
    model, _ = found(tmp_path / "alone", text)
    _, program = found(tmp_path, text[:begin] + SHARDED + text[begin:], 8)
    plan = ParallelPlan.parse("dp=8,zero=3,amp")
    step = captured(model, dtype="bf16")
    planned = forecast_step(step, replace(target, plan=plan))
    run = forecast_program(program, target)
    assert planned.memory_bytes == pytest.approx(run.memory_bytes, rel=0.02)
    assert planned.iteration_us == pytest.approx(run.iteration_us, rel=0.05)


LOSS = """
def loss_of(ids):
    logits = model(ids)["logits"].float()[:, :-1]
    return F.cross_entropy(logits.reshape(-1, 1000), ids[:, 1:].reshape(-1))
"""


@pytest.mark.usefixtures("flags_of_the_test")
@pytest.mark.parametrize("engine", ["eager", "compile"])
def test_a_plan_of_a_compiled_model_is_the_compiled_script(
    engine: str, tmp_path: Path, target: Target
) -> None:
    """16 x 512 tokens: kernels that inductor fuses keep fewer results than the ops they run."""
    begin = DECODER.index("while True")
    compiled = "loss_of = torch.compile(loss_of)\n" if engine == "compile" else ""
    loop = """while True:
    loss_of(torch.randint(0, 1000, (16, 512), device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    model, program = found(tmp_path, DECODER[:begin] + LOSS + compiled + loop)
    run = forecast_program(program, target)
    planned = forecast_step(with_engine(captured(model), engine), target)
    assert planned.memory_bytes == pytest.approx(run.memory_bytes, rel=0.001)
    assert planned.iteration_us == pytest.approx(run.iteration_us, rel=0.05)
    assert (run.memory_bytes < program.peak_bytes[0]) == (engine == "compile")
    assert trace_program(program, target).counted == [(0, 0.0, run.memory_bytes)]


PHASES = ("forward", "backward", "optimizer")


def products(step: StepCapture) -> Counter[tuple[int, ...]]:
    """Shapes of the results of matrix products."""
    ops = ("aten.mm.default", "aten.addmm.default")
    return Counter(c.outputs[0].shape for c in step.calls if c.op in ops)


def test_a_script_is_captured_in_other_batches(tmp_path: Path) -> None:
    """6 samples of 50 tokens for 4 of 128: rows of a product are 300 for 512, of logits 6 * 49."""
    model, _ = found(tmp_path, DECODER)
    assert (model.facts.batch, model.facts.seq, model.facts.optimizer) == (4, 128, "adamw_fused")
    step = captured(model, 6, 50)
    assert products(step) == {
        tuple({512: 300}.get(n, n) for n in shape): count
        for shape, count in products(captured(model)).items()
    }
    (loss,) = (c for c in step.calls if c.op == "aten._log_softmax.default")
    assert loss.outputs[0].shape == (6 * 49, 1000) and step.tokens == 6 * 50


def test_a_loss_that_the_model_keeps_is_found(tmp_path: Path) -> None:
    """As llama2.c's, which its script divides: products as of a loss outside, and one more op."""
    returned = 'return {"logits": self.head(x) * scale}'
    kept = """logits = self.head(x) * scale
        self.loss = F.cross_entropy(logits[:, :-1].reshape(-1, 1000), ids[:, 1:].reshape(-1))
        return logits"""
    text = DECODER.replace(returned, kept).replace('["logits"]', "")
    at_once = "F.cross_entropy(logits[:, :-1].reshape(4 * 127, 1000), ids[:, 1:].reshape(-1))"
    model, _ = found(tmp_path, text.replace(at_once, "model.loss"))
    other, _ = found(tmp_path, DECODER)
    assert products(captured(model)) == products(captured(other))
    step = captured(model, 6, 50)
    assert products(step) == products(captured(other, 6, 50))
    (loss,) = (c for c in step.calls if c.op == "aten._log_softmax.default")
    assert loss.outputs[0].shape == (6 * 49, 1000)
    halved, _ = found(tmp_path, text.replace(at_once, "(model.loss / 2)"))
    divisions = [c for c in captured(halved).calls if c.op == "aten.div.Tensor"]
    assert {c.phase for c in divisions} == {"loss", "backward"}


ANGLES = """
        self.register_buffer("angles", torch.randn(128, 256), persistent=False)
        self.mask = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
    def forward(self, ids, places, *, scale=1.0):
        x = self.embed(ids) * self.angles + places[:, None]
        x = x.masked_fill(self.mask.all(1)[:, None], 0)
"""


def test_tables_of_a_sequence_are_as_long_as_it_is(tmp_path: Path) -> None:
    """128 angles, rows of a mask and given places for as many tokens: 50, and 300 rows of six."""
    before = """
    def forward(self, ids, *, scale=1.0):
        x = self.embed(ids)
"""
    text = DECODER.replace(before, ANGLES)
    text = text.replace("(ids, scale", '(ids, torch.arange(128, device="cuda"), scale')
    model, _ = found(tmp_path, text)
    whole = products(captured(model))
    shapes = {tuple({512: 300}.get(n, n) for n in shape): n for shape, n in whole.items()}
    assert products(captured(model, 6, 50)) == shapes
    assert products(captured(model)) == whole  # the script's own are back


def test_a_batch_behind_time_and_an_update_by_hand(tmp_path: Path) -> None:
    """10 sequences for 20 of 35 tokens: 350 rows of logits for 700, in two micro-batches."""
    model, program = found(tmp_path, RECURRENT)
    facts = model.facts
    assert (facts.batch, facts.seq, facts.micro, facts.optimizer) == (20, 35, 2, "sgd")
    assert "by hand" in facts.notes[0] and "one update to the next" in program.notes[0]
    networks = [n["op"] for n in program.ranks[0].networks]  # a GPU runs each as one call
    assert networks == 2 * ["lstm", "lstm_backward"]
    assert {c.within for c in program.ranks[0].calls} == {0, 1, 2, 3, 4}
    assert products(captured(model))[700, 1000] == 1
    assert products(captured(model, 10))[350, 1000] == 1


MASTERS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).cuda().bfloat16()
own = [p.detach().float() for p in model.parameters()]
optimizer = torch.optim.AdamW(own, fused=True)
while True:
    model(torch.randn(8, 64).cuda().bfloat16()).sum().backward()
    for p, one in zip(model.parameters(), own):
        one.grad = p.grad.float()
    optimizer.step()
    torch._foreach_copy_([p.data for p in model.parameters()], own)
"""


def test_a_model_in_bf16_whose_optimizer_keeps_fp32(tmp_path: Path) -> None:
    """As Megatron's: no autocast, so that norms too are in bf16; parameters count as fp32."""
    model, _ = found(tmp_path, MASTERS)
    assert (model.facts.dtype, model.facts.amp, model.facts.parameters) == ("bf16", True, 64 * 67)
    step = captured(model)
    types = {p: {t.dtype for c in step.calls if c.phase == p for t in c.tensors()} for p in PHASES}
    assert types == {"forward": {"bf16"}, "backward": {"bf16"}, "optimizer": {"fp32"}}
    assert {p.dtype for p in step.parameters} == {"fp32"}


def test_the_engine_is_what_launches_most_ops() -> None:
    """2 of 3 ops of forward and backward are compiled, of which 1 is of a CUDA graph."""
    compiled = OpCall(op="aten.mm.default", args=(), compiled=1)
    others = [OpCall(op="aten.mm.default", args=(), phase=p) for p in ("backward", "optimizer")]
    assert engine_of([compiled, replace(compiled, graphed=2), *others]) == "compile"
    assert engine_of([compiled, *others, *others]) == "eager"


TWO = """
import torch
a, b = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
first, second = torch.optim.SGD(a.parameters()), torch.optim.SGD(b.parameters())
x = torch.randn(4, 8).cuda()
while True:
    {}
"""
SPLIT = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
class Rows(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        dist.{}
        return y
model = Rows(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
while True:
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
"""
PARTS = {"all_reduce": "all_reduce(y.detach())", "send": "send(y.detach(), 1)"}
IN_TURN = "a(x).sum().backward(); first.step(); b(x).sum().backward(); second.step()"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (IN_TURN, "2 steps in turn, of Linear"),
        ("(x @ a.weight).sum().backward(); first.step()", "no model found"),
    ],
)
def test_what_no_plan_can_be_of_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(tmp_path, TWO.format(body))


@pytest.mark.parametrize("kind", PARTS)
def test_layers_that_are_split_over_ranks_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"send each other parts of layers \({kind}, as tensor"):
        found(tmp_path, SPLIT.format(PARTS[kind]), gpus=2)


WRAPPED = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
dist.init_process_group("nccl")
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64, bias=False)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
model = nn.Sequential(Layer(), Layer(), nn.Linear(64, 8)).cuda()
{}
optimizer = torch.optim.AdamW(model.parameters())
while True:
    loss = model(torch.randn(32, 64).cuda()).square().mean()
    loss.backward()
    hasattr(model, "clip_grad_norm_") and model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
OWN_CHECKPOINTS = """
class Own(torch.autograd.Function):  # as DeepSpeed's and Megatron's
    @staticmethod
    def forward(ctx, run, outputs, layer, x):
        ctx.run, ctx.layer = run, layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            outputs += [run(layer, x)]
        return outputs[0]
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(ctx.layer, x)
        torch.autograd.backward(output, gradient)
        return None, None, None, x.grad
def own(run, layer, x):
    outputs = []
    Own.apply(run, outputs, layer, x)
    return outputs[0]
run, one = Layer.forward, torch.ones(1, device="cuda", requires_grad=True)
Layer.forward = lambda self, x: own(run, self, x + one)
"""
WRAPS = {
    "recomputed by a function of its own": OWN_CHECKPOINTS,
    "recomputed": "from torch.utils.checkpoint import checkpoint; run = Layer.forward; "
    "one = torch.ones(1, device='cuda', requires_grad=True); "
    "Layer.forward = lambda self, x: checkpoint(run, self, x + one, use_reentrant=True)",
    "DDP": "model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True); "
    "model.buffers = []",  # as Megatron's
    "FSDP2": "for m in (*model, model): fully_shard(m)",
    "FSDP": "model[0] = FSDP(model[0]); model[1] = FSDP(model[1]); model = FSDP(model)",
    "FSDP kept": "model[0] = FSDP(model[0], use_orig_params=True); "
    "model = torch.compile(FSDP(model, use_orig_params=True))",
    "FSDP2 bf16": "fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))",
    "FSDP bf16": "model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
}


@pytest.mark.parametrize("name", WRAPS)
def test_the_model_inside_a_wrapper_is_found(name: str, tmp_path: Path) -> None:
    """Plans are of all its parameters: 2 * 2 * 64 * 256 + 2 * 256 + 8 * 64 + 8, and of no hook."""
    model, _ = found(tmp_path, WRAPPED.format(WRAPS[name]))
    half = "bf16" in name
    assert (model.facts.amp, model.facts.dtype) == (half, "bf16" if half else "fp32")
    assert (model.facts.model, model.facts.parameters) == ("Sequential", 66568)
    assert model.facts.recompute == ("full" if "recomputed" in name else "")
    assert ("+clip" in model.facts.optimizer) == (name.partition(" ")[0] == "FSDP")
    step = captured(model, 48)
    results = {(48, 256): 4, (48, 64): 4 + ("recomputed" in name), (48, 8): 1}  # or of ``one`` too
    assert products(step) == results | {(256, 64): 2, (64, 256): 2, (8, 64): 1}
    assert not any("c10d" in call.op or "fsdp" in call.op for call in step.calls)
