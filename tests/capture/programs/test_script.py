"""Unchanged training scripts run as one rank on GPUs that are not there, or are refused."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from small_scripts import H100, ITEM, TRAINING, captured, written
from torch.utils.data import DataLoader

from itercast.capture.input.batches import TakenBatches
from itercast.capture.input.lane import Batches, InputLane
from itercast.capture.input.timers import batch_size
from itercast.capture.programs.gpus.asked import Answers, Asked
from itercast.capture.programs.program import COLLECTIVE, HOST_COPY, read_program, write_program
from itercast.capture.programs.script import Script, capture_script
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target
from itercast.microbench.ops.step.optimizer import UNSCALE

EXAMPLE = Path(__file__).parents[3] / "examples/train_gpt.py"
SMALL = ("--layers=1", "--width=64", "--heads=2", "--vocabulary=500", "--length=16")
ADAMW = "aten._foreach_lerp_.Scalar"


def test_the_example_under_ddp_with_accumulation() -> None:
    """Two micro-batches of three samples, one reduction of all gradients after the second.

    Parameters: embeddings (500 + 16) x 64; a block 4 x 64^2 + 8 x 64^2 weights, biases 3 x 64 + 64
    + 256 + 64 and two norms of 2 x 64; a last norm 2 x 64; the head 500 x 64. As on GPUs products
    and attention are in bf16, norms and the loss in fp32. Batches are loaded for real.
    """
    parameters = 516 * 64 + 12 * 64**2 + (192 + 64 + 256 + 64) + 6 * 64 + 500 * 64
    taken = TakenBatches()
    script = Script(path=EXAMPLE, arguments=[*SMALL, "--batch=3", "--accumulate=2"])
    program = capture_script(script, H100, 64, 8, taken)
    calls = program.ranks[0].calls
    sent = [c.kwargs for c in calls if c.op == COLLECTIVE]
    assert {(s["kind"], s["ranks"]) for s in sent} == {("all_reduce", tuple(range(64)))}
    assert sum(s["bytes"] for s in sent) == 4 * parameters
    ops = Counter(c.op for c in calls)
    assert ops["itercast.sdpa"] == ops["itercast.sdpa_backward"] == 2
    assert ops[ADAMW] == 1  # as on a GPU: foreach
    assert ops[ITEM] == 1  # the loss that rank 0 prints
    forward = [c for c in calls if c.phase == "forward" and c.tensors()]
    dtypes = {c.op: c.tensors()[0].dtype for c in forward}
    assert dtypes["itercast.sdpa"] == dtypes["aten.addmm.default"] == "bf16"
    assert dtypes["aten.native_layer_norm.default"] == dtypes["aten._log_softmax.default"] == "fp32"
    assert taken.samples == [3, 3] and program.samples == 6
    lane = taken.lane("train_gpt.py")
    assert lane is not None and lane.batch_samples == 3 and lane.alone.mean_us > 0
    assert len(lane.alone.wall_us) == 3 * 2 - 1  # of three steps, without the first batch
    assert not lane.copied_ahead


COPIES_AHEAD = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer, side = torch.optim.SGD(model.parameters()), torch.cuda.Stream()
def ahead(loader):
    for x in loader:
        with torch.cuda.stream(side):
            x = x.cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        yield x
for x in ahead(torch.utils.data.DataLoader(torch.zeros(40, 8), batch_size=4, pin_memory=True)):
    model(x).sum().backward()
    optimizer.step()
"""


def test_batches_that_a_script_copies_on_another_stream_are_copied_ahead(tmp_path: Path) -> None:
    """NVIDIA's data_prefetcher, as in examples/imagenet of apex."""
    taken = TakenBatches()
    capture_script(Script(path=written(tmp_path, COPIES_AHEAD)), H100, 1, 1, taken)
    lane = taken.lane("train.py")
    assert lane is not None and lane.copied_ahead


def test_a_script_sees_the_gpus_that_were_asked_for(tmp_path: Path) -> None:
    seen = tmp_path / "seen.txt"
    look = f"""
import os, torch
open({str(seen)!r}, "w").write(repr((
    torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_capability(),
    os.environ["RANK"], os.environ["WORLD_SIZE"], torch.cuda.get_device_properties(0).total_memory,
)))
"""
    captured(written(tmp_path, look + TRAINING), gpus=4)
    assert seen.read_text() == repr((True, 4, (9, 0), "0", "4", H100.memory_bytes))


RECOMPUTED = """
import torch
from torch.utils.checkpoint import checkpoint
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
class Product(torch.autograd.Function):  # as Megatron and Apex write theirs
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight
    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)
def attend(x):
    y = model(Product.apply(x, model.weight)).float().view(4, 1, 8, 8)
    with torch.autocast("cuda", enabled=False):
        y = y + torch.nn.functional.scaled_dot_product_attention(y, y, y)
    return torch.nn.functional.scaled_dot_product_attention(y, y, y)
for step in range(3):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = checkpoint(attend, torch.randn(4, 8, 8, device="cuda"), use_reentrant=False)
    y.float().sum().backward()
    optimizer.step()
"""


def test_recomputation_and_own_functions_cast_as_forward_did(tmp_path: Path) -> None:
    """Attention outside autocast takes fp32, inside bf16; so does the forward run again.

    All products are in bf16, also those that a function's own backward makes under ``custom_bwd``.
    """
    calls = captured(written(tmp_path, RECOMPUTED), gpus=1).ranks[0].calls
    taken = [(c.phase, c.tensors()[0].dtype) for c in calls if c.op == "itercast.sdpa"]
    assert taken == [(p, d) for p in ("forward", "backward") for d in ("fp32", "bf16")]
    products = [c for c in calls if c.op in ("aten.mm.default", "aten.bmm.default")]
    assert {t.dtype for c in products for t in c.tensors()} == {"bf16"}


CROPS = """
import numpy, torch
tokens = numpy.arange(5000)
model = torch.nn.Embedding(5000, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
generator = torch.Generator(device="cuda").manual_seed(3)
for step in range(3):
    starts = torch.randint(len(tokens) - 16, (4,), generator=generator)
    x = torch.stack([torch.from_numpy(tokens[i : i + 16]) for i in starts]).to("cuda")
    model(x).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        right = (torch.nn.functional.linear(model(x), model.weight).argmax(-1) == x).sum()
    right.item()
"""


def test_random_places_of_data_that_the_host_reads(tmp_path: Path) -> None:
    """Four crops of 16 tokens at numbers the host drew: no wait; what the GPU counted: one.

    In inference mode a product comes as the product that it is.
    """
    calls = captured(written(tmp_path, CROPS), gpus=1).ranks[0].calls
    shapes = [c.tensors()[1].shape for c in calls if c.op == "aten.embedding.default"]
    assert shapes == [(4, 16)] * 2
    ops = Counter(c.op for c in calls)
    assert ops[ITEM] == 1 and ops["aten.mm.default"] == 1


CHOSEN = """
import torch
sizes, wider = (8,), torch.rand(1).item() < 0.6
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    chosen = int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())
    third = int(torch.empty(1).uniform_(2, 4)) + wider
    model(torch.randn(third, sizes[chosen], device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_float_drawn_from_a_range_is_its_mean(tmp_path: Path) -> None:
    """0.5 of 0..1, and 3 of 2..4: detectors choose the size of an image by its floor."""
    calls = captured(written(tmp_path, CHOSEN), gpus=1).ranks[0].calls
    (product,) = [c for c in calls if c.op == "aten.addmm.default"]
    assert product.tensors()[1].shape == (3 + 1, 8)


IN_MEMORY = """
import torch
class Scaled(torch.utils.data.Dataset):
    def __init__(self):
        self.inner = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.arange(64))
        self.factors = [torch.tensor(2.0)]
        self.packs = [{"lengths": torch.tensor([3, 5])} for _ in range(1100)]
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x, y = self.inner[i]
        first, last = self.packs[1050 + i % 50]["lengths"]  # as torchtune's, which counts tokens
        parts = torch.full((first,), self.factors[0].item()), torch.full((last,), 1.0)
        return torch.cat(parts) * x, y
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for x, y in torch.utils.data.DataLoader(Scaled(), batch_size=4):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def test_a_dataset_that_the_script_made_has_data(tmp_path: Path) -> None:
    """Its tensors are zeros and its constants numbers, so that its batches take their own time."""
    taken = TakenBatches()
    script = Script(path=written(tmp_path, IN_MEMORY))
    capture_script(script, H100, 1, 8, taken)
    assert taken.samples == [4] and taken.of[taken.loader].nbytes == 4 * (8 * 4 + 8)


TRANSFORMED = """
import traceback, torch
class Flip(torch.nn.Module):  # as torchvision's transforms
    def forward(self, x):
        callers = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
        assert not [f for f in callers[: callers.index(__file__, 1)] if "/capture/" in f], callers
        return x
class Pictures(list):
    flip = Flip()
    def __getitem__(self, i):
        return self.flip(torch.zeros(8))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for x in torch.utils.data.DataLoader(Pictures(range(64)), batch_size=4, num_workers={}):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_transforms_run_as_torch_runs_modules(tmp_path: Path, workers: int) -> None:
    """What watches models for passes that repeat took 0.6 s for 128 small images, not 0.02."""
    assert captured(written(tmp_path, TRANSFORMED.format(workers)), gpus=1).samples == 4


WORKERS = """
import torch, warnings
warnings.simplefilter("error")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for x in torch.utils.data.DataLoader(torch.zeros(40, 8), batch_size=4, num_workers=64):
    model(x.cuda()).sum().backward()
    optimizer.step()
"""


def test_workers_are_not_too_many_for_the_cores_here(tmp_path: Path) -> None:
    """torch's warning is of this machine's, not of the host of the GPU that is asked for."""
    assert captured(written(tmp_path, WORKERS), gpus=1).samples == 4


def test_answers_hold_while_a_folder_has_the_same_names(tmp_path: Path) -> None:
    """Lock files come and go in folders of caches, whose time they change."""
    asked = Asked(H100)
    with asked.noted():
        os.listdir(tmp_path)
    answers = Answers(**asked.answers(set(), ()))
    lock = tmp_path / ".lock"
    lock.touch()
    assert not answers.hold(H100)
    lock.unlink()
    assert answers.hold(H100)


def test_answers_hold_while_a_file_that_was_looked_at_is_there(tmp_path: Path) -> None:
    """A script may resume from a checkpoint if there is one, and take longer the larger it is."""
    asked, later, kept = Asked(H100), tmp_path / "last.pt", tmp_path / "data.bin"
    kept.write_bytes(b"1234")
    with asked.noted():
        assert not later.exists() and os.path.getsize(kept) == 4
    answers = Answers(**asked.answers(set(), ()))
    assert answers.seen == {str(later): "", str(kept): "4 bytes"}
    assert Answers(**asked.answers(set(), (str(Path(__file__).parent),))).seen == {}  # a package
    for path in (later, kept):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(b"12345")
        assert not answers.hold(H100)
        path.unlink() if before is None else path.write_bytes(before)
        assert answers.hold(H100)
    run = tmp_path / "run-at-12-00"
    with asked.noted():
        assert not run.exists()
        run.mkdir()
        (run / "log.txt").touch()
        (run / "last").symlink_to("log.txt")
        shutil.copy2(run / "last", run / "best", follow_symlinks=False)
    assert Answers(**asked.answers(set(), ())).hold(H100)  # the next run has another name
    later.mkdir()  # as a script does for what it saves, which is gone when its forecast ends
    assert answers.hold(H100)
    (later / "step-1").touch()
    assert not answers.hold(H100)


def test_answers_hold_where_variables_differ_that_were_only_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries copy them all: dict(os.environ) and {**os.environ}; SHLVL is another in each shell.

    A loop over the names reads each one by itself.
    """
    monkeypatch.setenv("SHLVL", "1")
    copied, looped = Asked(H100), Asked(H100)
    with copied.noted():
        known = [dict(os.environ), {**os.environ}, os.environ.copy(), os.environ | {}]
        assert all(variables["SHLVL"] == "1" for variables in known)
        assert os.environ.get("HOME", "") == known[0].get("HOME", "")
    with looped.noted():
        assert "1" in [os.environ[name] for name in os.environ.keys()]  # noqa: SIM118
    assert [*copied.answers(set(), ())["variables"]] == ["HOME"]
    monkeypatch.setenv("SHLVL", "2")
    assert Answers(**copied.answers(set(), ())).hold(H100)
    assert not Answers(**looped.answers(set(), ())).hold(H100)


VIEWS = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
two_crops = lambda samples: {"crops": torch.stack(samples + samples), "views": len(samples)}
for batch in torch.utils.data.DataLoader(torch.zeros(40, 8), batch_size=4, collate_fn=two_crops):
    model(batch["crops"].cuda()).sum().backward()
    optimizer.step()
"""


def test_two_crops_of_a_picture_are_one_sample(tmp_path: Path) -> None:
    assert captured(written(tmp_path, VIEWS), gpus=1).samples == 4


def test_batches_without_tensors_have_as_many_samples_as_the_loader_asks_for() -> None:
    """A video of 81 frames and its text are one sample, not as many as the dict has keys."""
    loader: DataLoader[int] = DataLoader(range(8))
    assert batch_size({"video": [object()] * 81, "prompt": "a dog"}, loader) == (1, 0)
    loader = DataLoader(range(8), batch_sampler=[[0, 1, 2]])
    assert batch_size(["a", "b", "c"], loader) == (3, 0)


SPAWNED = """
import numpy, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel
def train(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    layer = torch.nn.Linear(64, 64, bias=False)  # which is moved before rank 0 sends its weights
    inner = FullyShardedDataParallel(layer, device_id=rank, sync_module_states=True)
    whole = torch.nn.Sequential(inner, torch.nn.Linear(64, 8)).to(rank)
    model = FullyShardedDataParallel(whole, device_id=rank)
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(3):
        loss = model(torch.randn(4, 64, device=rank)).sum()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        torch.save(model.state_dict, "never")
        numpy.mean([loss.detach().cpu().numpy(), torch.cuda.memory_stats()["active.all.peak"]])
if __name__ == "__main__":
"""
SPAWN = "    mp.spawn(train, args=(8,), nprocs=torch.cuda.device_count())"
PROCESSES = """
    processes = [mp.get_context("spawn").Process(target=train, args=(rank, 8)) for rank in range(8)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
"""


@pytest.mark.parametrize("start", [SPAWN, PROCESSES])
def test_processes_that_a_script_starts_with_the_first_fsdp(tmp_path: Path, start: str) -> None:
    """Two units: 64 x 64, and 64 x 8 + 8 weights in shards of an eighth, rounded up.

    Forward gathers both, backward the inner one again; gradients are scattered back.
    """
    calls = captured(written(tmp_path, SPAWNED + start), gpus=8).ranks[0].calls
    sent = [(c.kwargs["kind"], c.kwargs["bytes"]) for c in calls if c.op == COLLECTIVE]
    inner, outer = 4 * 64 * 64, 4 * (64 * 8 + 8)
    for kind, times in (("all_gather", [2, 1]), ("reduce_scatter", [1, 1])):
        sizes = [size for name, size in sent if name == kind]
        assert [sizes.count(n) for n in (inner, outer)] == times, sent
    assert Counter(c.op for c in calls)[HOST_COPY] == 1  # the loss that numpy reads
    assert not Path("never").exists()


SCALED = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    scaler.scale(model(torch.randn(4, 8, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_scaler_skips_no_step(tmp_path: Path) -> None:
    """Gradients without data are neither finite nor not; the host waits, and the optimizer steps.

    A fused optimizer reads what the scaler found: the host does not.
    """
    ops = [c.op for c in captured(written(tmp_path, SCALED), gpus=1).ranks[0].calls]
    unscale = f"aten.{UNSCALE}.default"
    assert [op for op in ops if op in (unscale, ITEM, ADAMW)] == [unscale, ITEM, ADAMW]
    text = SCALED.replace("parameters()", "parameters(), fused=True")
    ops = [c.op for c in captured(written(tmp_path, text), gpus=1).ranks[0].calls]
    assert ops.count(unscale) == 1 and ITEM not in ops


WORKER = """
import torch
class Unread:
    def __len__(self):
        return 1
    def __getitem__(self, i):
        try:
            {}[7]
        except KeyError as exc:
            raise ValueError("no atoms\\nin this file") from exc
for batch in torch.utils.data.DataLoader(Unread(), num_workers=1):
    pass
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(3)", r"train.py exits with 3 after 0 steps; 3 are needed"),
        ("print('no training')", r"train.py ends after 0 steps; 3 are needed, of an optimizer"),
        ("import os; os.fork()", r"the script forks"),
        ("import socket; socket.socket().bind(('', 9999))", r"opens a socket"),
        ("import socket; socket.socket().connect(('localhost', 9))", r"opens a connection"),
        ("from multiprocessing.resource_tracker import *; ensure_running()", r"spawns processes"),
        ("import os; os.system('sleep 9')", r"starts another program"),
        ("import subprocess; subprocess.run(['sleep', '9'])", r"'sleep': a forecast starts no"),
        (
            "import subprocess as s; s.run('git log; sleep 9', shell=True, check=True)",
            r"status 127",
        ),
        ("import torch; torch.ops.my.kernel(1)", r"AttributeError: .*my.*\(train.py:1: "),
        (TRAINING.replace("AdamW", "LBFGS"), r"LBFGS runs the model as often as .*optimizer.step"),
        ("import numpy_with_a_typo", r"ModuleNotFoundError: .* \(train.py:1: import numpy_with"),
        ("def f(:", r"SyntaxError"),
        (WORKER, r"Caught .* 0. ValueError: no atoms, because of KeyError: 7 \(train.py:"),
    ],
)
def test_what_cannot_be_forecast_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        captured(written(tmp_path, text))
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="steps 1: at least 2"):
        Script(path=EXAMPLE, steps=1)
    with pytest.raises(ValueError, match=r"none.py': no such file"):
        Script(path=tmp_path / "none.py")


def test_a_library_that_finds_no_network_goes_on(tmp_path: Path) -> None:
    ask = "import urllib.request as r\ntry:\n    r.urlopen('http://127.0.0.1:9')\n"
    captured(written(tmp_path, f"{ask}except OSError:\n    pass\n{TRAINING}"), gpus=1)


def test_a_script_that_fails_on_its_way_out_is_captured(tmp_path: Path) -> None:
    """Frameworks clean up after an error; what they do there is no part of the step."""
    indented = TRAINING.replace("\n", "\n    ")
    text = f"try:{indented}\n    pass\nfinally:\n    torch.ones(3).exp(); 1 / 0\n"
    calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
    ops = Counter(c.op for c in calls)
    assert ops[ADAMW] == 1 and ops["aten.exp.default"] == 0


ADDRESSES = """
import torch
@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(2.0)
model = torch.nn.Linear(8, 8).cuda()
model.tied = model.weight
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    places = [t.data_ptr() for t in (model.weight, model.tied, model.bias, model.weight[1])]
    assert places[0] == places[1] != places[2] and places[3] == places[0] + 8 * 4
    spare = torch.empty(4, device="cuda").untyped_storage()
    spare.resize_(0)
    assert spare.data_ptr() == 0 < torch.zeros(2, device="cpu").data_ptr()
    twice(model(torch.randn(4, 8, device="cuda"))).sum().backward()
    optimizer.step()
"""


def test_tensors_without_data_have_addresses_and_run_what_jit_would_compile(tmp_path: Path) -> None:
    """Libraries tell tied weights and freed buffers by addresses; 0 is no memory."""
    calls = captured(written(tmp_path, ADDRESSES), gpus=1).ranks[0].calls
    assert Counter(c.op for c in calls)["aten.mul.Tensor"] == 2  # and its gradient


IMAGES = """
import torch
{}
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(2, 3, 4, 4).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("flags_of_the_test")
@pytest.mark.parametrize(
    ("flag", "conv", "product"),
    [
        ("", "tf32", "fp32"),
        ("torch.backends.cudnn.allow_tf32 = False", "fp32", "fp32"),
        ("torch.backends.cudnn.conv.fp32_precision = 'ieee'", "fp32", "fp32"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32", "tf32"),
        ("torch.set_float32_matmul_precision('high')", "tf32", "tf32"),
    ],
)
def test_tf32_is_where_flags_of_torch_allow_it(
    tmp_path: Path, flag: str, conv: str, product: str
) -> None:
    program = captured(written(tmp_path, IMAGES.format(flag)), gpus=1)
    calls = [c for c in program.ranks[0].calls if c.tensors()]
    dtypes = {c.op.split(".")[1]: c.tensors()[0].dtype for c in calls}
    assert dtypes["convolution"] == dtypes["convolution_backward"] == conv
    assert dtypes["mm"] == dtypes["addmm"] == product and dtypes["_foreach_add_"] == "fp32"
    told = [note for note in program.notes if "TF32" in note]
    assert ["products" in note for note in told] == [product == "tf32"] * (conv == "tf32")


RECURRENT = """
import torch
{}
lstm, head = torch.nn.LSTM(16, 32, num_layers=2).cuda(), torch.nn.Linear(32, 2).cuda()
optimizer = torch.optim.SGD([*lstm.parameters(), *head.parameters()])
for _ in range(4):
    head(lstm(torch.randn(5, 3, 16, device="cuda"))[0]).sum().backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("flags_of_the_test")
@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("", ["recurrent layers"]),
        ("torch.backends.cudnn.allow_tf32 = False", []),
        ("torch.backends.cuda.matmul.allow_tf32 = True", ["matrix products and recurrent layers"]),
    ],
)
def test_recurrent_layers_count_among_products(tmp_path: Path, flag: str, names: list[str]) -> None:
    """Of 15 tokens, 2 flops a weight forward and 4 backward; a V100 has 15.7 TFLOP/s."""
    program = captured(written(tmp_path, RECURRENT.format(flag)), gpus=1)
    allowed = "run in TF32 where the GPU has it, as torch's flags allow"
    assert list(program.notes) == [f"fp32 {name} {allowed}" for name in names]
    weights = 4 * 32 * (16 + 32) + 4 * 32 * (32 + 32) + 32 * 2
    found = forecast_program(program, find_target("v100-sxm-16gb", "", None, "", ""))
    products_s = found.mfu_frac * found.iteration_us * 1e-6
    assert products_s == pytest.approx(6 * 15 * weights / 15.7e12)


def test_files_of_programs_are_read_back(tmp_path: Path) -> None:
    program = captured(written(tmp_path, TRAINING), gpus=2)
    times = Batches(wall_us=(5.0,), cpu_us=(4.0,))
    facts = {"workers": 0, "prefetch": 2, "batch_samples": 8, "batch_bytes": 64, "cores": 2}
    lane = InputLane(loader="train.py", alone=times, **facts)
    write_program(program, tmp_path / "program.json.gz", lane)
    again, kept = read_program(tmp_path / "program.json.gz")
    assert kept == lane and again.ranks[0].calls == program.ranks[0].calls
    assert again.peak_bytes == program.peak_bytes and again.world_size == 2
    (tmp_path / "program.json.gz").write_bytes(b"\x1f\x8bnothing")
    with pytest.raises(ValueError, match=re.escape("program.json.gz: not a captured program")):
        read_program(tmp_path / "program.json.gz")
