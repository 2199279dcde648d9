"""Small programs of one parallel feature each, forecast unchanged by ``itercast run``.

``python tests/endurance/parallel_features.py [NAME ...]`` prints a table: the forecast of each on 8
H100 (pipelines on 2), what a rank sends, and what that is by hand. Each program also runs as it is
under ``torchrun --nproc-per-node 8`` on a machine with as many GPUs. Without GPUs it is smaller and
uses gloo, for ``scripts_against_torchrun.py``.

A model of four blocks has P parameters, B of them in the blocks; a rank has 8 x 512 tokens.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SMALL = "RANK" in os.environ and not torch.cuda.is_available()
WIDTH, WORDS, BLOCKS, TOKENS = (256, 1024, 4, 32) if SMALL else (1024, 32_000, 4, 512)
STEPS = 100  # that are enough for whoever ends them
B = BLOCKS * (4 * WIDTH + 12 * WIDTH**2 + 9 * WIDTH)
P = B + 2 * WORDS * WIDTH + WORDS
ACTIVATION = 4 * 8 * TOKENS * WIDTH  # bytes of the tokens of a rank
Sent = Mapping[str, float]  # bytes by kind of collective
FEATURES: dict[str, tuple[Callable[[torch.device], None], int, Sent]] = {}


def feature(sent: Sent, gpus: int = 8) -> Callable[[Any], Any]:
    """Adds a program, which gets its device, with what a rank sends by hand."""

    def add(run: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        FEATURES[run.__name__] = run, gpus, sent
        return run

    return add


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, 64)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to earlier tokens."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """A small decoder; ``run`` calls a block."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.run: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)  # type: ignore[no-any-return]


def batch(device: torch.device, samples: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    ids, labels = (torch.randint(0, WORDS, (samples, TOKENS), device=device) for _ in range(2))
    return ids, labels


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of all tokens."""
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def train(
    model: Any,
    device: torch.device,
    optimizer: Any = None,
    after: Callable[[], object] = lambda: None,
    inside: Callable[[], Any] = nullcontext,
    steps: int = STEPS,
) -> None:
    """The usual loop; ``after`` each backward, ``inside`` a context."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        ids, labels = batch(device)
        with inside():
            loss_of(model(ids), labels).backward()
        after()
        optimizer.step()
        optimizer.zero_grad()


def replicated(device: torch.device, model: Any = None, **options: Any) -> Any:
    """A model inside DDP."""
    return DistributedDataParallel((model or Model()).to(device), **options)


@feature({"all_reduce": 4 * P})
def ddp(device: torch.device) -> None:
    train(replicated(device, static_graph=True, gradient_as_bucket_view=True), device)


@feature({"all_reduce": 4 * P})
def ddp_no_sync(device: torch.device) -> None:
    model = replicated(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for micro in range(4):
            with nullcontext() if micro == 3 else model.no_sync():
                loss_of(model(batch(device)[0]), batch(device)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


@feature({"all_reduce": 2 * P})
def ddp_bf16_hook(device: torch.device) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = replicated(device)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(model, device)


@feature({"all_reduce": 4 * P})
def ddp_join(device: torch.device) -> None:
    from torch.distributed.algorithms.join import Join

    model = replicated(device)
    with Join([model]):
        train(model, device)


@feature({"all_reduce": 4 * P})
def ddp_compiled(device: torch.device) -> None:
    train(torch.compile(replicated(device)), device)


@feature({"all_reduce": 4 * P})
def ddp_scaler(device: torch.device) -> None:
    model, scaler = replicated(device), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        ids, labels = batch(device)
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(ids), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@feature({"all_reduce": 4 * P})
def ddp_bf16(device: torch.device) -> None:
    train(replicated(device), device, inside=lambda: torch.autocast(device.type, torch.bfloat16))


class Recurrent(nn.Module):
    """A decoder of one GRU between two convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.before, self.after = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.states = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.relu(self.before(self.words(ids).mT)).mT
        x = F.relu(self.after(self.states(x)[0].mT)).mT
        return self.head(x)  # type: ignore[no-any-return]


# Both convolutions, and the three gates of the input and of the state.
OF_RECURRENT = 2 * (3 * WIDTH**2 + WIDTH) + 6 * (WIDTH**2 + WIDTH)


@feature({"all_reduce": 4 * (P - B + OF_RECURRENT)})
def ddp_gru_and_convolutions(device: torch.device) -> None:
    train(replicated(device, Recurrent()), device)


@feature({"all_reduce": 4 * P})
def ddp_checkpoint(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    model = Model()
    model.run = partial(checkpoint, use_reentrant=False)
    train(replicated(device, model), device)


@feature({"all_reduce": 4 * P})
def ddp_flex_attention(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    near = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 512, 512, device=str(device)
    )
    attend = torch.compile(flex_attention)

    class Flexible(Block):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, block_mask=near)  # type: ignore[return-value]

    train(replicated(device, Model(Flexible)), device)


@feature({"all_reduce": 4 * P})
def ddp_streams(device: torch.device) -> None:
    model, copies = replicated(device), torch.cuda.Stream()
    optimizer, following = torch.optim.AdamW(model.parameters()), batch(device)
    for _ in range(STEPS):
        torch.cuda.current_stream().wait_stream(copies)
        ids, labels = following
        with torch.cuda.stream(copies):
            pinned = [t.pin_memory() for t in batch(torch.device("cpu"))]
            following = pinned[0].to(device, non_blocking=True), pinned[1].to(device)
        loss_of(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@feature({"all_reduce": 4 * P})
def ddp_saved(device: torch.device) -> None:
    import torch.distributed.checkpoint as dcp

    model = replicated(device)
    train(model, device, steps=3)
    dcp.save({"model": model.state_dict()}, checkpoint_id="nowhere")
    train(model, device)


@feature({"all_reduce": 4 * P, "broadcast": 4 * P})
def zero_redundancy_optimizer(device: torch.device) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = replicated(device)
    adam = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW)
    train(model, device, adam)


def fsdp1(device: torch.device, strategy: str) -> None:
    """FSDP's first version in bf16."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = FullyShardedDataParallel(
        Model().to(device),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        use_orig_params=True,
        device_id=device,
    )
    train(model, device)


@feature({"all_gather": 2 * (P + B), "reduce_scatter": 2 * P})
def fsdp1_full_shard(device: torch.device) -> None:
    fsdp1(device, "FULL_SHARD")


@feature({"all_gather": 2 * P, "reduce_scatter": 2 * P})
def fsdp1_shard_grad_op(device: torch.device) -> None:
    fsdp1(device, "SHARD_GRAD_OP")


def fsdp2(device: torch.device, compiled: bool = False, ahead: bool = False, **how: Any) -> None:
    """FSDP2 of each block and the rest."""
    from torch.distributed.fsdp import fully_shard

    model = Model() if "offload_policy" in how else Model().to(device)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, **how)
    fully_shard(model, **how)
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        if ahead:
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    train(model, device)


def bf16_policy() -> Any:
    """Parameters in bf16, sums of gradients in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


SHARDED = {"all_gather": 2 * (P + B), "reduce_scatter": 4 * P}


@feature({"all_gather": 4 * (P + B), "reduce_scatter": 4 * P})
def fsdp2_fp32(device: torch.device) -> None:
    fsdp2(device)


@feature(SHARDED)
def fsdp2_bf16_compiled(device: torch.device) -> None:
    fsdp2(device, compiled=True, mp_policy=bf16_policy())


@feature(SHARDED)
def fsdp2_prefetched(device: torch.device) -> None:
    fsdp2(device, ahead=True, mp_policy=bf16_policy())


@feature(SHARDED)
def fsdp2_offloaded(device: torch.device) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy

    fsdp2(device, mp_policy=bf16_policy(), offload_policy=CPUOffloadPolicy())


@feature({**SHARDED, "all_reduce": 4 * P / 4})
def hsdp(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape = 2, dist.get_world_size() // 2
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    fsdp2(device, mesh=mesh, mp_policy=bf16_policy())


def tensor_parallel(device: torch.device, mesh: Any) -> Model:
    """Blocks cut by columns and rows; q, k, v and up each sum the gradient of their input."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = Model().to(device)
    cut: dict[str, Any] = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    cut |= dict.fromkeys(("o", "down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, cut)
    return model


def of_single_tensors(model: nn.Module) -> torch.optim.Optimizer:
    """Some parameters are cut, others whole: no kernel takes both."""
    return torch.optim.AdamW(model.parameters(), foreach=False)


@feature({"all_reduce": BLOCKS * 6 * ACTIVATION})
def tensor_parallel_blocks(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = tensor_parallel(device, init_device_mesh(device.type, (dist.get_world_size(),)))
    train(model, device, of_single_tensors(model))


@feature({"all_reduce": BLOCKS * 6 * ACTIVATION})
def tensor_parallel_with_fsdp2(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(device, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    train(model, device, of_single_tensors(model))


# Keys and values of all tokens in forward and in backward, and the gradients of both once.
@feature({"all_gather": BLOCKS * 4 * ACTIVATION, "exchange": BLOCKS * 2 * ACTIVATION})
def context_parallel(device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as parallel

    mesh, model = init_device_mesh(device.type, (dist.get_world_size(),)), Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        ids, labels = batch(device)
        with parallel(mesh, buffers=[ids, labels], buffer_seq_dims=[1, 1]):
            loss_of(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class Stage(nn.Module):
    """A stage of a pipeline: one block."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH) if first else None
        self.block, self.head = Block(), nn.Linear(WIDTH, WORDS) if last else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x if self.words is None else self.words(x))
        return x if self.head is None else self.head(x)  # type: ignore[no-any-return]


def pipeline(device: torch.device, schedule: str, order: str) -> None:
    """16 micro-batches of two samples through a stage of each rank, or through two."""
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = {"one": [rank], "loop": [rank, ranks + rank], "v": [rank, 2 * ranks - 1 - rank]}[
        order
    ]
    count = ranks * len(numbers)
    modules = [Stage(n == 0, n == count - 1).to(device) for n in numbers]
    stages = [
        pipelining.PipelineStage(module, n, count, device)
        for module, n in zip(modules, numbers, strict=True)
    ]
    made: Any = getattr(pipelining, schedule)
    run = made(stages if len(stages) > 1 else stages[0], 16, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()])
    for _ in range(STEPS):
        ids, labels = batch(device, 32)
        ends = {"target": labels, "losses": []} if count - 1 in numbers else {}
        run.step(*([ids] if 0 in numbers else []), **ends)
        optimizer.step()
        optimizer.zero_grad()


ONE_WAY = 4 * ACTIVATION  # of all micro-batches between two stages


for name, schedule, order, hops in (
    ("gpipe", "ScheduleGPipe", "one", 1),
    ("1f1b", "Schedule1F1B", "one", 1),
    ("interleaved", "ScheduleInterleaved1F1B", "loop", 3),
    ("zero_bubble", "ScheduleInterleavedZeroBubble", "loop", 3),
    ("zero_bubble_v", "ScheduleZBVZeroBubble", "v", 2),
):
    run = partial(pipeline, schedule=schedule, order=order)
    FEATURES[f"pipeline_{name}"] = run, 2, {"send": hops * ONE_WAY, "recv": hops * ONE_WAY}


class Experts(nn.Module):
    """One expert a rank, tokens sent to it and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        import torch.distributed.nn.functional as sums

        tokens = x.flatten(0, 1)
        chosen = self.router(tokens).argmax(-1)
        counts = torch.bincount(chosen, minlength=dist.get_world_size())
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        came, went, order = received.tolist(), counts.tolist(), chosen.argsort()
        here = torch.empty(sum(came), WIDTH, device=x.device)
        here = sums.all_to_all_single(here, tokens[order], came, went)
        done = self.down(F.gelu(self.up(here)))
        back = sums.all_to_all_single(torch.empty_like(tokens), done, went, came)
        return x + torch.empty_like(back).index_copy(0, order, back).view_as(x)


@feature({"all_to_all": 4 * ACTIVATION})
def experts_over_all_to_all(device: torch.device) -> None:
    model = Model().to(device)
    model.blocks.append(Experts().to(device))
    train(model, device)


def own_sums(device: torch.device, each: Callable[[Tensor], object]) -> None:
    """A loop that exchanges each gradient after backward."""
    model = Model().to(device)

    def after() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                each(parameter.grad)

    train(model, device, after=after)


@feature({"all_reduce": 4 * P})
def functional_collectives(device: torch.device) -> None:
    from torch.distributed import _functional_collectives as functional

    own_sums(device, lambda gradient: functional.all_reduce(gradient, "sum", dist.group.WORLD))


@feature({"all_reduce": 4 * P})
def sums_while_backward_runs(device: torch.device) -> None:
    model, sums = Model().to(device), list[Any]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: sums.append(dist.all_reduce(p.grad, async_op=True))
        )

    def after() -> None:
        while sums:
            sums.pop().wait()

    train(model, device, after=after)


@feature({"send": 4 * P, "recv": 4 * P})
def sums_around_a_ring(device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def each(gradient: Tensor) -> None:
        other = torch.empty_like(gradient)
        sent = dist.P2POp(dist.isend, gradient, (rank + 1) % ranks)
        got = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sent, got]):
            work.wait()
        gradient.add_(other).div_(2)

    own_sums(device, each)


@feature({"reduce": 4 * P, "broadcast": 4 * P})
def sums_at_one_rank(device: torch.device) -> None:
    own_sums(device, lambda g: (dist.reduce(g, 0), dist.broadcast(g, 0), dist.barrier()))


def forecast(name: str, gpus: int) -> tuple[str, Sent]:
    """The forecast of a program in ms, or its last line, and what a rank sends."""
    run = [sys.executable, "-m", "itercast", "run", "--gpu", "h100-sxm-80gb", "--json"]
    run += ["--gpus", str(gpus), "--node", "dgx-h100", "--no-cache", __file__, name]
    paths = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        run, capture_output=True, text=True, check=False, env={**os.environ, **paths}
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["nothing said"])[-1], {}
    found = json.loads(done.stdout)
    return f"{found['iteration_us'] / 1e3:8.2f} ms", found.get("sent_bytes", {})


def main(names: list[str]) -> None:
    """Print the table; exit code 1 unless all run and send what they send by hand."""
    right = 0
    for name in names or list(FEATURES):
        _, gpus, counted = FEATURES[name]
        said, sent = forecast(name, gpus)
        near = all(abs(sent.get(kind, 0) / n - 1) < 0.001 for kind, n in counted.items())
        right += bool(sent) and near
        told = ", ".join(f"{kind} {n / 1e6:,.1f} MB" for kind, n in sent.items() if n > 1000)
        print(f"{name:28} {said}  {told}{'' if near else f', by hand {counted}'}", flush=True)
    print(f"{right} of {len(names or FEATURES)} run and send what they send by hand")
    sys.exit(right != len(names or FEATURES))


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo" if SMALL else "nccl")
        place = torch.device("cpu" if SMALL else f"cuda:{os.environ['LOCAL_RANK']}")
        if not SMALL:
            torch.cuda.set_device(place)
        FEATURES[sys.argv[1]][0](place)
    else:
        main(sys.argv[1:])
