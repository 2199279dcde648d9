"""Data that a script makes itself: its numbers are known, and making it is not timed."""

from pathlib import Path

import pytest
from small_scripts import TRAINING, captured, written

ATOMS = """
import numpy, torch
made = MADE
class Atoms(torch.utils.data.Dataset):
    def __init__(self):
        self.places = [made / 2 for _ in range(64)]
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return (torch.cdist(self.places[i], self.places[i]) < 1.2).nonzero()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for pairs in torch.utils.data.DataLoader(Atoms(), batch_size=1, num_workers=WORKERS):
    model(torch.rand(pairs.shape[1], 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize(
    "made",
    [
        "torch.tensor([[0.0], [2.0], [4.0], [9.0]])",
        "torch.from_numpy(numpy.array([[0.0], [2.0], [4.0], [9.0]])).float()",
        "torch.tensor([1.0, 2.0, 3.0, 5.5])[:, None] * 2",
    ],
)
def test_a_data_set_has_the_numbers_that_a_script_made(
    tmp_path: Path, workers: str, made: str
) -> None:
    """Halves of 0, 2, 4, 9: 8 of 16 pairs are nearer than 1.2, each with itself, 0-1 and 1-2."""
    text = ATOMS.replace("WORKERS", workers).replace("MADE", made)
    calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
    (product,) = (c for c in calls if c.op == "aten.addmm.default")
    assert product.outputs[0].shape == (8, 8)


SELECTED = """import torch
ends = torch.tensor([[0, 1, 1, 2, 2], [1, 1, 2, 0, 2]])
edges = ends[:, ends[0] != ends[1]]
assert edges.tolist() == [[0, 1, 2], [1, 2, 0]], edges.tolist()
edges[edges == 2] = 7
edges[:, edges[0] == 1] = 5
assert edges.tolist() == [[0, 5, 7], [1, 5, 0]], edges.tolist()
"""


def test_integers_that_a_known_mask_selects_are_known(tmp_path: Path) -> None:
    """Of five edges two are loops, 1-1 and 2-2; 2 becomes 7, and an edge from 1 gets two 5."""
    assert captured(written(tmp_path, SELECTED + TRAINING), gpus=1).ranks


COPIED = "model(torch.randn(4, 8).cuda())"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model(torch.tensor(rows, device='cuda'))", "torch.tensor(rows, device='cuda')"),
        ("model(torch.tensor(rows).to('cuda'))", "torch.tensor(rows).to('cuda')"),
        (COPIED, "torch.randn(4, 8).cuda()"),
        ("model(torch.randn(4, 8, device='cuda').cuda())", ""),
        ("model(torch.tensor(2.0).cuda() * resident)", ""),
    ],
)
def test_a_step_says_that_no_data_loader_makes_its_input(
    tmp_path: Path, text: str, line: str
) -> None:
    before = "rows = [8 * [0.0]]; resident = torch.tensor(rows).cuda()\nfor step"
    script = TRAINING.replace("for step", before).replace(
        'model(torch.randn(4, 8, device="cuda"))', text
    )
    notes = captured(written(tmp_path, script), gpus=1).notes
    assert [note.partition(":")[0] for note in notes] == ["no DataLoader makes its input"] * bool(
        line
    )
    assert all(line in note for note in notes)


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(64, 8))
"""


@pytest.mark.parametrize("data", ["torch.zeros(64, 8)", "Stream()"])
def test_batches_of_data_loaders_are_timed(tmp_path: Path, data: str) -> None:
    batches = f"{STREAM}for x in torch.utils.data.DataLoader({data}, batch_size=4)"
    script = TRAINING.replace("for step in range(10)", batches)
    script = script.replace('torch.randn(4, 8, device="cuda")', "x.cuda()")
    assert not captured(written(tmp_path, script), gpus=1).notes


KERNEL = """
kernel = torch.cuda._compile_kernel("extern", "count")
counts, threes = torch.zeros(4, dtype=torch.int64).cuda(), torch.full((4,), 3).cuda()
kernel((1, 1, 1), (1, 1, 1), (counts, threes))
assert counts.sum().item() == 1 and threes.sum().item() == 12
for step"""


def test_a_kernel_that_nobody_knows_may_fill_zeros(tmp_path: Path) -> None:
    """A sum that nobody knows is 1; four threes stay."""
    (note,) = captured(written(tmp_path, TRAINING.replace("for step", KERNEL)), gpus=1).notes
    assert note.startswith("kernels in Triton or CUDA are taken to pass over their arguments once")


LISTS = """
known, more = torch.tensor([2.0, 3.0]).cuda(), torch.tensor([1.0, 1.0]).cuda()
torch._foreach_add_([known], [more])
assert known.sum().item() == 7
torch._foreach_add_([known], [torch.randn(2, device="cuda")])
assert known.sum().item() == 1
for step"""


def test_lists_that_unknown_numbers_are_added_to_are_unknown(tmp_path: Path) -> None:
    """2 + 3 + 1 + 1, then a sum that nobody knows, which is 1."""
    assert captured(written(tmp_path, TRAINING.replace("for step", LISTS)), gpus=1).ranks


PACKAGE = """
class Dataset:
    def __init__(self, rows):
        self.rows = rows
    def __len__(self):
        return len(self.rows)
    def select(self, places):
        return Dataset([self.rows[i] for i in places])
    def map(self, function, batched=False, batch_size=1000, **options):
        assert len(self) > 16 or not options["load_from_cache_file"]
        parts = (self.rows[i : i + batch_size] for i in range(0, len(self), batch_size))
        return Dataset([row for part in parts for row in function(part)])
"""
JOINING = """
def concatenate_datasets(parts):
    return type(parts[0])([row for part in parts for row in part.rows])
"""
MAPPED = """
import torch
from datasets.arrow_dataset import Dataset
encoder, model = torch.nn.Linear(8, 4).cuda(), torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters())
rows = Dataset([[float(i)] * 8 for i in range(48)])
seen = []
def encode(rows):
    seen.extend(rows)
    inputs = torch.tensor(rows, device=DEVICE)
    return list(encoder(inputs).cpu()) if DEVICE == "cuda" else list(inputs[:, :4])
with torch.no_grad():
    made = rows.map(encode, batched=True, batch_size=4)
for step in range(4):
    model(torch.stack(made.rows)[: len(seen)].cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("device", "rows"), [("cuda", 16), ("cpu", 48)])
def test_some_rows_of_a_data_set_go_through_a_frozen_model(
    tmp_path: Path, device: str, rows: int
) -> None:
    """Of 48 rows the encoder sees 16, the others are copies; a function on the host sees all."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "arrow_dataset.py").write_text(PACKAGE)
    (tmp_path / "datasets" / "__init__.py").write_text(JOINING)
    capture = captured(written(tmp_path, MAPPED.replace("DEVICE", repr(device))), gpus=1)
    (product,) = (c for c in capture.ranks[0].calls if c.op == "aten.addmm.default")
    assert product.outputs[0].shape == (rows, 1)
    said = [note for note in capture.notes if "16 of a data set's 48 rows" in note]
    assert len(said) == (device == "cuda")
