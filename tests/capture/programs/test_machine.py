"""What scripts find in torch on GPUs that are not there, each a few lines."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from small_scripts import H100, TRAINING, captured, written

from itercast.capture.programs.outside import RefusedError
from itercast.capture.programs.program import COLLECTIVE, launch_order
from itercast.capture.programs.script import ON_HOST
from itercast.compose.programs.scripts import emulated
from itercast.microbench.hardware.spec import load_gpu

STEPS = """
for step in range(3):
    model(x.float()).sum().backward()
    optimizer.step()
"""
MODEL = """
import torch
model = torch.nn.Linear(8, 8).cuda()
x = torch.arange(32).view(4, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
"""
ACCELERATOR = """
gpu = torch.accelerator.current_accelerator()
assert torch.accelerator.is_available() and gpu.type == "cuda"
assert torch.accelerator.device_count() == 4 and torch.accelerator.current_device_index() == 0
with torch.accelerator.device_index(0):
    torch.accelerator.synchronize()
stream, event = torch.Stream(device=gpu), torch.Event(enable_timing=True)
with stream:
    event.record()
torch.accelerator.current_stream().wait_stream(stream)
assert torch.accelerator.memory_allocated() >= 4 * 72
assert torch.get_device_module().__name__ == "torch.cuda"
model.to(gpu)
"""
DEVICES = """
import copy, os, queue, threading
cuda0 = torch.device("cuda", 0)
y, z = torch.randn(3), torch.randn(3)
for tensor in (model.weight, x, x.float(), torch.arange(3).to(0), y.to("cuda"), z.to(cuda0)):
    assert tensor.device == cuda0 and tensor.is_cuda and not tensor.is_cpu, tensor
    assert tensor.get_device() == 0 and torch.zeros(2, device=tensor.device).device == cuda0
for where in (0, "cuda", cuda0):
    assert torch.nn.Linear(2, 2).to(where).weight.is_cuda
    assert torch.nn.Linear(2, 2).to(device=where, dtype=torch.bfloat16).bias.is_cuda
assert x.float().type() == "torch.cuda.FloatTensor" and x.type(torch.half).is_cuda
assert copy.deepcopy(model).weight.is_cuda and copy.deepcopy({"x": x})["x"].is_cuda  # an average
assert x.new_tensor([1.0]).is_cuda and not y.new_tensor([1.0], device="cpu").is_cuda
fetched = queue.Queue()
fetch = lambda: fetched.put((torch.zeros(4, 8).cuda(), torch.ones(4, device="cuda")))
threading.Thread(target=fetch).start()
batch, weights = fetched.get()
assert batch.is_cuda and weights.is_cuda and (batch.T @ weights).is_cuda
assert os.environb[b"RANK"] == b"0"
assert [torch.cuda.device(i).idx for i in (0, "cuda:1")] == [0, 1]
assert torch.tensor([[y.sum(), 1.0]]).shape == torch.as_tensor([[1.0, y.sum()]]).shape == (1, 2)
on_cpu = torch.randn(3)
assert on_cpu.device.type == "cpu" and not on_cpu.is_cuda and (on_cpu + 1).is_cpu
assert torch.tensor([]).device == torch.get_default_device()
(model(x.float()) * torch.tensor(2.0)).sum().backward()
assert model.weight.grad.is_cuda and model.to(torch.bfloat16).weight.device == cuda0
model.float()
generator = torch.Generator(device=x.device)
assert generator.device == cuda0
torch.randn(3, generator=generator, device="cuda")
with torch.autocast(x.device.type, dtype=torch.bfloat16):
    assert (x.float() @ x.T.float()).dtype == torch.bfloat16
with torch.device("meta"):
    assert torch.nn.Linear(2, 2).weight.device.type == "meta"
"""
ONLY_IN_CUDA_BUILDS = """
assert torch.cuda.nccl.version() >= (2, 20)
assert len(torch.cuda.default_generators) == 4
torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state(device=0), device="cuda:0")
generator = torch.Generator()  # whose state accelerate sends to all ranks
generator.set_state(generator.get_state().to("cuda").cpu())
torch.set_rng_state(torch.get_rng_state().cuda().cpu())
assert torch._C._cuda_getCurrentRawStream(0) == 0
torch._C._cuda_clearCublasWorkspaces()
assert torch.cuda.utilization() == torch.cuda.power_draw(0) == torch.cuda.temperature() == 0
assert torch.cuda.memory_usage() == torch.cuda.clock_rate("cuda") == 0
assert torch.cuda.memory_stats()["allocated_bytes.all.current"] >= 4 * 72
assert torch.cuda.memory_reserved() % 2**21 == 0 < torch.cuda.memory_reserved()
free, total = torch.cuda.mem_get_info()
assert free == total - torch.cuda.memory_reserved()
with torch.cuda.nvtx.range("forward"):
    assert torch.cuda.nvtx.range_push("layer") == torch.cuda.nvtx.range_pop() == 0
assert torch.backends.cuda.is_built() and torch.backends.cuda.is_flash_attention_available()
native = torch.cuda.get_device_capability() >= (8, 0)  # before, torch emulates bf16
assert torch.cuda.is_bf16_supported() and torch.cuda.is_tf32_supported() == native
assert torch.cuda.is_bf16_supported(including_emulation=False) == native
assert torch.cuda.can_device_access_peer(0, 1)
assert torch.cuda.current_stream().cuda_stream == torch.cuda.current_blas_handle() == 0
from torch.cuda.memory import memory_reserved, set_per_process_memory_fraction
set_per_process_memory_fraction(0.9)
assert memory_reserved() == torch.cuda.memory_cached() == torch.cuda.memory_reserved()
torch.cuda.memory._record_memory_history(max_entries=100)
torch.cuda.memory._dump_snapshot("memory.pickle")
assert torch.cuda.memory._snapshot()["segments"] == []
with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
    assert torch.cuda.get_device_properties(0).L2_cache_size == 50 * 2**20
torch.cuda.set_sync_debug_mode(torch.cuda.get_sync_debug_mode())
with torch.cuda.profiler.profile():
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(0, 8, 0))
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
model(x.float())
end.record()
assert begin.elapsed_time(end) > 0
"""


WRAPPED = """
from torch.utils._pytree import tree_map_only
class Marked(torch.Tensor):  # such as torchao's weights of FSDP2 in 8 bits
    @staticmethod
    def __new__(cls, tensor):
        facts = {"dtype": tensor.dtype, "device": tensor.device}
        return torch.Tensor._make_wrapper_subclass(cls, tensor.size(), **facts)
    def __init__(self, tensor):
        self.inside = tensor
    def __tensor_flatten__(self):
        return ["inside"], None
    @staticmethod
    def __tensor_unflatten__(inner, facts, size, stride):
        return Marked(inner["inside"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = tree_map_only(Marked, lambda x: x.inside, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Marked, func(*args, **kwargs))
with torch.device("meta"):
    later = torch.nn.Linear(8, 8, bias=False)
later.weight = torch.nn.Parameter(Marked(later.weight.data))
later.to_empty(device="cuda").to_empty(device="cuda")
assert later.weight.is_cuda and (later.weight + 1).device == torch.device("cuda", 0)
"""
DATA_PARALLEL = """
model = torch.nn.DataParallel(model, device_ids=[0]).cuda()
assert model(torch.randn(3, 8)).is_cuda
"""


STORED = """
for where in ("cuda", "cpu"):
    storage = torch.UntypedStorage(4 * 72, device=where)
    weight = torch.tensor([], device=where).set_(storage, 0, (8, 8))
    bias = torch.tensor([], device=where).set_(storage, 64, (8,))
    assert storage.nbytes() == 4 * 72 and weight.is_cuda == bias.is_cuda == (where == "cuda")
    assert weight.untyped_storage().data_ptr() == bias.untyped_storage().data_ptr()
    model.weight = torch.nn.Parameter(weight.cuda())  # as nanotron's parameters are
    model.bias = torch.nn.Parameter(bias.cuda())
optimizer = torch.optim.SGD(model.parameters())
"""
SHARDED = """
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard
rows = torch.randn(4, 8, device="cuda")
Shard(rows, ShardMetadata([0, 0], [4, 8], f"rank:0/{rows.device}"))
assert str(Shard.from_tensor_and_offsets(rows, [0, 0], 0).metadata.placement) == "rank:0/cuda:0"
"""


@pytest.mark.parametrize(
    "text", [ACCELERATOR, DEVICES, ONLY_IN_CUDA_BUILDS, WRAPPED, DATA_PARALLEL, STORED, SHARDED]
)
def test_torch_answers_as_on_gpus(tmp_path: Path, text: str) -> None:
    program = captured(written(tmp_path, MODEL + text + STEPS), gpus=4)
    silent = "4 ranks, no message seen: each makes a step of its own; rates are of one process"
    assert program.notes == (silent,)


def test_torch_emulates_bf16_before_ampere(tmp_path: Path) -> None:
    """``is_bf16_supported`` is true there, unless told to leave emulation out; so it was false."""
    script = written(tmp_path, MODEL + ONLY_IN_CUDA_BUILDS + STEPS)
    assert captured(script, gpu=replace(H100, compute_capability=(7, 0)), gpus=4).ranks


def test_a_script_finds_the_cores_of_its_node(tmp_path: Path) -> None:
    """By which it chooses how many workers a DataLoader has: 112 of a DGX H100 are 14 a GPU."""
    own = emulated(load_gpu("h100-sxm-80gb"), 14.0, 8)
    text = f"import os\nassert os.cpu_count() == 112\n{TRAINING}"
    assert captured(written(tmp_path, text), gpu=own, gpus=8).ranks


def test_a_step_without_work_on_the_gpu_is_refused(tmp_path: Path) -> None:
    """On a machine without GPUs that is as it should be; what ran before the steps counts not."""
    on_host = TRAINING.replace(".cuda()", "").replace(', device="cuda"', "")
    for stray in ("", "if torch.cuda.is_available(): torch.zeros(2).cuda().exp()"):
        script = written(tmp_path, f"import torch\n{stray}\n{on_host}")
        with pytest.raises(RefusedError, match=f"train.py: {ON_HOST}"):
            captured(script, gpus=1)
    assert captured(script, gpu=replace(H100, kind="cpu"), gpus=1).notes == ()
    assert captured(written(tmp_path, TRAINING), gpus=1).notes == ()


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    script = written(tmp_path, MODEL + "torch.nn.DataParallel(model)(x.float())")
    with pytest.raises(ValueError, match=r"DataParallel.*train.py:6: torch.nn.DataParallel"):
        captured(script, gpus=2)


ON_META = """
import torch
from torch import nn
with torch.device("meta"):
    torch.outer(torch.arange(4), torch.arange(4).float())  # places of rotations
    model = nn.Sequential(nn.Embedding(9, 8), nn.BatchNorm1d(8), nn.Linear(8, 9, bias=False))
    model[2].weight = model[0].weight
model.to(torch.bfloat16)
{make}
assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.arange(4).cuda()).sum().backward()
    optimizer.step()
"""
ASSIGNED = """
whole = {k: torch.empty(v.shape, device="cuda") for k, v in model.state_dict().items()}
model.load_state_dict(whole, assign=True)
model[2].weight = model[0].weight
"""


LOADED = """
for module in (model[0], model[1], model[2]):
    for name, p in list(module.named_parameters()):
        made = type(p)(torch.empty(p.shape, device="cuda"), requires_grad=True)
        module._parameters[name] = made.to("cuda")
model[1].to_empty(device="cuda")
model[2].weight = model[0].weight
"""


@pytest.mark.parametrize(
    ("make", "dtype"),
    [("model.to_empty(device='cuda')", "bf16"), (ASSIGNED, "fp32"), (LOADED, "fp32")],
)
def test_a_model_that_was_built_on_meta(tmp_path: Path, make: str, dtype: str) -> None:
    """A tied matrix of 9 x 8 and the norm's two vectors: three parameters are trained."""
    calls = captured(written(tmp_path, ON_META.format(make=make)), gpus=1).ranks[0].calls
    (step,) = (c for c in calls if c.op == "aten._foreach_add_.List")
    assert [(t.shape, t.dtype) for t in step.args[0]] == [
        (shape, dtype) for shape in ((9, 8), (8,), (8,))
    ]


MESH = """
import copy
import os
import torch
os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # as OLMo-core: waits for all ranks by their store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = copy.deepcopy(init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp", "tp")))
store = torch.distributed.TCPStore("localhost", 29511, 16, False)
for one in (store, torch.distributed.distributed_c10d._get_default_store()):
    assert one.add("mine", 1) == 1
model = torch.nn.Linear(64, 64, bias=False, device="meta")
fully_shard(model, mesh=mesh["dp"])
model.to_empty(device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_mesh_makes_the_process_group(tmp_path: Path) -> None:
    """No socket is opened for it; the two ranks of "dp" gather 64 x 64 weights."""
    calls = captured(written(tmp_path, MESH), gpus=16).ranks[0].calls
    sent = [c.kwargs for c in calls if c.op == COLLECTIVE]
    gathers = [(s["ranks"], s["bytes"]) for s in sent if s["kind"] == "all_gather"]
    assert set(gathers) == {((0, 8), 4 * 64 * 64)}


LIBRARY = """
import torch
def train(model, critic, x):
    optimizer = torch.optim.SGD(model.parameters())
    for iteration in range(9):
        with torch.no_grad():
            for t in range(5):
                critic(x)
        for epoch in range(6):
            model(x).sum().backward()
            optimizer.step()
def fail():
    raise RuntimeError("no") from ValueError("this is why")
def clean_up():
    try:
        raise ValueError("this is why")
    finally:
        raise RuntimeError("no")
"""
USES_IT = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import library
model, critic = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
library.{what}
"""


def test_loops_and_errors_inside_a_library_are_seen(tmp_path: Path) -> None:
    """Five forwards of the critic, then six steps of 3 products less the input's gradient."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "packages/library.py").write_text(LIBRARY)
    train = "train(model, critic, torch.randn(4, 8).cuda())"
    script = written(tmp_path / "scripts", USES_IT.format(what=train))
    program = captured(script, str(tmp_path / "packages"), gpus=1)
    ops = Counter(c.op for c in program.ranks[0].calls)
    assert ops["aten.addmm.default"] == 5 + 6 and ops["aten.mm.default"] == 6
    assert program.optimizer_steps == 6
    for what, line in (("fail", 13), ("clean_up", 18)):
        script = written(tmp_path / "scripts", USES_IT.format(what=f"{what}()"))
        told = (
            r"RuntimeError: no, because of ValueError: this is why "
            rf"\(train.py:6: library.{what}\(\); library.py:{line}: raise RuntimeError"
        )
        with pytest.raises(ValueError, match=told):
            captured(script, str(tmp_path / "packages"), gpus=1)


GENERATES = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    x = torch.randn(4, 8, device="cuda")
    unfinished = torch.ones(4, dtype=torch.long, device="cuda")
    n = 0
    while True:
        with torch.no_grad():
            x = model(x)
        n += 1
        ended = (x.argmax(-1) == 3) | torch.full((4,), n >= 8, device="cuda")
        unfinished = unfinished & ~ended
        if unfinished.max() == 0:
            break
    model(x).sum().backward()
    optimizer.step()
"""
WAITS = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(4, 8, device="cuda")
for step in range(3):
    error = x.abs().max()
    while error.item() > 1e-3:
        error = error / 2
    model(x).sum().backward()
    optimizer.step()
"""


RESAMPLES = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    tokens = torch.randn(4, 8, device="cuda")
    while (tokens.mean(-1) < 0.1).any() or \\
            (tokens.mean(-1) > 0.9).any():
        tokens = torch.randn(4, 8, device="cuda")
    model(tokens).sum().backward()
    optimizer.step()
"""


def test_loops_that_end_by_a_flag_in_a_tensor_end(tmp_path: Path) -> None:
    """Text of eight tokens at most, of which any may be the last; then a step's own product.

    A number that nobody knows turns at last, and the line that reads it is named. With it turns the
    other part of a condition, which is read then: the third step's 999th read is the condition's
    3000th. It draws once before its loop, and after each read but that one.
    """

    def launched(text: str) -> Counter[str]:
        calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
        return Counter(calls[i].op for i in launch_order(calls))

    assert launched(GENERATES)["aten.addmm.default"] == 8 + 1
    (note,) = captured(written(tmp_path, WAITS), gpus=1).notes
    assert "turned after a line had read it 1000 times (train.py:8: while error.item()" in note
    assert launched(RESAMPLES)["aten.randn.default"] == 1 + 998


BATCHES = """
import torch
from collections import UserDict
from dataclasses import dataclass
@dataclass
class Batch:
    tokens: torch.Tensor
    more: dict
def collate(rows):
    tokens = torch.stack(rows)
    if KIND == "dict":
        return UserDict(input_ids=tokens, mask=tokens > 0)
    return Batch(tokens, {"y": tokens})
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(60, 8), batch_size=5, collate_fn=collate)
batches = loader._get_iterator()
for batch in batches:
    x = batch["input_ids"] if KIND == "dict" else batch.more["y"]
    assert type(x).__name__ == "FakeTensor"
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("kind", ["dict", "own"])
def test_batches_that_are_objects_are_opened(tmp_path: Path, kind: str) -> None:
    """As a tokenizer's, or of a class of the user's: five samples of eight numbers, made fake."""
    program = captured(written(tmp_path, BATCHES.replace("KIND", repr(kind))), gpus=1)
    assert program.samples == 5


TOGETHER = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as sent:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    sent.wait()
    optimizer.step()
"""


def test_collectives_of_several_tensors_are_one_message(tmp_path: Path) -> None:
    """The gradients of 8 x 8 weights and 8 biases, as megatron-core sends its buckets."""
    calls = captured(written(tmp_path, TOGETHER), gpus=4).ranks[0].calls
    (sent,) = (c.kwargs for c in calls if c.op == COLLECTIVE)
    assert (sent["kind"], sent["bytes"]) == ("all_reduce", 4 * (64 + 8))


KERNEL = """
from triton.backends.nvidia.driver import libcuda_dirs
from triton.runtime.jit import JITFunction
libcuda_dirs()
JITFunction().run(x, model.weight, 3, grid=(4,), warmup=False)
"""


def test_a_kernel_in_triton_is_a_pass_over_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads 32 numbers of 8 bytes and 64 of 4. A stub stands in for Triton, without a driver."""
    library = tmp_path / "library/triton"
    for name, text in (
        ("runtime/jit", "class JITFunction: run = None"),
        ("runtime/autotuner", "class Autotuner: run = None"),
        ("backends/nvidia/driver", "def libcuda_dirs(): raise AssertionError('no libcuda.so')"),
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "library")
    steps = STEPS.replace("    optimizer", KERNEL.replace("\n", "\n    ") + "\n    optimizer")
    with patch.dict(sys.modules):  # the stub is forgotten again
        program = captured(written(tmp_path, MODEL + steps), gpus=1)
    (call,) = (c for c in program.ranks[0].calls if c.op == "itercast.fused")
    assert [t.nbytes for t in call.args] == [256, 256] and call.kwargs["numel"] == 64
    assert "Triton" in program.notes[0]


def test_packages_of_an_environment_behind_a_link_are_no_files_of_the_script(
    tmp_path: Path,
) -> None:
    """Else a forecast that is kept reads all that torch imports to see whether it changed."""
    (tmp_path / "env").symlink_to(sys.prefix)
    code = "import yaml; from itercast.capture.programs.script import INSTALLED, real_path\n"
    code += "print(all(f.startswith(INSTALLED) for f in (yaml.__file__, real_path(yaml.__file__))))"
    python = tmp_path / "env" / "bin" / Path(sys.executable).name
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr
