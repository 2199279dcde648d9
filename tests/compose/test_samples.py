"""Samples and tokens of all ranks, by hand: of 8 ranks some split layers, stages or sequences."""

from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.programs.program import ProgramCapture
from itercast.compose.programs.samples import Batch, batch_of

ROWS, LENGTH = 4, 16  # of a rank's batch

HEAD = f"""
import torch, torch.distributed as dist, torch.nn.functional as F
from contextlib import nullcontext
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn import functional as passing
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.distributed.tensor import Replicate, Shard
dist.init_process_group("nccl")
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.qkv, self.passed = nn.Linear(32, 96), lambda x: x
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, self.passed(k), self.passed(v))
        return x + y.transpose(1, 2).flatten(2) + self.down(F.relu(self.up(self.norm(x))))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(40, 32), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(32, 40)
    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
def train(model, rows={ROWS}, length={LENGTH}, after=lambda: None, later=lambda: None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=False)
    for _ in range(9):
        ids = torch.randint(0, 40, (rows, length + 1), device="cuda")
        out = model(ids[:, :-1])
        F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()).backward()
        after()
        optimizer.step()
        optimizer.zero_grad()
        later()
def summed(model, group=None):
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
def cut(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {{"up": ColwiseParallel(), "down": RowwiseParallel()}})
"""

ALONE = """
model = Model().cuda()
train(model, after=lambda: summed(model))
"""
FULLY_SHARDED = """
model = Model().cuda()
for block in model.blocks:
    fully_shard(block)
train(fully_shard(model), after=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
"""
HYBRID = """
mesh, model = init_device_mesh("cuda", (2, 4), mesh_dim_names=("copies", "shards")), Model().cuda()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
train(fully_shard(model, mesh=mesh))
"""
TENSOR = """
model = Model().cuda()
cut(model, init_device_mesh("cuda", (8,)))
train(model)
"""
SEQUENCE = """
model, mesh = Model().cuda(), init_device_mesh("cuda", (8,))
parallelize_module(model, mesh, {
    "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
for block in model.blocks:
    block.qkv = nn.Identity()
    block.forward = lambda x, b=block: x + b.down(F.relu(b.up(b.norm(x))))
    parallelize_module(block, mesh, {"norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1))})
train(model)
"""
TENSOR_SHARDED = """
mesh, model = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp")), Model().cuda()
cut(model, mesh["tp"])
for block in model.blocks:
    fully_shard(block, mesh=mesh["dp"])
train(fully_shard(model, mesh=mesh["dp"]))
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
place, stage = mesh["pp"].get_local_rank(), Block()
stage = nn.Sequential(nn.Embedding(40, 32), stage) if place == 0 else stage
stage = (nn.Sequential(stage, nn.Linear(32, 40)) if place == 3 else stage).cuda()
run = ScheduleGPipe(
    PipelineStage(stage, place, 4, "cuda", group=mesh["pp"].get_group()), 4,
    loss_fn=lambda out, ids: F.cross_entropy(out.flatten(0, 1), ids.flatten()))
optimizer = torch.optim.AdamW(stage.parameters())
for _ in range(9):
    ids = torch.randint(0, 40, (4 * 4, 16), device="cuda")
    run.step(*([ids] if place == 0 else []), **({"target": ids} if place == 3 else {}))
    summed(stage, mesh["dp"].get_group())
    optimizer.step()
    optimizer.zero_grad()
"""
CONTEXT = """
model = Model().cuda()
for block in model.blocks:
    block.passed = lambda x: torch.cat(passing.all_gather(x), dim=2)
train(model, length=2, after=%s)
"""
SWAPPED = """
model = Model().cuda()
for block in model.blocks:
    block.passed = lambda x: passing.all_to_all_single(torch.empty_like(x), x.contiguous())
train(model, length=2, after=lambda: summed(model))
"""
EXPERTS = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
    def forward(self, x):
        sent = passing.all_to_all_single(torch.empty_like(x), x)
        done = self.down(F.relu(self.up(sent)))
        return passing.all_to_all_single(torch.empty_like(x), done)
model = Model()
for block in model.blocks:
    block.down, block.up = nn.Sequential(nn.Linear(64, 32), Experts()), nn.Linear(32, 64)
train(model.cuda(), after=lambda: [
    dist.all_reduce(p.grad) for n, p in model.named_parameters() if "down.1" not in n])
"""
CONTRASTIVE = """
class Gathering(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def forward(self, ids):
        out = self.model(ids)
        return out + sum(passing.all_gather(out.mean(1))).mean()
model = Gathering().cuda()
train(nn.parallel.DistributedDataParallel(model))
"""
LOCAL = """
model = Model().cuda()
def averaged():
    for p in model.parameters():
        dist.all_reduce(p.data)
train(model, later=averaged)
"""
ADAPTED = """
model = Model().cuda().requires_grad_(False)
for block in model.blocks:
    block.down = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 32)).cuda()
train(nn.parallel.DistributedDataParallel(model))
"""
SERVED = """
model = Model().cuda().eval()
cut(model, init_device_mesh("cuda", (8,)))
with torch.no_grad():
    for _ in range(99):
        model(torch.randint(0, 40, (4, 16), device="cuda"))
"""

# Ranks that take samples of their own, of 8, and among how many a sequence is cut.
PROGRAMS = {
    "data parallel": (ALONE, 8, 1),
    "FSDP2": (FULLY_SHARDED, 8, 1),
    "HSDP": (HYBRID, 8, 1),
    "tensor parallel": (TENSOR, 1, 1),
    "sequence parallel": (SEQUENCE, 1, 1),
    "tensor parallel in FSDP2": (TENSOR_SHARDED, 2, 1),
    "experts among data-parallel ranks": (EXPERTS, 8, 1),
    "features gathered for a loss": (CONTRASTIVE, 8, 1),
    "parameters averaged": (LOCAL, 8, 1),
    "adapters": (ADAPTED, 8, 1),
    "keys gathered": (CONTEXT % "lambda: summed(model)", 8, 8),
    "keys exchanged": (SWAPPED, 8, 8),
}


def batch(folder: Path, text: str, gpus: int = 8) -> tuple[ProgramCapture, Batch]:
    program = captured(written(folder, HEAD + text), gpus=gpus)
    return program, batch_of(program)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_that_share_samples_count_once(tmp_path: Path, name: str) -> None:
    text, apart, parts = PROGRAMS[name]
    _, found = batch(tmp_path, text)
    length = LENGTH if parts == 1 else 2  # of the part that a rank has
    assert found.tokens == apart * ROWS * length
    assert (found.samples, found.own_samples) == (apart * ROWS / parts, ROWS)


def test_stages_share_samples(tmp_path: Path) -> None:
    """Two pipelines of four stages, each with 4 micro-batches of 4 rows."""
    program, found = batch(tmp_path, PIPELINE)
    assert len(program.ranks) == 4
    assert (found.samples, found.own_samples) == (2 * 16, 16) and found.tokens == 2 * 16 * LENGTH


CLOSURE = """
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    ids = torch.randint(0, 40, (4, 17), device="cuda")
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        summed(model)
        return loss
    optimizer.step({closure})
"""


@pytest.mark.parametrize("closure", ["closure", "closure=closure"])
def test_what_an_optimizer_s_closure_runs_is_forward_and_backward(
    closure: str, tmp_path: Path
) -> None:
    """As Lightning runs each step: 8 ranks take 4 samples of 16 tokens each."""
    program, found = batch(tmp_path, CLOSURE.format(closure=closure))
    assert (found.samples, found.tokens) == (8 * 4, 8 * 4 * 16)
    phases = {call.phase for call in program.ranks[0].calls if call.op == "aten.addmm.default"}
    assert phases == {"forward"}


FROM_ROWS = """
first, second = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(9):
    for micro in range(3):
        with torch.no_grad():
            second(torch.randn(99, 8, device="cuda"))
        x = torch.randn(5, 7, 8, device="cuda")
        {forward}.square().mean().backward()
    summed(first)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("forward", "samples"),
    [("first(x)", 3 * 5), ("second(first(x))", 0), ("(x @ first.weight + first.bias)", 0)],
)
def test_rows_of_the_model_are_samples_where_nothing_else_says(
    forward: str, samples: int, tmp_path: Path
) -> None:
    """8 ranks, 3 micro-batches of 5 rows; not where two models run, or none, before a backward."""
    _, found = batch(tmp_path, FROM_ROWS.format(forward=forward))
    assert (found.samples, found.own_samples) == (8 * samples, samples)
    assert found.note.endswith("a row of the model's input") == (samples > 0)


ENCODED = """
class Both(Model):  # an encoder of ids and a decoder of others, with one table, as T5 has
    def forward(self, ids, more):
        x = self.blocks[0](self.words(ids)).mean(1, keepdim=True)
        return self.head(self.blocks[1](self.words(more) + x))
model = Both().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    for micro in range({micro}):
        ids, more = (torch.randint(0, 40, (4, n), device="cuda") for n in (16, {length}))
        out = model(ids, more)
        F.cross_entropy(out.flatten(0, 1), more.flatten()).backward()
    summed(model)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("length", [8, 16])
def test_an_encoder_s_and_a_decoder_s_ids_are_of_the_same_samples(
    micro: int, length: int, tmp_path: Path
) -> None:
    """On 8 ranks, 4 samples of 16 tokens and 8 or 16 more in each micro-batch."""
    _, found = batch(tmp_path, ENCODED.format(micro=micro, length=length))
    assert (found.samples, found.own_samples) == (8 * 4 * micro, 4 * micro)
    assert found.tokens == 8 * 4 * micro * (16 + length)


GATHERED = """
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        whole = torch.empty(40, 32, device="cuda")
        dist.all_gather_into_tensor(whole, shard.detach())
        return whole
    @staticmethod
    def backward(ctx, gradient):
        own = torch.empty(5, 32, device="cuda")
        dist.reduce_scatter_tensor(own, gradient)
        return own
shard, model = nn.Parameter(torch.randn(5, 32, device="cuda")), Model().cuda()
optimizer = torch.optim.AdamW([shard, *model.parameters()])
for _ in range(9):
    for micro in range(3):
        ids = torch.randint(0, 40, (4, 17), device="cuda")
        x = F.embedding(ids[:, :-1], Gathered.apply(shard))
        for block in model.blocks:
            x = block(x)
        F.cross_entropy(model.head(x).flatten(0, 1), ids[:, 1:].flatten()).backward()
    summed(nn.ModuleList([*model.blocks, model.head]))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_table_that_each_micro_batch_gathers_is_one(tmp_path: Path) -> None:
    """As under ZeRO-3: 8 ranks take 3 micro-batches of 4 samples of 16 tokens."""
    _, found = batch(tmp_path, GATHERED)
    assert (found.samples, found.own_samples) == (8 * 3 * 4, 3 * 4)
    assert found.tokens == 8 * 3 * 4 * 16


PACKED = """
from torch.utils.data import DataLoader
model = nn.parallel.DistributedDataParallel(Model().cuda())
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader([torch.arange(64) % 40] * 640, batch_size=None):  # of several texts, padded
    ids = batch[None, :60].cuda()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
"""


COMPARED = """
items = nn.Embedding(40, 32).cuda()
class Ranker(Model):
    def forward(self, ids):
        bought, other = items(ids), items(ids.flip(0))
        found = self.blocks[0](items(ids))
        scores = torch.stack([(found * bought).sum(-1), (found * other).sum(-1)], -1)
        return F.pad(scores, (0, 38))
train(Ranker().cuda())
"""
CONDITIONED = """
class Painter(Model):
    def forward(self, ids):
        with torch.no_grad():
            text = self.words(ids)
        latents = self.blocks[0](torch.randn({ROWS}, {SIZE}, 32, device="cuda"))
        return self.head(self.blocks[1](text) + latents[:, :{LENGTH}])
train(Painter().cuda())
"""


CATEGORIES = """
class Clicks(Model):
    def forward(self, ids):
        first, second = self.words(ids[:, :1]), self.head.weight[ids[:, 1:2]]
        return self.head(self.blocks[0](first + second)).expand(-1, {LENGTH}, -1)
train(Clicks().cuda())
"""


PADDED = """
model = Model()
model.words = nn.Embedding(40, 32, padding_idx=0)
train(model.cuda())
"""


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (PADDED, ROWS * LENGTH),
        (COMPARED, ROWS * LENGTH),
        (CATEGORIES, 0),
        (CONDITIONED.replace("{SIZE}", str(4 * LENGTH)), 0),
        (CONDITIONED.replace("{SIZE}", str(LENGTH)), ROWS * LENGTH),
    ],
    ids=[
        "a table with a row for padding",
        "items compared",
        "one category of each row",
        "more latents than text",
        "as many",
    ],
)
def test_tokens_are_looked_up_for_layers(tmp_path: Path, text: str, tokens: int) -> None:
    """Two of three lookups are compared with results; text of 16 tokens is beside 64 latents."""
    text = text.replace("{ROWS}", str(ROWS)).replace("{LENGTH}", str(LENGTH))
    _, found = batch(tmp_path, text, gpus=1)
    assert (found.samples, found.tokens) == (ROWS, tokens)


def test_tokens_of_a_packed_row_are_not_samples(tmp_path: Path) -> None:
    """64 numbers are loaded, of which 60 are looked up as one row: a sample on each of 8 ranks."""
    _, found = batch(tmp_path, PACKED)
    assert (found.samples, found.own_samples, found.tokens) == (8, 1, 8 * 60)


@pytest.mark.parametrize("text", [SERVED, CONTEXT % "lambda: None"])
def test_what_no_gradient_tells_is_not_known(tmp_path: Path, text: str) -> None:
    _, found = batch(tmp_path, text)
    assert (found.samples, found.tokens) == (0, 0)
    assert found.note == "which of 8 ranks share samples is not known: rates are left out"


DISPATCHED = """
from torch.utils.data import DataLoader
model = nn.parallel.DistributedDataParallel(nn.Conv2d(3, 8, 3).cuda())
optimizer = torch.optim.SGD(model.parameters())
for x in DataLoader([torch.zeros(3, 8, 8)] * 640, batch_size=%d):
    %s
    model(x.cuda()).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("loaded", "line", "everyone"),
    [
        (4, "", 8 * 4),  # each rank loads its own
        (64, "x = torch.cat([x.cuda()]); dist.broadcast(x, 0); x = x[:8]", 64),
        (64, "y = x[:8].cuda(); dist.scatter(y, list(x.chunk(8)), 0); x = y", 64),
        (4, "dist.broadcast(model.module.weight.data, 0)", 8 * 4),  # no batch
    ],
)
def test_a_batch_that_one_rank_gives_others_counts_once(
    tmp_path: Path, loaded: int, line: str, everyone: int
) -> None:
    _, found = batch(tmp_path, DISPATCHED % (loaded, line or "pass"))
    assert found.samples == everyone and found.own_samples == everyone // 8
