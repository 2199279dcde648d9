"""How long an epoch and a whole training are, and what a script does between its steps, by hand."""

import signal
from pathlib import Path

import pytest
from small_scripts import captured, written

from itercast.capture.programs.program import Training, read_program, write_program

# 1,000 samples by 8, evaluated on 200 by 16: 125 steps and 13 batches; on 4 ranks, which the
# sampler gives 250 each, 32 steps (the last one of 2 samples).
DATA = """
import os, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
world = int(os.environ["WORLD_SIZE"])
def made(rows):
    return TensorDataset(torch.randn(rows, 64), torch.zeros(rows, dtype=torch.long))
train, test = made(1000), made(200)
if world > 1:
    torch.distributed.init_process_group("nccl")
sampler = DistributedSampler(train) if world > 1 else None
train = DataLoader(train, batch_size=8, sampler=sampler)
test = DataLoader(test, batch_size=16)
layers = torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
class Options: epochs, limit = 3, 300
def step(x, y):
    torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
def trained():
    model.train()
    for x, y in train:
        step(x, y)
def evaluated():
    model.eval()
    seen = 0
    with torch.no_grad():
        for x, y in test:
            (model(x.cuda()).argmax(-1) == y.cuda()).sum().item()
            seen += len(y)
    return seen
"""
EPOCHS = """
for epoch in range(Options.epochs):
    trained()
    evaluated()
    torch.save(model.state_dict(), "model.pt")
"""
CHECKED = EPOCHS.replace("    evaluated()", "    assert evaluated() == len(test.dataset)")
PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10


def training(folder: Path, text: str, gpus: int = 1, **options: int) -> Training:
    program = captured(written(folder, DATA + text), gpus=gpus, **options)
    assert program.training is not None
    write_program(program, path := folder / "program.json.gz")
    assert read_program(path)[0].training == program.training
    return program.training


@pytest.fixture(autouse=True)
def in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("gpus", "steps"), [(1, 125), (4, 32)])
def test_an_epoch_is_followed_to_its_end(tmp_path: Path, gpus: int, steps: int) -> None:
    found = training(tmp_path, EPOCHS, gpus)
    assert (found.epoch_steps, found.steps, found.followed) == (steps, 3 * steps, True)
    assert found.saved_bytes == 4 * PARAMETERS
    (evaluation,) = found.evaluations
    assert evaluation.batches == 13 and evaluation.program.samples == 16
    calls = evaluation.program.ranks[0].calls
    products = [call for call in calls if call.op == "aten.addmm.default"]
    assert [call.args[1].shape for call in products] == [(16, 64), (16, 32)]
    assert {call.phase for call in calls} == {"forward"} and evaluation.lane is not None
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_a_script_that_checks_what_it_saw_gets_its_step_and_what_was_seen(tmp_path: Path) -> None:
    """It saw three batches, and fails: neither the second evaluation nor what it saves is known."""
    found = training(tmp_path, CHECKED)
    assert (found.epoch_steps, found.steps, found.followed) == (125, 375, False)
    assert [x.batches for x in found.evaluations] == [13] and found.saved_bytes == 0


STOPPED = DATA.replace("seen += len(y)", "1 / 0")


def test_an_evaluation_that_is_ended_early_has_all_batches_of_its_loader(tmp_path: Path) -> None:
    """An error after its first batch: 200 samples are 13 batches all the same."""
    program = captured(written(tmp_path, STOPPED + EPOCHS), gpus=1)
    assert program.training is not None and not program.training.followed
    assert [x.batches for x in program.training.evaluations] == [13]


MADE_ANEW = EPOCHS.replace("):", "):\n    train = DataLoader(made(1000), batch_size=8)", 1)


def test_an_epoch_ends_where_a_new_loader_feeds_the_next(tmp_path: Path) -> None:
    found = training(tmp_path, MADE_ANEW)
    assert (found.epoch_steps, found.steps, found.followed) == (125, 375, True)
    assert [x.batches for x in found.evaluations] == [13]


LEFT = DATA.replace("            seen +=", "            if seen > 80: break\n            seen +=")
CUT = DATA.replace("in test:", "in islice(test, 5):") + "from itertools import islice\n"
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ((torch.zeros(64), 0) for i in range(100))
test = DataLoader(Stream(), batch_size=16)
"""
UNKNOWN = STREAM.replace("test =", "    def __len__(self): raise NotImplementedError\ntest =")


@pytest.mark.parametrize(
    ("text", "batches"), [(LEFT, 7), (CUT, 5), (DATA + STREAM, 7), (DATA + UNKNOWN, 7)]
)
def test_an_evaluation_that_may_have_other_batches_than_its_loader_says_is_run(
    tmp_path: Path, text: str, batches: int
) -> None:
    """It is left after more than 80 samples by 16, cut to 5 batches, or has 100 samples."""
    found = captured(written(tmp_path, text + EPOCHS), gpus=1).training
    assert found is not None and found.followed
    assert [x.batches for x in found.evaluations] == [batches]


SLOW = LEFT.replace("> 80: break", "> 999: break\n            time.sleep(0.3)")


def test_an_evaluation_that_takes_too_long_is_ended_before_the_script(tmp_path: Path) -> None:
    """Of 13 batches, which may be fewer by its loop, it gets but a few."""
    found = captured(written(tmp_path, "import time\n" + SLOW + EPOCHS), gpus=1).training
    assert found is not None and found.followed
    assert [x.batches for x in found.evaluations] == [13]


def test_a_script_whose_step_takes_most_of_its_time_limit_is_not_followed(tmp_path: Path) -> None:
    found = captured(written(tmp_path, DATA + EPOCHS), gpus=1, patience_s=0).training
    assert found is not None and found.evaluations == ()
    assert (found.epoch_steps, found.followed) == (125, False)


GOES_ON = EPOCHS.replace("trained()", "try: trained()\n    except: pass")


def test_what_a_script_does_after_its_epoch_is_not_counted(tmp_path: Path) -> None:
    """It goes on with further epochs, as it catches all errors."""
    found = training(tmp_path, GOES_ON)
    assert found.saved_bytes == 4 * PARAMETERS
    assert [x.batches for x in found.evaluations] == [13]


IN_METHOD = "for epoch in range(1, Options.epochs + 1):\n    trained()"
BAR = """
def bar(rounds, total): yield from rounds
for epoch in bar(range(Options.epochs), total=3):
    trained()
"""
LIMITED = "max_train_steps = 200\nfor epoch in range(3):\n    trained()"
ENDLESS = "while True:\n    trained()"
FOLDS = "for fold in {1, 2}:\n    for epoch in range(3):\n        trained()"
COUNTED = "batches = iter(train)\nfor i in range(Options.limit):\n    step(*next(batches))"
HALVES = """
for epoch in range(3):
    for x, y in train:
        for half in range(2):
            step(x[4 * half:][:4], y[4 * half:][:4])
"""
QUARTERS = """
for epoch in range(3):
    for i, (x, y) in enumerate(train):
        model(x.cuda()).sum().backward()
        if i % 4 == 3:
            optimizer.step()
"""
WARMED_UP = "for x, y in DataLoader(made(80), batch_size=8):\n    step(x, y)\n" + IN_METHOD
ZIPPED = """
more = DataLoader(made(4000), batch_size=8)
for epoch in range(3):
    for (x, y), _ in zip(train, more):
        step(x, y)
"""


@pytest.mark.parametrize(
    ("text", "epoch_steps", "steps"),
    [
        (IN_METHOD, 125, 3 * 125),
        (BAR, 125, 3 * 125),
        (LIMITED, 125, 200),
        (ENDLESS, 125, 0),
        (FOLDS, 125, 0),
        (COUNTED, 125, 300),
        (HALVES, 250, 3 * 250),
        (QUARTERS, 32, 3 * 32),
        (ZIPPED, 125, 3 * 125),
        (WARMED_UP, 10, 0),
    ],
)
def test_the_training_ends_where_its_loops_do(
    tmp_path: Path, text: str, epoch_steps: int, steps: int
) -> None:
    found = training(tmp_path, text)
    assert (found.epoch_steps, found.steps, found.evaluations) == (epoch_steps, steps, ())


WITHOUT_LENGTH = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(64), 0
train = DataLoader(Stream(), batch_size=8)
trained()
"""
WITHOUT_LOADER = """
x, y = torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)
for i in range(10):
    for j in range(Options.limit):
        step(x, y)
"""


IN_QUARTERS = """
x, y = torch.zeros(8, 64), torch.zeros(8, dtype=torch.long)
for i in range(4 * Options.limit):
    torch.nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    if i % 4 == 3:
        optimizer.step()
"""
FOR_EVER = """
forever = torch.utils.data.RandomSampler(train.dataset, replacement=True, num_samples=10**9)
train = DataLoader(train.dataset, batch_size=8, sampler=forever)
trained()
"""


@pytest.mark.parametrize(
    ("text", "steps"),
    [(WITHOUT_LENGTH, 0), (WITHOUT_LOADER, 3000), (IN_QUARTERS, 300), (FOR_EVER, 0)],
)
def test_data_without_an_end_make_no_epoch(tmp_path: Path, text: str, steps: int) -> None:
    found = training(tmp_path, text)
    assert (found.epoch_steps, found.steps) == (0, steps)


CAUGHT = """
try:
    for epoch in range(Options.epochs):
        trained()
        1 / 0
except ZeroDivisionError:
    pass
"""
ONCE = "trained()\nevaluated()"


@pytest.mark.parametrize(("text", "followed"), [(CAUGHT, False), (ONCE, True)])
def test_a_script_that_ends_before_its_next_epoch_was_not_followed(
    tmp_path: Path, text: str, followed: bool
) -> None:
    assert training(tmp_path, text).followed == followed


STAYS = """
import time
trained()
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("restores", [False, True])
def test_a_script_that_stays_in_its_epoch_is_ended(tmp_path: Path, restores: bool) -> None:
    """As Lightning does, it may set all signals' handlers to those that it found."""
    before = (
        "import signal\nall = {n: signal.getsignal(n) for n in (signal.SIGURG, signal.SIGALRM)}\n"
    )
    restored = "for n in all: signal.signal(n, all[n])\nwhile"
    text = before + STAYS.replace("while", restored) if restores else STAYS
    found = training(tmp_path, text)
    assert found.epoch_steps == 125 and not found.followed


AGAIN = DATA.replace("batch_size=8,", "batch_size=8, num_workers=2, persistent_workers=True,")


def test_workers_that_stay_begin_a_second_pass(tmp_path: Path) -> None:
    program = captured(written(tmp_path, AGAIN + EPOCHS), gpus=1)
    assert program.training is not None and program.training.followed
