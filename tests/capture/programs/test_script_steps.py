"""Scripts that train: habits of their steps, where these begin and end."""

from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import save_file
from small_scripts import ITEM, TRAINING, captured, written

from itercast.capture.programs.program import AGAIN, COLLECTIVE, ProgramCapture, launch_order
from itercast.capture.programs.repeated import fold
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.programs.forecast import forecast_program
from itercast.compose.target import find_target

MODEL = """
import torch
from torch.nn import Linear, ReLU
model = torch.nn.Sequential(Linear(64, 64), ReLU(), Linear(64, 64)).cuda()
x, y = torch.randn(8, 64, device="cuda"), torch.randn(8, 64, device="cuda")
def loss():
    return (model(x) - y).pow(2).mean()
"""
BY_HAND = """
model(x)  # a first look
for step in range(10):
    loss().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
"""
GRADIENTS = """
for step in range(10):
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss(), parameters)):
        p.data -= 0.1 * g
"""
ACCUMULATED = """
for step in range(10):
    for micro in range(2):
        loss().backward()
    for p in model.parameters():
        p.data.sub_(p.grad, alpha=0.1)
"""
FORWARD = """
model.eval()
with torch.inference_mode():
    for step in range(10):
        print(model(x).mean().item())
"""


@pytest.mark.parametrize(
    ("text", "name", "products"),
    [
        (BY_HAND, "one update to the next (train.py:14: p -= 0.1 * p.grad)", 2 + 3),
        (GRADIENTS, "one update to the next (train.py:12: p.data -= 0.1 * g)", 2 + 3),
        (ACCUMULATED, "one update to the next (train.py:13: p.data.sub_(", 2 * (2 + 3)),
        (FORWARD, "one forward to the next (train.py:12: print(model(x)", 2),
    ],
)
def test_a_step_of_a_script_without_an_optimizer(
    tmp_path: Path, text: str, name: str, products: int
) -> None:
    """Two layers forward, and backward three products: the first one's input needs no gradient."""
    program = captured(written(tmp_path, MODEL + text), gpus=1)
    assert program.notes[0].startswith(f"a step is taken to be from {name}")
    ops = Counter(c.op for c in program.ranks[0].calls)
    assert ops["aten.mm.default"] + ops["aten.addmm.default"] == products
    assert ops[ITEM] == (text == FORWARD)
    assert bool(program.ranks[0].host["autograd_node"]) == (text != FORWARD)
    assert ops["aten.sub_.Tensor"] == 4 * (text != FORWARD)


EVALUATED_FIRST = """
def embed(sizes):
    for rows in sizes:
        model(torch.zeros(rows, 64, device="cuda"))
    return model
def train():
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(9):
        loss().backward()
        optimizer.step()
model.eval()
with torch.no_grad():
    embed(range(1, 60))
if NOW:
    train()
"""


@pytest.mark.parametrize("trains", [True, False])
def test_an_evaluation_before_training_is_no_inference(tmp_path: Path, trains: bool) -> None:
    """No optimizer is there yet, but the script calls what trains below: 2 + 3 products of a step.

    Where that never runs, the forwards are what is forecast.
    """
    text = MODEL + EVALUATED_FIRST.replace("NOW", str(trains))
    program = captured(written(tmp_path, text), gpus=1)
    ops = Counter(c.op for c in program.ranks[0].calls)
    assert ops["aten.mm.default"] + ops["aten.addmm.default"] == (2 + 3 if trains else 2)
    assert bool(program.notes) != trains


PREPARED = """
import torch
table = torch.nn.Linear(8, 1)
for batch in range(40):
    table(torch.randn(4, 8))
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(9):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_a_script_prepares_on_the_host_is_no_step(tmp_path: Path) -> None:
    """As MACE sums up its data before it makes its model, whose step is the optimizer's."""
    program = captured(written(tmp_path, PREPARED), gpus=1)
    assert program.optimizer_steps == 1 and program.passes[-1] == "SGD train.py:10"


RECOMPUTED = """
from pathlib import Path
from torch.utils.checkpoint import checkpoint
optimizer = torch.optim.SGD(model.parameters())
class Recomputing(torch.nn.Module):
    def forward(self, x):
        return checkpoint(model, x, use_reentrant=False)
outer = Recomputing()
for step in range(10):
    Path(__file__).with_name("last").write_text(str(step))
    outer(x).sum().backward()
    optimizer.step()
"""


def test_forward_after_a_recomputation_that_stopped_early_is_seen(tmp_path: Path) -> None:
    """Recomputing ends inside the last layer, which saved the last tensor that was missing."""
    captured(written(tmp_path, MODEL + RECOMPUTED), gpus=1)
    assert (tmp_path / "last").read_text() == "2"


def test_forwards_before_training_are_no_steps(tmp_path: Path) -> None:
    """Ten forwards, then an optimizer is made and steps."""
    before = TRAINING.replace(
        "optimizer =", "for i in range(10): model(torch.randn(4, 8))\noptimizer ="
    )
    program = captured(written(tmp_path, before), gpus=1)
    assert not program.notes
    assert Counter(c.op for c in program.ranks[0].calls)["aten._foreach_lerp_.Scalar"] == 1


EVALUATES_FIRST = """
@torch.no_grad()
def evaluate():
    model.eval()
    for part in ("one", "other"):
        losses = torch.zeros(10**9)
        for i in range(10**9):
            losses[i] = model(torch.randn(4, 8, device="cuda")).sum().item()
        print(losses.mean())
    model.train()
    return i
assert evaluate() == 1
for step"""


def test_a_loop_that_evaluates_before_training_runs_twice(tmp_path: Path) -> None:
    """Else it would run for hours, and a step would be none the wiser."""
    program = captured(written(tmp_path, TRAINING.replace("for step", EVALUATES_FIRST)), gpus=1)
    assert not program.notes and ITEM not in {c.op for c in program.ranks[0].calls}


MADE_LATE = """
import pickle
class Late(torch.optim.SGD):
    def __init__(self, parameters):
        self.parameters = list(parameters)
        super().__init__(self.parameters)
optimizer = Late(model.parameters())
if AGAIN:
    optimizer = pickle.loads(pickle.dumps(optimizer))
for step in range(10):
    for micro in range(20):
        loss().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("again", [False, True])
def test_an_optimizer_is_known_from_when_it_is_made(tmp_path: Path, again: bool) -> None:
    """After 12 backwards a script without one ends: here 20 come before its first step."""
    program = captured(written(tmp_path, MODEL + MADE_LATE.replace("AGAIN", str(again))), gpus=1)
    assert not program.notes and program.ranks[0].host["backward"] == 20


NEVER_UPDATED = """
optimizer = torch.optim.SGD(model.parameters())
loader = torch.utils.data.DataLoader(torch.zeros(SAMPLES, 64), batch_size=4, drop_last=True)
while True:  # gradients of four batches make an update
    for i, _ in enumerate(loader):
        loss().backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
"""


def test_a_script_whose_optimizer_never_steps_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes over two batches make a step from backward to backward; those over none nothing."""
    monkeypatch.setattr("itercast.capture.programs.steps.WAITED", 12)  # four passes, eight batches
    text = MODEL + NEVER_UPDATED
    first, second = captured(written(tmp_path, text.replace("SAMPLES", "8")), gpus=1).notes
    none = "no step of an optimizer in 12 backwards and passes over DataLoaders, of"
    assert first == f"{none} 8 batches in all (train.py:12: for i, _ in enumerate(loader):)"
    assert second.startswith("a step is taken to be from one backward to the next (train.py:13")
    with pytest.raises(ValueError, match=f"train.py: {none} 0 batches in all"):
        captured(written(tmp_path, text.replace("SAMPLES", "3")), gpus=1)


WARM_UP = """
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
def step():
    optimizer.zero_grad(set_to_none=True)
    loss().backward()
    optimizer.step()
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for i in range(5):
        step()
"""
REPLAYED = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for i in range(5):
    x.copy_(torch.randn_like(x))
    graph.replay()
"""
POOLS = """
import gc
def grown_by(n):
    gc.collect()
    return torch.cuda.memory_allocated() - before == n * 4096
def captured(**options):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        made = (data + 1) * 2
    return graph, made
data = torch.randn(1024, device="cuda")
gc.collect()
before = torch.cuda.memory_allocated()
first = captured()
assert grown_by(2)  # the sum and the product
second = captured(pool=first[0].pool())
assert grown_by(3)  # another product; the sums' memory is shared
own = captured(pool=torch.cuda.graph_pool_handle())
assert grown_by(5)
del own
assert grown_by(3)
del first
assert grown_by(2)  # the product is gone; the pool is still the second graph's
second[0].reset()
assert grown_by(1)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    loss().backward()
    optimizer.step()
"""
GRAPHED = """
optimizer = torch.optim.SGD(model.parameters())
model = torch.cuda.make_graphed_callables(model, (x,))
for i in range(5):
    loss().backward()
    optimizer.step()
"""
EAGER = "for i in range(5): step()"


def host_us(program: ProgramCapture) -> float:
    return forecast_program(program, find_target("h100-sxm-80gb", "", None, "", "")).host_us


def test_graphs_share_the_memory_of_their_pool_until_they_are_gone(tmp_path: Path) -> None:
    """By hand: a graph makes two tensors of 4 KiB and keeps one; numbers are in the script."""
    assert captured(written(tmp_path, MODEL + POOLS + EAGER), gpus=1).ranks


def test_a_replayed_graph_is_one_launch(tmp_path: Path) -> None:
    """Five steps warm up; then each replay is a step: a copy, and all of a step in one launch."""
    eager = captured(written(tmp_path, MODEL + WARM_UP + EAGER), gpus=1)
    replayed = captured(written(tmp_path, MODEL + WARM_UP + REPLAYED), gpus=1)
    calls = replayed.ranks[0].calls
    alone = [c.op for c in calls if not c.graphed]
    assert alone == ["aten.randn_like.default", "aten.copy_.default"]
    launched = [c.op for c in calls if c.graphed]
    own = {"itercast.host"}  # Python that a replay does not run
    assert launched == [c.op for c in eager.ranks[0].calls if c.op not in own]
    assert len({c.graphed for c in calls}) == 2
    assert host_us(replayed) < 0.2 * host_us(eager)
    larger = MODEL.replace("randn(8,", "randn(512,") + WARM_UP + REPLAYED
    grown = captured(written(tmp_path, larger), gpus=1)
    given = 2 * (512 - 8) * 64 * 4  # x and y, which no graph keeps
    assert grown.peak_bytes[0] - replayed.peak_bytes[0] > 2 * given  # what its layers make, too
    assert grown.held_bytes - replayed.held_bytes == given


FLEXIBLE = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
ends = torch.rand(1024, device="cuda").cumsum(0) > 0.5  # of data
class Window:
    size, __hash__ = 512, None
    def __call__(self, b, h, q, k): return (q >= k) & (q - k < self.size)
window = Window()
masks = {
    "all": None,
    "causal": lambda b, h, q, k: q >= k,
    "windows": lambda b, h, q, k: (q >= k) & (q - k < 128),
    "documents": lambda b, h, q, k: (q >= k) & (q // 256 == k // 256),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 896),
    "windows of an object": window,
    "of data": lambda b, h, q, k: (q >= k) & (ends[q] == ends[k]),
}
heads = torch.randn(3, 4, 1024, 64, device="cuda", requires_grad=True)
for window.size in (512, 128):
    mask = masks["MASK"] and create_block_mask(masks["MASK"], None, None, 1024, 1024)
    flex_attention(heads, heads, heads, block_mask=mask)
optimizer = torch.optim.SGD([heads])
for i in range(5):
    flex_attention(heads, heads, heads, block_mask=mask).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("mask", "causal", "sequences"),
    [
        ("all", False, None),
        ("causal", True, None),
        ("windows", True, (9, 3, 346)),
        ("windows of an object", True, (9, 3, 346)),
        ("documents", True, (12, 3, 256)),
        ("prefix", False, None),
        ("of data", True, None),
    ],
)
def test_a_mask_of_flex_attention_costs_its_blocks(
    tmp_path: Path, mask: str, causal: bool, sequences: tuple[int, ...] | None
) -> None:
    """By hand, of blocks of 128: four documents of 256 are four sequences in each of 3 samples.

    Windows compute 15 of 64 blocks, 3 * 15 * 128**2 scores: 9 causal sequences of 346 compute
    9 * 346 * (346 + 128) / 2 of them. A prefix leaves hardly any block out.
    """
    assert pytest.approx(3 * 15 * 128**2, rel=0.01) == 9 * 346 * (346 + 128) / 2
    text = "import torch\n" + FLEXIBLE.replace("MASK", mask)
    program = captured(written(tmp_path, text), gpus=1)
    calls = [c for c in program.ranks[0].calls if c.op.startswith("itercast.sdpa")]
    assert [c.kwargs["is_causal"] for c in calls] == [causal] * 2  # forward and backward
    assert [c.kwargs.get("sequences") for c in calls] == [sequences] * 2
    noted = [note for note in program.notes if note.startswith("masks of flex_attention")]
    assert len(noted) == (mask == "of data")


def test_graphed_callables_are_a_launch_in_each_direction(tmp_path: Path) -> None:
    """The model's three ops are one launch and their backward is one; the loss runs by itself."""
    calls = captured(written(tmp_path, MODEL + GRAPHED), gpus=1).ranks[0].calls
    graphs: dict[int, list[str]] = {}
    for call in calls:
        graphs.setdefault(call.graphed, []).append(call.phase)
    alone = graphs.pop(0)
    assert {phase for phases in graphs.values() for phase in phases} == {"forward", "backward"}
    assert sorted(len(set(phases)) for phases in graphs.values()) == [1, 1]
    assert set(alone) == {"forward", "backward", "optimizer"}


OPTIMIZERS = """
optimizer = torch.optim.SGD(model.parameters())
critic = torch.nn.Linear(64, 64).cuda()
of_critic = torch.optim.SGD(critic.parameters())
def step(loss, of):
    torch.autograd.backward(loss)
    of.step()
"""
ROLLOUT = """
model(x)  # a look before the loop comes once
for iteration in range(9):
    with torch.no_grad():
        for t in range(5):
            critic(x)
    for epoch in range(2):
        for part in range(3):
            step((critic(x) - y).mean(), of_critic)
            step(loss(), optimizer)
"""
CRITICS = """
for i in range(30):
    step((critic(x) - y).mean(), of_critic)
    if i % 3 == 0:
        step(loss(), optimizer)
"""
INNER = """
for i in range(30):
    for k in range(4):
        step((critic(x) - y).mean(), of_critic)
    step(loss(), optimizer)
"""
TWO_LINES = """
for i in range(9):
    step(loss(), optimizer)
    step(loss() + loss(), optimizer)
"""
EVALUATED = """
for i in range(9):
    if i % 5000 == 0:
        critic.eval()(x)
    step((critic.train()(x) - y).mean(), of_critic)
    step(loss(), optimizer)
"""
RARE = """
for i in range(100):
    if i % 5000 == 0:
        critic(x)
    step(loss(), optimizer)
"""
SHARED = """
del of_critic
of_bias = torch.optim.SGD([model[0].bias])
for i in range(9):
    step(loss(), optimizer)
    of_bias.step()
"""
GROUPS = """
del of_critic
for i in range(9):
    step(loss(), optimizer)
    optimizer.step()
"""
LOADED = """
del of_critic
from torch.utils.data import DataLoader
class Pictures(list):
    def __getitem__(self, i):
        return torch.nn.Identity()(torch.zeros(64))  # as torchvision's transforms, modules
for epoch in range(9):
    batches = iter(DataLoader(Pictures(range(80)), batch_size=8))
    ahead = next(batches)  # once in an epoch
    for batch in batches:
        x, ahead = ahead.cuda(), batch
        step(loss(), optimizer)
"""
LEFT_OUT = {
    EVALUATED: ["what ran in 1 of 3 steps is left out (train.py:18: critic.eval()(x))"],
    RARE: [
        "the loop did not repeat in 60 steps: one is kept; --steps 6 looks at twice as many",
        "what ran in 1 of 60 steps is left out (train.py:18: critic(x))",
    ],
}


def test_what_comes_rarely_is_not_waited_for_all_the_time_there_is(tmp_path: Path) -> None:
    """Large models take minutes for 60 steps; three are enough for a forecast of one."""
    program = captured(written(tmp_path, MODEL + OPTIMIZERS + RARE), gpus=1, patience_s=0)
    assert program.optimizer_steps == 1 and list(program.notes) == [
        "the loop did not repeat in 3 steps: one is kept; a longer --limit looks at more",
        "what ran in 1 of 3 steps is left out (train.py:18: critic(x))",
    ]


@pytest.mark.parametrize(
    ("text", "products", "steps", "gradients"),
    [
        (ROLLOUT, 5 + 6 * (2 + 5), 6 * (1 + 1), 6 * (2 + 4)),
        (CRITICS, 3 * 2 + 5, 3 + 1, 3 * 2 + 4),
        (INNER, 4 * 2 + 5, 4 + 1, 4 * 2 + 4),
        (TWO_LINES, 3 * 5, 2, 2 * 4),
        (EVALUATED, 2 + 5, 1 + 1, 2 + 4),
        (RARE, 5, 1, 4),
        (LOADED, 5, 1, 4),
        (SHARED, 5, 1, 4),
        (GROUPS, 5, 1, 4),
    ],
)
def test_an_iteration_of_several_optimizer_steps(
    tmp_path: Path, text: str, products: int, steps: int, gradients: int
) -> None:
    """A step of the critic has 2 products, one forward and one backward; of the model 2 + 3.

    A backward gives 2 parameters of the critic their gradients, or 4 of the model. Optimizers that
    share a model step after one backward, and ZeRO-3's once for each group: that is one step.
    """
    program = captured(written(tmp_path, MODEL + OPTIMIZERS + text), gpus=1)
    calls = program.ranks[0].calls
    ops = Counter(calls[i].op for i in launch_order(calls))
    assert ops["aten.mm.default"] + ops["aten.addmm.default"] == products
    assert program.optimizer_steps == steps
    host = program.ranks[0].host
    assert host["accumulate_grad"] == gradients and host["backward"] == steps
    assert text != LOADED or host["module_call"] == 4  # of the model and its layers, no Identity
    assert list(program.notes) == LEFT_OUT.get(text, [])


INTERLEAVED = """
import torch
makes, judges = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 1).cuda()
of_maker, of_judge = torch.optim.SGD(makes.parameters()), torch.optim.Adam(judges.parameters())
for i in range(9):
    made = makes(torch.randn(4, 8, device="cuda"))
    for k in range(2):
        judges(made.detach()).mean().backward()
    judges(made).mean().backward()
    of_judge.step()
    of_maker.step()
"""


def test_backwards_and_updates_of_an_iteration_are_told_with_their_lines(tmp_path: Path) -> None:
    """Both losses before both updates are one iteration, which begins with a backward."""
    program = captured(written(tmp_path, INTERLEAVED), gpus=1)
    updates = ("SGD train.py:11", "Adam train.py:10")
    backwards = ("2 x backward train.py:8", "backward train.py:9")
    assert set(program.passes) == {*backwards, *updates} and program.passes[:2] == backwards
    assert program.optimizer_steps == 1 and program.ranks[0].host["backward"] == 3


HEAD = """
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
net, lstm = torch.nn.Linear(16, 8).cuda(), torch.nn.LSTM(8, 4).cuda()
optimizer = torch.optim.SGD([*net.parameters(), *lstm.parameters()])
x = torch.randn(100, 16, device="cuda")
for step in range(3):
    y = net(x)
"""


def habit(folder: Path, text: str, gpus: int = 1) -> ProgramCapture:
    """A training loop with lines of its own, in which ``y`` is (100, 8) and unknown."""
    lines = "".join(f"    {line}\n" for line in text.strip().splitlines())
    path = written(folder, HEAD + lines + "    y.sum().backward(); optimizer.step()\n")
    return captured(path, gpus=gpus)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("y = y[y[:, 0] > 0] * 2.5", (50, 8)),
        ("keep = y[:, 0] > 0; y = y[keep] * 2.5; assert len(y) == keep.sum().item()", (50, 8)),
        ("y = y[(y[:, 0] > 0) & (y[:, 1] > 0)] * 2.5", (25, 8)),
        ("y = torch.masked_select(y, y > 0) * 2.5", (400,)),
        ("y = y[torch.empty_like(torch.arange(100)) > 5] * 2.5", (50, 8)),
        ("(i,) = torch.where(y[:, 0] > 0); y = y[i] * 2.5", (50, 8)),
        ("k, i = y[:, 0].long().unique(return_inverse=True); y = y[i][k] * 2.5", (50, 8)),
        ("y = y.repeat_interleave((y[:, 0] * 9).long(), 0) * 2.5", (100, 8)),
        ("n = y[:, 0].long().bincount(minlength=4).tolist(); y = y.split(n)[0] * 2.5", (25, 8)),
    ],
)
def test_unknown_data_take_a_stated_share(
    tmp_path: Path, text: str, shape: tuple[int, ...]
) -> None:
    """Of 100 rows half pass a test, a quarter two; of 100 values half differ; repeats are one.

    The host waits for the number of rows. What was taken is said once, with its line.
    """
    program = habit(tmp_path, text)
    calls = program.ranks[0].calls
    assert [c.outputs[0].shape for c in calls if 2.5 in c.args] == 2 * [shape]
    assert any(priceable(c).waits for c in calls)
    (note,) = program.notes
    assert note.startswith("data have no values here: 50 % is true") and "train.py:9" in note


def test_a_number_or_condition_that_shapes_nothing_is_not_noted(tmp_path: Path) -> None:
    program = habit(tmp_path, "print(y.sum().item()); y = torch.where(y > 0, y, 0.0)")
    assert not program.notes


def test_packed_sequences(tmp_path: Path) -> None:
    """Lengths 5, 3 and 2: ten rows, an LSTM of five steps over two sequences, padded to 3 x 5."""
    lines = """
packed = pack_padded_sequence(y[:15].view(3, 5, 8), [5, 3, 2], batch_first=True)
rows, last = lstm(packed)
y, lengths = pad_packed_sequence(rows, batch_first=True)
assert lengths.tolist() == [5, 3, 2] and y.shape == (3, 5, 4) and last[0].shape == (1, 3, 4)
assert rows.data.shape == (10, 4) and rows.batch_sizes.tolist() == [3, 3, 2, 1, 1]
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    layers = [c.tensors()[0].shape for c in calls if "rnn_layer.default" in c.op]
    assert layers == [(5, 2, 8)]


def test_tensors_say_that_they_are_on_a_gpu_and_weights_are_read(tmp_path: Path) -> None:
    """Also those that come from a file of weights; numbers of real data are none of them.

    Floats of a file have shapes alone, its small integers are read; both may come to a GPU.
    """
    import torch

    tensors = {"weight": torch.ones(8, 16), "places": torch.arange(3)}
    save_file(tensors, tmp_path / "weights.safetensors")
    lines = f"""
from safetensors.torch import load_file
weights = load_file({str(tmp_path / "weights.safetensors")!r})
on_gpu = load_file({str(tmp_path / "weights.safetensors")!r}, device="cuda:0")
assert on_gpu["weight"].is_cuda and on_gpu["places"].is_cuda
assert weights.pop("places").tolist() == on_gpu["places"].tolist() == [0, 1, 2]
assert y.is_cuda and net.weight.is_cuda and weights["weight"].is_cpu
net.load_state_dict({{**net.state_dict(), **weights}})
y = y @ weights["weight"] * 2.5
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    assert [c.outputs[0].shape for c in calls if 2.5 in c.args] == 2 * [(100, 16)]


def test_jagged_sequences_attend_as_those_of_mean_length(tmp_path: Path) -> None:
    """Lengths 4 and 2 in two heads of width 4: (2, 2, 3, 4)."""
    lines = """
q = torch.nested.as_nested_tensor([y[:4], y[4:6]], layout=torch.jagged)
q = q.unflatten(-1, [2, 4]).transpose(1, 2)
y = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2).values()
assert y.shape == (6, 8)
"""
    calls = habit(tmp_path, lines).ranks[0].calls
    taken = [(c.phase, c.tensors()[0].shape) for c in calls if "itercast.sdpa" in c.op]
    assert taken == [("forward", (2, 2, 3, 4)), ("backward", (2, 2, 3, 4))]
    assert not any("dtensor_op" in c.args for c in calls)


def test_a_number_that_nobody_knows_equals_no_other(tmp_path: Path) -> None:
    """So that text goes on until its longest length; the condition is noted."""
    program = habit(tmp_path, "ids = y[:, 0].long(); assert ids.max() != 0; assert not ids[0] == 7")
    (note,) = program.notes
    assert "no values" in note


def test_rates_of_dropped_layers_are_known(tmp_path: Path) -> None:
    """Those of a range by depth, as timm, Swin and DINO make them: none is dropped at 0."""
    rates = "rates = [x.item() for x in torch.linspace(0, 0.3, 4)]"
    program = habit(tmp_path, f"{rates}; assert [round(x, 1) for x in rates] == [0, 0.1, 0.2, 0.3]")
    assert not program.notes


def test_numbers_that_follow_from_what_is_known(tmp_path: Path) -> None:
    """Values of the host in NumPy; the largest of 8 is one of 8, of which each is as frequent."""
    program = habit(
        tmp_path,
        """
assert torch.arange(4).clone().numpy().tolist() == [0, 1, 2, 3]
chosen = y.argmax(-1)
assert len(chosen.unique()) <= 8
assert chosen.histc(4, 0, 4).tolist() == [25] * 4
""",
    )
    assert program.ranks[0].calls


def test_attention_that_a_selective_checkpoint_sees_has_values_of_their_own_width(
    tmp_path: Path,
) -> None:
    """Latent attention: keys of 6 numbers, values of 4; the checkpoint saves nothing."""
    lines = """
import torch.utils.checkpoint as c
q, v = (y.reshape(1, 2, 50, 8)[..., :n] for n in (6, 4))
attend = torch.nn.functional.scaled_dot_product_attention
saves = lambda *args, **kwargs: c.CheckpointPolicy.MUST_RECOMPUTE
contexts = lambda: c.create_selective_checkpoint_contexts(saves)
y = c.checkpoint(attend, q, q, v, use_reentrant=False, context_fn=contexts)
"""
    calls = [c for c in habit(tmp_path, lines).ranks[0].calls if "itercast.sdpa" in c.op]
    forward = "forward", (1, 2, 50, 4)
    assert [(c.phase, c.outputs[0].shape) for c in calls[:1]] == [forward]
    assert [t.shape[-1] for t in calls[-1].outputs] == [6, 6, 4]


def test_ranks_send_each_other_the_numbers_of_tokens_that_they_have(tmp_path: Path) -> None:
    """100 tokens for four experts on four ranks: 25 to each, 25 from each, 100 in all."""
    lines = """
import torch.distributed as dist
dist.is_initialized() or dist.init_process_group("nccl")
counts = y[:, :4].argmax(1).bincount(minlength=4)
arriving = torch.empty_like(counts)
dist.all_to_all_single(arriving, counts)
assert arriving.tolist() == counts.tolist() == [25] * 4
rows = y.new_empty(sum(arriving.tolist()), 8)
dist.all_to_all_single(rows, y.detach(), arriving.tolist(), counts.tolist())
"""
    calls = habit(tmp_path, lines, gpus=4).ranks[0].calls
    sent = [(c.kwargs["kind"], c.kwargs["bytes"]) for c in calls if c.op == COLLECTIVE]
    assert sent == [("all_to_all", 4 * 8), ("all_to_all", 100 * 8 * 4)]


SYNCED = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(True))
net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0], broadcast_buffers=False)
optimizer = torch.optim.SGD(net.parameters())
for step in range(3):
    net(torch.randn(2, 3, 8, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_norms_over_the_batches_of_all_ranks(tmp_path: Path) -> None:
    """Of 8 channels 4 ranks gather means, deviations and a count, and add up two sums each.

    Then DDP adds up gradients: 8 x 3 x 9 + 8 of the convolution, 2 x 8 of the norm.
    """
    calls = captured(written(tmp_path, SYNCED), gpus=4).ranks[0].calls
    sent = [(c.kwargs["kind"], c.kwargs["bytes"]) for c in calls if c.op == COLLECTIVE]
    gathered, sums, gradients = 4 * 4 * (2 * 8 + 1), 4 * 2 * 8, 4 * (216 + 8 + 16)
    assert sent == [("all_gather", gathered), ("all_reduce", sums), ("all_reduce", gradients)]


ACCUMULATES = """
from pathlib import Path
class Model(torch.nn.Module):
    runs = 0
    def __init__(self):
        super().__init__()
        self.layers = model
    def forward(self, x):
        Model.runs += 1
        return self.layers(x).relu()
model = Model()
model.layers[0].register_forward_hook(lambda module, args, output: output.requires_grad_(True))
optimizer = torch.optim.AdamW(model.parameters())
torch.distributed.init_process_group()
ddp = torch.nn.parallel.DistributedDataParallel(model)
lengths = [8] * 9 + [16]
for step in range(3):
    for i, n in enumerate(lengths):
        ddp.require_backward_grad_sync = i == len(lengths) - 1
        (ddp(torch.randn(n, 64, device="cuda")).sum() / len(lengths)).backward()
    Path(__file__).with_name("runs").write_text(str(Model.runs))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_micro_batches_that_are_alike_run_once_and_are_as_if_all_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ten, the first makes gradients, two show what six more do, the last sends and is longer.

    From one forward to the next the third to the ninth are alike, the last of these but for the
    batch drawn at its end: three are kept, one of them as repeated five times. A hook inside a
    model may do anything: then all run, but not with one that uses its arguments alone. A layer
    takes a product forward and, but for the first one's input, two backward.
    """
    text = MODEL + ACCUMULATES
    once = captured(written(tmp_path, text), gpus=2)
    assert (tmp_path / "runs").read_text() == str(3 * (10 - 6))
    (tmp_path / "runs").unlink()  # files that are there are given back
    hook = "model.layers[0].register_forward_hook(lambda *args: print(end=''))\nddp ="
    every = captured(written(tmp_path, text.replace("ddp =", hook)), gpus=2)
    assert (tmp_path / "runs").read_text() == str(3 * 10)
    told, known = launches(once), launches(every)
    assert told == known and [c.args for c in once.ranks[0].calls if c.op == AGAIN] == [(5,), (1,)]
    monkeypatch.setattr(fold, "_folded", lambda calls: [c for c in calls if c.op != AGAIN])
    unfolded, target = captured(written(tmp_path, text), gpus=2), find_target("h100-sxm-80gb")
    found, whole = (forecast_program(one, target) for one in (once, unfolded))
    assert found.iteration_us == pytest.approx(whole.iteration_us, rel=1e-12)
    assert found.by_family_us == pytest.approx(whole.by_family_us, rel=1e-12)
    assert found.mfu_frac == pytest.approx(whole.mfu_frac, rel=1e-12)
    assert once.ranks[0].host == every.ranks[0].host and once.peak_bytes == every.peak_bytes
    products = sum(op in ("aten.mm.default", "aten.addmm.default") for op, *_ in told)
    assert products == 10 * (2 + 3) and sum(op == COLLECTIVE for op, *_ in told) == 1


@pytest.mark.parametrize(
    ("line", "runs", "more"),
    [
        ("torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)", 10, 3),
        ("for p in model.parameters(): p.data = p.data.clone()", 6, 0),
    ],
)
def test_a_later_micro_batch_that_is_not_as_others(
    tmp_path: Path, line: str, runs: int, more: int
) -> None:
    """Of ten, each 2 + 3 products, the seventh: gradients of it are asked for, and so all run.

    Or weights get new memory: the eighth and ninth run, too.
    """
    backward = '(ddp(torch.randn(n, 64, device="cuda")).sum() / len(lengths)).backward()'
    instead = 'loss = ddp(torch.randn(n, 64, device="cuda")).sum()'
    instead += f"\n        if i == 6:\n            {line}\n        loss.backward()"
    text = (MODEL + ACCUMULATES).replace(backward, instead)
    text = text.replace("torch.nn.parallel.DistributedDataParallel(model)", "model")
    program = captured(written(tmp_path, text))
    assert (tmp_path / "runs").read_text() == str(3 * runs)
    products = sum(op in ("aten.mm.default", "aten.addmm.default") for op, *_ in launches(program))
    assert products == 10 * (2 + 3) + more


def launches(program: ProgramCapture) -> list[tuple[object, ...]]:
    """What is launched on which memory, numbered in the order in which it is used."""
    memory: dict[int, int] = {}
    return [
        (c.op, c.phase, [(t.shape, memory.setdefault(t.storage, len(memory))) for t in c.touched])
        for c in (program.ranks[0].calls[i] for i in launch_order(program.ranks[0].calls))
    ]
