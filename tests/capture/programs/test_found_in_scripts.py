"""What scripts of strangers do, each in a few lines: devices, pools, weights, checks."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from small_scripts import TRAINING, captured, written

from itercast.capture.programs.program import launch_order

TRAIN = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
"""
STEP = "(model(torch.randn(4, 8, device='cuda')).sum()).backward(); optimizer.step()"
STEPS = f"\nfor step in range(9):\n    {STEP}\n"
DEFAULT_DEVICE = """
import torch
torch.set_default_device("cuda")
assert torch.get_default_device() == torch.zeros(3).device == torch.device(type="cuda", index=0)
model = torch.nn.Linear(8, 8)
assert model.weight.is_cuda and torch.zeros(3, device="cpu").is_cpu
torch.set_default_device(None)
assert torch.zeros(3).is_cpu
with torch.device("cuda"):
    assert torch.nn.Linear(2, 2).bias.is_cuda
    assert torch.cdist(torch.rand(2, 2), torch.eye(2)).is_cuda
optimizer = torch.optim.AdamW(model.parameters())
"""
DEFAULT_TYPE = """
import torch
torch.set_default_tensor_type("torch.cuda.FloatTensor")
model = torch.nn.Linear(8, 8)
x = torch.cuda.FloatTensor(3, 8)
assert x.is_cuda and x.shape == (3, 8) and model.weight.is_cuda and torch.arange(3).is_cuda
assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(x, torch.cuda.HalfTensor)
assert not isinstance(torch.zeros(3, device="cpu"), torch.cuda.FloatTensor)
assert x.type(torch.cuda.LongTensor).dtype == torch.int64 and x.type() == "torch.cuda.FloatTensor"
assert torch.ones(3, device="cpu").type("torch.cuda.HalfTensor").is_cuda
torch.set_default_tensor_type(torch.FloatTensor)
assert torch.zeros(3).is_cpu
torch.set_default_tensor_type(torch.cuda.FloatTensor)
assert torch.zeros(3).is_cuda
optimizer = torch.optim.AdamW(model.parameters())
"""
DATASET = """
import subprocess, torch
class Crops(torch.utils.data.Dataset):
    def __init__(self):
        self.data = torch.arange(1000)
        self.epoch = torch.tensor(0).share_memory_()
    def __len__(self):
        return 64
    def __getitem__(self, i):
        assert subprocess.check_output(["cat", "/dev/null"]) == b""  # as ffmpeg reads a video
        at = torch.randint(0, 900, (1,)) + int(self.epoch)
        x = self.data[at : at + 8].float().to(torch.device("cuda"))
        return x, torch.tensor(3.0, device="cuda"), torch.zeros(2).cuda()
model = torch.nn.Linear(8, 8).share_memory().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in torch.utils.data.DataLoader(Crops(), batch_size=4):
    assert all(x.is_cuda for x in batch)
    (model(batch[0]).sum() * batch[1].sum()).backward()
    optimizer.step()
"""
POOLS = """
import concurrent.futures, functools, multiprocessing as mp, operator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Manager, Pool
begun = []
double = functools.partial(operator.mul, 2)
mp.set_start_method("spawn")
shared, queue = mp.Value("i", -1), mp.get_context("forkserver").Queue()
with shared.get_lock():
    shared.value += 1
with Pool(3, begun.append, (1,)) as pool:
    assert all(worker.pid for worker in pool._pool)
    assert pool.map(double, range(3)) == [0, 2, 4] and pool.starmap(operator.add, [(1, 2)]) == [3]
    assert sorted(pool.imap_unordered(double, [1, 2])) == [2, 4]
    assert pool.apply_async(double, (3,)).get() == 6
    try:
        pool.map(functools.partial(operator.truediv, 1), [0])
    except ZeroDivisionError:
        begun.append(1)
assert begun == [1, 1, 1, 1]
with mp.get_context("spawn").Pool(2, maxtasksperchild=3) as pool:
    assert pool.map(double, [2]) == [4]
with ProcessPoolExecutor(max_workers=2, mp_context=mp.get_context("spawn")) as pool:
    assert list(pool.map(double, [2, 3], chunksize=2)) == [4, 6]
with Manager() as manager:
    known, waiting = manager.dict(a=1), manager.Queue()
    waiting.put(known["a"])
    assert waiting.get() == 1 and manager.list([2])[0] == 2
import torch, reader
process, results = reader.started()
assert results.get() == 3.0 and process.pid and process.join() is None
assert process.exitcode == 0 and not process.is_alive() and process.terminate() is None
"""
READER = """
import multiprocessing as mp, torch
def read(results):
    results.put(torch.ones(3).sum().item())
def started():
    results = mp.Queue()
    process = mp.Process(target=read, args=(results,), daemon=True)
    process.start()
    return process, results
"""
ASKED = """
import os, subprocess, sys
assert subprocess.check_output(["hostname"]) and subprocess.getoutput("ls -d /") == "/"
listed = os.popen("nvidia-smi -L").read().splitlines()
assert len(listed) == 1 and listed[0].startswith("GPU 0: NVIDIA H100")
assert subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines() == listed
code, said = subprocess.getstatusoutput("sed p nowhere; ls /")  # as a shell without that program
assert (code, said) == (127, "FileNotFoundError: 'sed': a forecast starts no other programs")
asks = "told = lambda: subprocess.check_output([sys.executable, '-c', 'print(3)'], text=True)"
exec(compile(asks, "/usr/lib/python3/library.py", "exec"))  # a library asks another Python
assert told() == "3\\n"
exec(compile(asks, __file__, "exec"))  # which the script itself may not
try:
    told()
    raise SystemExit("another Python was started")
except FileNotFoundError as exc:
    assert "a forecast starts no other programs" in str(exc)
"""
SCHEDULE = """
schedule = torch.linspace(1, 0, 1000, device="cuda").square()
chosen = schedule[torch.randint(0, 1000, (4,))]
places = [(schedule == t).nonzero().item() for t in chosen]
assert len(places) == 4 and schedule[places].shape == (4,)
"""
WEIGHTS = """
for _ in range(2):
    url = "https://nowhere/resnet.pth"
    state = torch.hub.load_state_dict_from_url(url, model_dir="weights/", progress=False)
    assert model.load_state_dict(state) == model.load_state_dict(state["model"], strict=False)
    model.load_state_dict(torch.load("weights/resnet.pth", map_location="cpu"))
"""
SAVED = """
import socket
with socket.socket() as free:
    free.bind(("", 0))
    assert free.getsockname()[1]
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load, load_file, load_model, save, save_file, save_model
dist.init_process_group()
state = {**model.state_dict(), "places": torch.tensor([1, 2, 5])}
save_file(state, "model.safetensors", {"format": "pt"})
found = load_file("model.safetensors", device="cuda")
assert found["weight"].is_cuda and found["weight"].shape == model.weight.shape
assert found["places"].tolist() == load(save(state))["places"].tolist() == [1, 2, 5]
with safe_open("model.safetensors", framework="pt") as file:
    assert file.metadata() == {"format": "pt"} and file.get_tensor("weight").is_cpu
    part = file.get_slice("places")
    assert part.get_shape() == [3] and part.get_dtype() == "I64" and part[1:].tolist() == [2, 5]
save_model(model, "model.safetensors")
assert load_model(model, "model.safetensors") == (set(), [])
from torch.distributed.fsdp import fully_shard
sharded = torch.nn.Linear(64, 8).cuda()
fully_shard(sharded)
kept = {"model": model.state_dict(), "sharded": sharded.state_dict(), "epoch": 3}
kept["places"] = torch.tensor([1, 2, 5])
dcp.save(kept, checkpoint_id="checkpoint")
found = kept | {"epoch": 0, "places": torch.tensor([0, 0, 0])}
dcp.load(found, checkpoint_id="checkpoint")
assert found["epoch"] == 3 and found["places"].tolist() == [1, 2, 5]
try:
    dcp.load({"other": 1}, checkpoint_id="checkpoint")
except RuntimeError as exc:
    assert str(exc) == "Missing key in checkpoint state_dict: other."
else:
    raise SystemExit("it was found")
"""
LOADED = """
import io, os, pathlib, shutil
model.tied = model.weight
numbers = torch.tensor([1, 2, 5]), torch.tensor(0.5, dtype=torch.bfloat16)
state = {"model": model.state_dict(), "epoch": 3, "numbers": numbers, "noise": torch.rand(7)}
torch.save(state, "model.pt.tmp")
os.replace("model.pt.tmp", "model.pt")
shutil.copyfile("model.pt", "best.pt")
found = torch.load(pathlib.Path("best.pt"), map_location="cpu", weights_only=True)
assert found["epoch"] == 3 and found["numbers"][0].tolist() == [1, 2, 5]
assert found["numbers"][1].item() == 0.5 and found["noise"].shape == (7,)
assert found["model"]["weight"].is_cpu and torch.load("best.pt")["model"]["weight"].is_cuda
model.load_state_dict(found["model"])
buffer = io.BytesIO()
torch.save(model, f=buffer)
buffer.seek(0)
again = torch.load(buffer, weights_only=False)
assert again.tied is again.weight and isinstance(again.weight, torch.nn.Parameter)
import pickle
class Executed:
    def __reduce__(self):
        return exit, (7,)
mark = b"saved by itercast, without data\\n"
pathlib.Path("other.pt").write_bytes(mark * 2 + pickle.dumps(Executed()))
try:  # as of another forecast, or somebody's
    torch.load("other.pt")
except Exception:
    pass
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group()
sharded = torch.nn.Linear(64, 8).cuda()
fully_shard(sharded)
torch.save(sharded.state_dict(), "sharded.pt")
sharded.load_state_dict(torch.load("sharded.pt"))
assert torch.load("sharded.pt")["weight"].to_local().shape == sharded.weight.to_local().shape
"""
XFORMERS = """
import sys, pathlib, types
pathlib.Path("xformers").mkdir()
pathlib.Path("xformers/__init__.py").touch()
pathlib.Path("xformers/ops.py").write_text("def memory_efficient_attention(*args): 1 / 0")
sys.path.insert(0, ".")
from xformers.ops import memory_efficient_attention
class BlockDiagonalCausalMask:  # of 2 sequences, 3 and 6 long
    q_seqinfo = types.SimpleNamespace(seqstart_py=[0, 3, 9])
x = torch.randn(4, 8, 2, 16, device="cuda")
assert memory_efficient_attention(x, x, x, p=0.1).shape == x.shape
assert memory_efficient_attention(x[:, :, 0], x[:, :, 0], x[:, :, 0]).shape == (4, 8, 16)
packed = x.flatten(0, 1)[None, :9]
made = memory_efficient_attention(packed, packed, packed, BlockDiagonalCausalMask())
assert made.is_cuda and made.shape == (1, 9, 2, 16)
"""
PICKLED = """
import pickle
again = pickle.loads(pickle.dumps(model))
assert again.weight.shape == (8, 8) and isinstance(again.weight, torch.nn.Parameter)
turned = pickle.loads(pickle.dumps(torch.zeros(2, 3, dtype=torch.half).t()))
assert turned.stride() == (1, 3) and turned.dtype == torch.half and not turned.requires_grad
"""
CHOSEN = """
weights = torch.rand(1, 3, device="cuda")
drawn = torch.distributions.Normal(weights, weights.exp()).rsample()
loaders = [iter([1] * 9)]
assert next(loaders[torch.ones(1).multinomial(1).item()]) == 1
assert torch.multinomial(weights, 3).tolist() == [[0, 1, 2]]
assert torch.distributions.Categorical(weights).sample().item() == 1
"""
CHECKS = """
x = torch.randn(4, 8, device="cuda")
assert (x > 0).all() and (x[0] < 9).all(), "data"
assert not (x > 0).any()
assert torch.allclose(x, x + 1)
if (x > 0).any() or (
    (x < -9).any()
):
    raise ValueError("data")
if not torch.allclose(x, x + 1):
    raise ValueError("data")
if (torch.isnan(x) | torch.isinf(x)).any():
    exit(3)
bad, norm = torch.zeros(1, device="cuda"), x.norm()  # as DeepSpeed looks for an overflow
bad += torch.isfinite(x.amax()).logical_and(torch.isfinite(x.amin())).logical_not()
assert bad.bool().byte()[0].item() == 0
if (~torch.isfinite(norm) | (norm < 0)).any():
    exit(4)
"""
SHARES = """
best = torch.randn(4, 8, device="cuda").topk(5).indices
right = best.t().eq(torch.zeros(1, 4, dtype=torch.long, device="cuda"))
for k in (1, 5):  # as torch's imagenet example counts what is right
    right[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100 / 4)
torch.histc(best, 8, 0, 8).float().div_(3)
"""


ASKS_GIT = """
import builtins, os, subprocess
assert os.environ["HYDRA_FULL_ERROR"] == "1"
assert type(open) is type(len) and type(builtins.open) is type(len)
assert subprocess.check_output(["df", "-T", "."])
told = subprocess.check_output("git --version 2>/dev/null || git --version", shell=True)
assert told.startswith(b"git version")
"""
OWN_STRIDE = """
model.weight.stride = 1  # as GPT-NeoX's: by what tensor parallelism cuts it
with torch.no_grad():
    model.weight.zero_().mul_(2)
"""
NAMES = "device type dataset pools saved loaded xformers pickled chosen checks shares"
NAMES += " asked schedule git stride"
BEFORE_STEPS = (SAVED, LOADED, XFORMERS, PICKLED, CHOSEN, CHECKS, SHARES, ASKED, SCHEDULE)


@pytest.mark.parametrize(
    "text",
    [DEFAULT_DEVICE + STEPS, DEFAULT_TYPE + STEPS, DATASET, POOLS + TRAIN + STEPS]
    + [TRAIN + more + STEPS for more in (*BEFORE_STEPS, ASKS_GIT, OWN_STRIDE)],
    ids=NAMES.split(),
)
def test_a_script_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library").mkdir()
    (tmp_path / "library/reader.py").write_text(READER)
    monkeypatch.syspath_prepend(tmp_path / "library")
    (tmp_path / "own").mkdir()
    program = captured(written(tmp_path / "own", text), gpus=1)
    assert not program.notes
    assert Counter(c.op for c in program.ranks[0].calls)["aten._foreach_lerp_.Scalar"] == 1


def test_weights_that_are_not_there_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may read the file that torch would have downloaded; it is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    (note,) = captured(written(tmp_path, TRAIN + WEIGHTS + STEPS), gpus=1).notes
    assert note.startswith("resnet.pth is not on this machine: weights are taken to be")
    assert not list(tmp_path.glob("weights/*"))


READERS = """
import multiprocessing
def read(queue):
    while True:
        queue.put([1.0] * 8)
queue = multiprocessing.Queue(3)
for _ in range(2):
    multiprocessing.Process(target=read, args=(queue,), daemon=True).start()
for step in range(9):
    (model(torch.tensor([queue.get()]).cuda()).sum()).backward(); optimizer.step()
"""


def test_daemons_that_make_batches_run_beside_the_script(tmp_path: Path) -> None:
    """Ranks run where they are started, up to their end: this process has none."""
    calls = captured(written(tmp_path, TRAIN + READERS), gpus=1).ranks[0].calls
    (product,) = (c for c in calls if c.op == "aten.addmm.default")
    assert product.outputs[0].shape == (1, 8)


NAMED_TENSORS = """
class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        made.origin = args[0].origin
        return made
class Scans(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        scan = torch.ones(16).as_subclass(Named)
        scan.origin = i
        assert (scan[:8] * 2).origin == i
        return (scan[:8] * 2).as_subclass(torch.Tensor)
for scans in torch.utils.data.DataLoader(Scans(), batch_size=4, num_workers=WORKERS):
    (model(scans.cuda()).sum()).backward(); optimizer.step()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_datasets_use_kinds_of_tensors_with_functions_of_their_own(
    tmp_path: Path, workers: str
) -> None:
    """As MONAI's, whose tensors keep the origin of a scan."""
    text = TRAIN + NAMED_TENSORS.replace("WORKERS", workers)
    assert captured(written(tmp_path, text), gpus=1).samples == 4


LISTS = """
class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.zeros(3, 8, 8), torch.zeros(7, 4)
def together(batch):
    xs, boxes = zip(*batch)
    return {"boxes": torch.cat(boxes), "x": torch.stack(xs)}
apart = lambda batch: tuple(zip(*batch))
sampler = torch.utils.data.BatchSampler(range(64), 4, drop_last=True)
known = {"together": {"batch_size": 4}, "apart": {"batch_sampler": sampler}}["NAME"]
for batch in torch.utils.data.DataLoader(Boxes(), collate_fn=NAME, **known):
    x = batch["x"] if "NAME" == "together" else torch.stack(batch[0])
    (model(x.cuda()).sum()).backward(); optimizer.step()
"""


@pytest.mark.parametrize("name", ["together", "apart"])
def test_pictures_are_counted_not_their_boxes_or_colours(tmp_path: Path, name: str) -> None:
    """4 pictures of 3 colours with 7 boxes each: all 28 boxes come first, or pictures in a list."""
    text = TRAIN + LISTS.replace("NAME", name)
    assert captured(written(tmp_path, text), gpus=1).samples == 4


SPARSE = """
places, values = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]]), torch.rand(4)
graph = torch.sparse_coo_tensor(places, values, (3, 3)).cuda().coalesce()
rows = graph.to_sparse_csr()
assert graph.is_cuda and rows.device.type == "cuda"
table = torch.nn.Embedding(10, 8, sparse=True).cuda()
of_table = torch.optim.SparseAdam(table.parameters())
for step in range(9):
    x = model(table(torch.tensor([1, 2, 2]).cuda()))
    (torch.spmm(graph, x) + rows @ x).sum().backward()
    optimizer.step(); of_table.step(); of_table.zero_grad()
"""


def test_products_with_sparse_matrices_of_a_script(tmp_path: Path) -> None:
    """Two of 3 x 3 with 3 x 8, each with 4 entries, and the two of their backward."""
    calls = captured(written(tmp_path, TRAIN + SPARSE), gpus=1).ranks[0].calls
    sparse = [c for c in calls if c.op == "aten.mm.default" and c.tensors()[0].nnz == 4]
    assert [c.outputs[0].shape for c in sparse] == 4 * [(3, 8)]


def test_a_kernel_of_own_cuda_source_is_a_pass_over_its_tensors(tmp_path: Path) -> None:
    kernel = "kernel = torch.cuda._compile_kernel('source', 'name')"
    call = "kernel(grid=(1, 1, 1), block=(32, 1, 1), args=[model.weight, 64])\n    "
    text = TRAIN + kernel + STEPS.replace("(model(", f"{call}(model(")
    program = captured(written(tmp_path, text), gpus=1)
    (fused,) = (c for c in program.ranks[0].calls if c.op == "itercast.fused")
    assert fused.kwargs["numel"] == 64 and "kernels in Triton or CUDA" in program.notes[0]


SAMPLES = """
@torch.no_grad()
def forwards(times):
    model.eval()
    for _ in range(times):
        model(torch.randn(1, 8, device="cuda"))
    model.train()
for step in range(50):
    (model(torch.randn(4, 8, device="cuda")).sum()).backward(); optimizer.step()
    if step == 0: forwards(10**9)
    if step % 2 and step < MOST: forwards(7)
"""


@pytest.mark.parametrize("most", [0, 50])
def test_evaluations_between_some_steps_are_left_out(tmp_path: Path, most: int) -> None:
    """Text is generated after the first step, and every second one is followed by seven forwards.

    A loop of forwards runs twice in steps that are not kept.
    """
    text = TRAIN + SAMPLES.replace("MOST", str(most))
    calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
    assert Counter(c.op for c in calls)["aten.addmm.default"] == 1


def test_evaluations_between_all_steps_are_part_of_them(tmp_path: Path) -> None:
    text = TRAIN + SAMPLES.replace("step % 2 and step < MOST", "True")
    calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
    assert Counter(calls[i].op for i in launch_order(calls))["aten.addmm.default"] == 1 + 7


TEACHER = """
teacher = torch.nn.Linear(8, 8).cuda().eval()
def update(loss):
    loss.backward()
    optimizer.step()
def train(steps):
    for step in range(steps):
        x = torch.randn(4, 8, device="cuda")
        with torch.no_grad():
            target = teacher(x)
        update((model(x) - target).sum())
    print("trained")
train(9)
raise ValueError("the loop was left")
"""


def test_a_loop_that_trains_beside_a_model_in_evaluation_is_not_left(tmp_path: Path) -> None:
    calls = captured(written(tmp_path, TRAIN + TEACHER), gpus=1).ranks[0].calls
    assert Counter(c.op for c in calls)["aten.addmm.default"] == 2


PARTS = """
boxes = [torch.zeros(n, 4, device="cuda") for n in (6, 2, 0)]
known = torch.stack([torch.ones(6, device="cuda") * (torch.arange(6) < len(x)) for x in boxes])
at = torch.nonzero(known)
assert [len(part) for part in torch.split(at[:, 1], list(map(len, boxes)))] == [6, 2, 0]
assert torch.split(at.t(), [6, 2], dim=1)[0].shape == (2, 6)
"""


def test_lengths_that_a_script_knows_come_before_guesses(tmp_path: Path) -> None:
    """Half of 18 are taken to be true, 8 are."""
    program = captured(written(tmp_path, TRAIN + PARTS + STEPS), gpus=1)
    assert "50 % is true" in program.notes[0]


OTHERS_ATTENTION = """
import torch
from torch import Tensor
from torch.library import custom_op
@custom_op("flash_attn::_fwd", mutates_args=())
def fwd(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, causal: bool) -> Tensor: ...
@fwd.register_fake
def _(q, k, v, cu_seqlens_q, causal):
    return torch.empty_like(q)
@custom_op("flash_attn::_bwd", mutates_args=("dq", "dk", "dv"))
def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, causal: bool
) -> None: ...
class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts):
        ctx.save_for_backward(q, k, v)
        return torch.ops.flash_attn._fwd(q, k, v, starts, True)
    @staticmethod
    def backward(ctx, grad):
        made = [torch.empty_like(x) for x in ctx.saved_tensors]
        torch.ops.flash_attn._bwd(grad, *ctx.saved_tensors, *made, True)
        return *made, None
model = torch.nn.Linear(64, 128, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    SHAPED
    starts = torch.arange(3, device="cuda", dtype=torch.int32)
    Attend.apply(q, k, v, starts).sum().backward()
    optimizer.step()
"""
WHOLE = (
    "q, k, v = model(torch.randn(2, 32, 64, device='cuda')).view(2, 32, 8, 16).split([4, 2, 2], 2)"
)
PACKED = "q, k, v = model(torch.randn(64, 64).cuda()).view(64, 8, 16).split([4, 2, 2], 1)"


@pytest.mark.parametrize("shaped", [WHOLE, PACKED])
def test_attention_of_other_libraries_is_attention(tmp_path: Path, shaped: str) -> None:
    """Two sequences of 32 tokens, four heads of 16 for queries and two for keys and values."""
    text = OTHERS_ATTENTION.replace("SHAPED", shaped)
    program = captured(written(tmp_path, text), gpus=1)
    attention = {c.op: c for c in program.ranks[0].calls if "itercast.sdpa" in c.op}
    forward, backward = attention["itercast.sdpa"], attention["itercast.sdpa_backward"]
    shapes = [(2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16)]
    assert [t.shape for t in forward.tensors()] == shapes
    if shaped == WHOLE:
        assert [t.shape for t in backward.tensors()] == [shapes[0], *shapes]
    assert forward.kwargs["is_causal"] and forward.kwargs["enable_gqa"]
    assert {c.kwargs["kernel"] for c in attention.values()} == {"flash-2"}
    assert program.notes[0].startswith(
        "attention in flash_attn's kernels takes the time of flash-2"
    )


def test_numbers_that_all_ranks_have_are_added_up(tmp_path: Path) -> None:
    """Of 8 ranks: a loop that goes on while each of them has a batch, and what is most of ones."""
    text = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    batches, most = (torch.tensor(1, device="cuda") for _ in range(2))
    dist.all_reduce(batches)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    counts = torch.ones(2, dtype=torch.long, device="cuda")
    dist.all_reduce(counts)
    if batches < 8 or (most, *counts.tolist()) != (1, 8, 8):
        break
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
    assert captured(written(tmp_path, text), gpus=8).ranks[0].calls


def test_a_mesh_has_the_ranks_that_a_script_filled_in_by_hand(tmp_path: Path) -> None:
    """Rank 0 of 2 x 4, laid out with the first axis last: ranks 0, 1 and 0, 2, 4, 6."""
    text = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
dist.init_process_group("nccl")
ranks = torch.arange(8).reshape(4, 2).t()
mesh = DeviceMesh(device_type="cuda", mesh=ranks, mesh_dim_names=("dp", "tp"))
assert DeviceMesh("cuda", [[0, 1], [2, 3], [4, 5], [6, 7]]).shape == (4, 2)
assert dist.get_process_group_ranks(mesh.get_group("dp")) == [0, 1]
assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [0, 2, 4, 6]
"""
    assert captured(written(tmp_path, text + TRAIN + STEPS), gpus=8).ranks[0].calls


def test_boxes_of_a_batch_are_found_by_the_numbers_of_their_images(tmp_path: Path) -> None:
    """Four images have 1, 3, 0 and 2 boxes, as floats: rows of 3 boxes, of which 6 are filled.

    Boxes that an unknown number moved are unknown: half of the 12 values are beyond 0.5.
    """
    text = """
import torch
boxes = [[i, 0.25, 0.75] for i in (0, 1, 1, 1, 3, 3)]
loaded = torch.utils.data.DataLoader(range(9), 1, collate_fn=lambda _: torch.tensor(boxes))
model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for targets in loaded:
    targets = torch.cat([targets[:2], torch.stack(targets[2:].unbind())]).to("cuda")
    assert 0.5 not in targets
    image, widest = targets[:, 0], targets[:, 0].unique(return_counts=True)[1].max()
    rows, filled = torch.zeros(4, widest, 2, device="cuda"), 0
    for i in range(4):
        matches = image == i
        if n := matches.sum():
            rows[i, :n] = targets[matches, 1:]
            filled += int(n)
    assert rows.shape == (4, 3, 2) and filled == 6
    assert (targets[:, 1:] > 0.5).sum() == 6
    targets[:, 1:] *= torch.randn((), device="cuda")
    assert (targets[:, 1:] > 0.9).sum() == 6
    model(rows).sum().backward()
    optimizer.step()
"""
    assert captured(written(tmp_path, text), gpus=1).ranks[0].calls


def test_wandb_logs_nowhere_whatever_mode_a_script_states(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(
        "def init(project, mode='online'): assert mode == 'disabled'"
    )
    text = "import wandb\nwandb.init('p', mode='offline')\nwandb.init(project='p')\n"
    assert captured(written(tmp_path, text + TRAIN + STEPS), gpus=1).ranks[0].calls


COLLATOR = """
class Tokens:
    def __init__(self):
        self.weights, self.model = torch.ones(5), model
    def __call__(self, rows):
        masked = torch.tensor(rows) > 1
        return torch.multinomial(self.weights, int(masked.sum()), replacement=True)
    def bound(self, rows):
        return self(rows)
for collate in (Tokens(), Tokens().bound):
    for ids in torch.utils.data.DataLoader(range(16), 4, collate_fn=collate, num_workers=WORKERS):
        assert ids.max() < 5 and type(model.weight.data) is type(torch.zeros(1))
        model(torch.nn.functional.one_hot(ids.cuda(), 8).float()).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_collator_computes_on_tensors_of_its_own(tmp_path: Path, workers: str) -> None:
    """As one that masks proteins; the model, which it holds too, stays without data."""
    text = TRAIN + COLLATOR.replace("WORKERS", workers)
    assert captured(written(tmp_path, text), gpus=1).ranks[0].calls


MIXED = """
import torch
up = torch.nn.Parameter(torch.tensor([0.5]), requires_grad=False)
mixed = [-2.0, *(torch.zeros_like(up[0][None]), up[0], up.view(1, 1)), 2]
assert torch.tensor(mixed).shape == (5,) and torch.as_tensor([[1, up], [up, 2]]).shape == (2, 2)
assert torch.tensor([up, 1]).shape == torch.tensor([up[0], up]).shape == (2,)
"""


def test_lists_of_numbers_have_tensors_of_one_number_among_them(tmp_path: Path) -> None:
    exec(MIXED)  # as torch has it
    assert captured(written(tmp_path, TRAIN + MIXED + STEPS), gpus=1).ranks


SCRIPTED = """
import copy, io, torch

def written_and_read(module):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file)

class Twice(torch.jit.ScriptModule):
    def __init__(self):
        super().__init__()
        self.factor = torch.jit.Attribute(2.0, float)
    @torch.jit.script_method
    def forward(self, x):
        return self.factor * x

@torch.jit.script
def thrice(x: torch.Tensor) -> torch.Tensor:
    return 3 * x

plain = torch.nn.Linear(8, 8).cuda()
assert not isinstance(plain, torch.jit.ScriptModule)
scripted = torch.jit.script(plain)
read = written_and_read(copy.deepcopy(scripted)).cuda()
graph = torch.fx.Graph()
graph.call_function(torch._assert, (False, "that nobody calls"))
idle = written_and_read(torch.jit.script(torch.fx.GraphModule({}, graph)))
assert isinstance(idle, torch.jit.ScriptModule)
traced = torch.jit.freeze(torch.jit.trace(torch.nn.GELU().eval(), torch.ones(2)).eval())
for module in (scripted, read, traced, Twice()):
    assert isinstance(module, torch.jit.ScriptModule)
assert read.weight.shape == (8, 8) and read.weight is not plain.weight
optimizer = torch.optim.SGD([*scripted.parameters(), *read.parameters()])
for step in range(9):
    x = torch.randn(4, 8, device="cuda")
    thrice(Twice()(traced(scripted(read(x))))).sum().backward()
    optimizer.step()
"""


def test_scripted_modules_run_as_python_and_are_scripted_where_a_program_looks(
    tmp_path: Path,
) -> None:
    """Forward has two products, two multiplications and an activation."""
    calls = captured(written(tmp_path, SCRIPTED), gpus=1).ranks[0].calls
    ops = Counter(c.op.split(".")[1] for c in calls if c.phase == "forward")
    assert (ops["addmm"], ops["mul"], ops["gelu"]) == (2, 2, 1)


RAGGED = """
import torch

@torch.library.custom_op("found_in_scripts::pack", mutates_args=())
def pack(padded: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    lengths = ends.diff().tolist()
    return torch.cat([rows[:n] for rows, n in zip(padded, lengths)])

@pack.register_fake
def _(padded, ends):
    return padded.new_empty(torch.library.get_ctx().new_dynamic_size(), padded.shape[-1])

def zeros(context, grad):
    return torch.zeros(3, 5, 8, device="cuda"), None

pack.register_autograd(zeros, setup_context=lambda ctx, inputs, output: None)

@torch.library.custom_op("found_in_scripts::chosen", mutates_args=())
def chosen(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return (rows.sum(-1) > 0).nonzero()[:, 0]

@chosen.register_fake
def _(rows, starts):
    return rows.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)

model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
lengths = [(torch.zeros(5, 8), n) for n in (2, 5, 3)]
for step in range(9):
    for padded, n in torch.utils.data.DataLoader(lengths, batch_size=3):
        ends = torch.cat([torch.zeros(1, dtype=torch.long), n.cumsum(0)]).cuda()
        rows = model(pack(padded.cuda().requires_grad_(), ends))
        CHOSEN
        rows.exp().sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("more", "rows", "guessed"), [("pass", 10, False), ("", 5, True)])
def test_ops_of_libraries_are_as_long_as_integers_say(
    tmp_path: Path, more: str, rows: int, guessed: bool
) -> None:
    """Of 3 sequences 2 + 5 + 3 rows are there; of these, half are chosen by unknown numbers."""
    text = RAGGED.replace("CHOSEN", more or "rows = rows[chosen(rows.detach(), ends)]")
    program = captured(written(tmp_path, text), gpus=1)
    exponential = next(c for c in program.ranks[0].calls if c.op == "aten.exp.default")
    assert exponential.outputs[0].shape == (rows, 8)
    assert any("50 % is true in a mask, distinct, or kept" in x for x in program.notes) == guessed


OWN_ITERATOR = """
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
class Own(DataLoader):
    def _get_iterator(self):
        return _MultiProcessingDataLoaderIter(self)
for x in Own(torch.ones(64, 8), batch_size=4, num_workers=2):
    (model(x.cuda()).sum()).backward(); optimizer.step()
"""


def test_loaders_that_make_their_own_iterator_load_data(tmp_path: Path) -> None:
    """As litdata's: one worker runs, and gets numbers for tensors without data."""
    program = captured(written(tmp_path, TRAIN + OWN_ITERATOR), gpus=1)
    assert program.samples == 4


SLICES = """
class Slice(torch.Tensor):
    def __new__(cls, table, begin, end):
        return table[begin:end].as_subclass(cls)
    def __init__(self, table, begin, end):
        self.begin = begin
part = Slice(model.weight, 2, 4)
assert isinstance(part, Slice) and part.shape == (2, 8) and part.begin == 2 and part.requires_grad
assert type(torch.nn.Parameter(part.detach())[0].as_subclass(torch.Tensor)) is type(part.detach())
for step in range(9):
    (Slice(model.weight, 0, 2) * torch.ones(2, 8).cuda()).sum().backward()
    assert model.weight.grad.shape == (8, 8)
    optimizer.step()
"""


def test_parts_of_tensors_are_of_a_class_of_their_own(tmp_path: Path) -> None:
    """As torchrec's slices of a table, through which gradients flow."""
    calls = captured(written(tmp_path, TRAIN + SLICES), gpus=1).ranks[0].calls
    assert "aten.slice_backward.default" in {c.op for c in calls}


ON_META = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
    def forward(self, x):
        return x + self.inner(x).relu()
with torch.device("meta"):
    described = torch.nn.Sequential(*(Block() for _ in range(8)))
    described(torch.ones(4, 8)).sum().backward()
assert described[7].inner.weight.grad.is_meta
"""


def test_equal_layers_without_memory_run_backward(tmp_path: Path) -> None:
    """As litgpt counts the work of its model: on the meta device."""
    calls = captured(written(tmp_path, TRAIN + ON_META + STEPS), gpus=1).ranks[0].calls
    assert len([c for c in calls if c.op == "aten.addmm.default"]) == 1


def test_integers_of_one_tensor_may_be_equal(tmp_path: Path) -> None:
    """Tokens of the same unknown document: not none of them, as of two tensors' integers."""
    text = """
documents = (torch.randn(8, device="cuda") * 9).long()
same = (documents.unsqueeze(1) == documents.unsqueeze(0)).any(1)
assert len(x[same]) > 0
"""
    head = "import torch\nx = torch.zeros(8, 8, device='cuda')\n"
    assert captured(written(tmp_path, head + text + TRAINING), gpus=1).ranks


def test_lists_are_made_of_many_elements_at_once(tmp_path: Path) -> None:
    """As data sets prepare tokens: each element by itself would take 10 s. Unknown ones are 1."""
    text = """
import time, torch
began = time.process_time()
tokens = torch.tensor(list(range(20_000)))
tokens[10:] = -1
assert tokens.tolist() == [*range(10), *[-1] * 19_990]
assert torch.randn(2, 10_000, device="cuda").tolist() == [[1.0] * 10_000] * 2
assert torch.zeros(0).tolist() == [] and torch.tensor(3).tolist() == 3
assert time.process_time() - began < 3
"""
    assert captured(written(tmp_path, text + TRAINING), gpus=1).ranks


FLAT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
class Layer(torch.nn.Linear):
    pass
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(8, 8) for _ in range(9))
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x
dist.init_process_group("nccl")
model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Layer}), device_id=0, use_orig_params=WHOLE)
optimizer = torch.optim.AdamW(model.parameters())
"""


def test_layers_whose_weights_are_views_of_one_parameter_may_repeat(tmp_path: Path) -> None:
    """FSDP's first version, as it is by default: its views are written to after each pass.

    Nine layers: a product forward, a gather in each direction, the sum of gradients; as where
    weights stay parameters. What holds none itself sends nothing.
    """
    found = []
    for whole in ("False", "True"):
        script = written(tmp_path, FLAT.replace("WHOLE", whole) + STEPS)
        calls = captured(script, gpus=8).ranks[0].calls
        kinds = Counter(str(c.kwargs.get("kind", c.op)) for c in calls)
        found.append((kinds["aten.addmm.default"], kinds["all_gather"], kinds["reduce_scatter"]))
    assert found == [(9, 9 + 9, 9)] * 2


NUMBERS = """
import torch
model = torch.nn.Linear(1025, 8).cuda()
window = torch.hann_window(2048).cuda()
starts = torch.load("starts.pt")
optimizer = torch.optim.SGD(model.parameters())
for i in range(4):
    waves = torch.randn(int(starts[i + 1] - starts[i]), 44100, device="cuda")
    spectrum = torch.stft(waves, 2048, 512, window=window, return_complex=True)
    loss = model(spectrum.abs().transpose(1, 2)).mean()
    same = torch.istft(spectrum, 2048, 512, window=window, length=44100)  # which reads a number
    if loss > 1000 or loss < 0.001 or (same - waves).abs().max() >= 2:
        continue
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_numbers_of_files_and_guessed_ones_agree_with_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers of a file made elsewhere: 9 waves. Unknown numbers are 1, also beside others.

    A wave of 44,100 has 1 + 44,100 // 512 = 87 windows.
    """
    monkeypatch.chdir(tmp_path)
    torch.save(torch.tensor([0, 5, 7, 16, 20]), "starts.pt")
    program = captured(written(tmp_path, NUMBERS), gpus=1)
    products = [c for c in program.ranks[0].calls if c.op == "aten.addmm.default"]
    assert [c.tensors()[1].shape for c in products] == [(9 * 87, 1025)]


BY_PARTS = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for i in range(4):
    counts = torch.tensor([5, 0, 7], device="cuda")
    ends = counts.new_empty(4)
    ends[:1] = 0
    torch.cumsum(counts, 0, out=ends[1:])
    places = torch.arange(12, device="cuda")
    places = torch.where(places < ends[-1] - 3, places, 12)
    mask = torch.zeros(13, dtype=torch.bool, device="cuda")
    mask[places] = 1
    model(torch.randn(13, 8, device="cuda")[mask]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_integers_that_are_written_part_by_part_are_known(tmp_path: Path) -> None:
    """Of 12 places 9 stay, the others go to one more, as in dense batches of graphs: 10 rows."""
    program = captured(written(tmp_path, BY_PARTS), gpus=1)
    products = [c for c in program.ranks[0].calls if c.op == "aten.addmm.default"]
    assert [c.tensors()[1].shape for c in products] == [(10, 8)]
