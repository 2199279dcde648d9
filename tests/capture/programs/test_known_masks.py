"""What scripts know of their masks decides whether attention is causal or masked."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_scripts import captured, written

SDPA = torch.nn.functional.scaled_dot_product_attention
MASKS = """
import sys
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

given, length = sys.argv[1], 32
small = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **small))
device = "cuda" if torch.cuda.is_available() else "cpu"

def sample(i):
    tokens = torch.randint(1, 64, (length,))
    mask = torch.ones(length, dtype=torch.long)
    if given == "zeros at the end":
        mask[length - 1 - i % 5 :] = 0
    if given == "lengths":
        mask = (torch.arange(length) < length - i % 5).long()
    if given == "positions":
        return {"input_ids": tokens, "position_ids": torch.arange(length)}
    if given == "packed positions":
        return {"input_ids": tokens, "position_ids": torch.arange(length) % 8}
    masked = {} if given == "nothing" else {"attention_mask": mask}
    return {"input_ids": tokens, **masked}

model.to(device)
optimizer = torch.optim.SGD(model.parameters())
for batch, _ in zip(DataLoader([sample(i) for i in range(64)], batch_size=4), range(4)):
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if given.startswith("made on the GPU"):
        batch["attention_mask"] = torch.ones(4, length, dtype=torch.long, device=device)
    if given.endswith("cut"):
        batch["attention_mask"][:, length // 2 :] = 0
    if given.endswith("cut at random"):
        batch["attention_mask"][:, 1:] = torch.rand(4, length - 1, device=device).long()
    if given == "other tokens":
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "masked"),
    [
        *(("nothing", False), ("ones", False), ("other tokens", False), ("positions", False)),
        ("made on the GPU", False),
        *(("zeros at the end", True), ("lengths", True), ("packed positions", True)),
        *(("cut", True), ("made on the GPU, cut", True), ("made on the GPU, cut at random", True)),
    ],
)
def test_attention_is_masked_where_a_real_step_masks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, masked: bool
) -> None:
    """A mask of ones is left to ``is_causal``, as transformers does; one with a zero is not.

    The same script runs for real, too, and says what its attention was given.
    """
    path, real = written(tmp_path, MASKS), set[tuple[bool, bool]]()

    def seen(*args: Any, attn_mask: Any = None, is_causal: bool = False, **options: Any) -> Any:
        real.add((is_causal, attn_mask is not None))
        return SDPA(*args, attn_mask=attn_mask, is_causal=is_causal, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
        patched.setattr(sys, "argv", [str(path), given])
        runpy.run_path(str(path))
    calls = captured(path, given, gpus=1).ranks[0].calls
    attention = [c.kwargs for c in calls if c.op == "itercast.sdpa"]
    assert [(c["is_causal"], c["masked"]) for c in attention] == [(not masked, masked)] == [*real]


ASSIGNED = """
import torch
scoring, head = torch.nn.Linear(16, 100).cuda(), torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD([*scoring.parameters(), *head.parameters()])
for step in range(4):
    scores = scoring(torch.rand(IMAGES, 16, device="cuda"))[:, None].expand(IMAGES, 2, 100)
    places = scores.topk(10, dim=-1).indices
    counts = torch.zeros(IMAGES, 2, 100, dtype=torch.int8, device="cuda")
    counts.scatter_add_(-1, places, torch.ones_like(places, dtype=torch.int8))
    counts.masked_fill_(counts > 1, 0)
    chosen = counts.mul_(scores > 0.3).sum(-2).bool()
    features = torch.rand(IMAGES, 100, 8, device="cuda")
    (head(features[chosen]).sum() + scores.sum()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("images", [4, 8000])
def test_places_that_an_assigner_chooses_are_counted(tmp_path: Path, images: int) -> None:
    """Two objects choose the best 10 of 100 places each, half of which are near: 10 an image.

    With 8,000 images no number of the 1.6 million counts is known, but their mean.
    """
    text = ASSIGNED.replace("IMAGES", str(images))
    calls = captured(written(tmp_path, text), gpus=1).ranks[0].calls
    rows = {c.outputs[0].shape for c in calls if c.op == "aten.addmm.default"}
    assert rows == {(images, 100), (images * 10, 8)}


SEARCHED = """
import copy, torch
scheduler = {"times": torch.linspace(1, 1000, 1000)}
schedule = copy.deepcopy(scheduler)["times"].cuda()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    drawn = (torch.randn(4, device="cuda").sigmoid() * 1000).long()
    places = [(schedule == t).nonzero().item() for t in schedule[drawn]]
    model(torch.randn(len(places), 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_one_step_of_a_noise_schedule_is_that_of_a_sample(tmp_path: Path) -> None:
    """As diffusers' trainers of flow matching look their sigmas up; the times are drawn."""
    (product,) = (
        c
        for c in captured(written(tmp_path, SEARCHED), gpus=1).ranks[0].calls
        if c.op == "aten.addmm.default"
    )
    assert product.outputs[0].shape == (4, 8)
