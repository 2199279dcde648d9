"""Decoding with a cache that grows runs a few passes, and the program is as if all ran."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from test_repeated_layers import Step, captured, launches
from torch import Tensor, nn

from itercast.capture.programs import capture
from itercast.capture.programs.program import AGAIN, launch_order
from itercast.capture.programs.repeated import fold
from itercast.capture.programs.repeated.growing import described, terms_of

HEADS, HEAD, PROMPT, ROWS, TOKENS = 2, 4, 5, 3, 64
WIDTH = HEADS * HEAD
BMM = "aten.bmm.default"


class Cache:
    """Keys and values of each layer, as libraries keep them: in a list of an object."""

    def __init__(self) -> None:
        self.layers = list[tuple[Tensor, Tensor]]()
        self.length = 0


class Decoder(nn.Module):
    """Two layers of attention; of keys it keeps the last ``window``."""

    runs = 0

    def __init__(self, window: int = 1000) -> None:
        super().__init__()
        self.window, self.words = window, nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 64)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Cache | None]:
        Decoder.runs += 1
        x = self.words(tokens)
        if mask is not None and not mask.all():
            x = x.exp()
        rows, length, _ = x.shape
        for number, layer in enumerate(self.layers):
            q, k, v = layer(x).view(rows, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
            if cache is not None:
                for old_k, old_v in cache.layers[number : number + 1]:
                    k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
                last = slice(-self.window, None)
                cache.layers[number : number + 1] = [(k[:, :, last], v.clone()[:, :, last])]
            scores = q.flatten(0, 1) @ k.flatten(0, 1).transpose(1, 2)
            mixed = scores.softmax(-1) @ v.flatten(0, 1)
            x = x + mixed.view(rows, HEADS, length, HEAD).transpose(1, 2).reshape(x.shape)
        if cache is not None:
            cache.length += length
        return self.out(x), cache


def generating(model: Callable[[], nn.Module], cached: bool = True, masked: bool = False) -> Step:
    """A step that makes ``TOKENS`` tokens one by one, and trains on them."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        tokens = torch.randint(0, 64, (ROWS, PROMPT))
        cache = Cache() if cached else None
        with torch.no_grad():
            for _ in range(TOKENS):
                given = tokens if cache is None or not cache.length else tokens[:, -1:]
                mask = torch.arange(tokens.shape[1]).expand(tokens.shape) if masked else None
                logits = net(given, cache, mask)[0][:, -1]
                tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
        net(tokens)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("cached", "masked", "window", "runs"),
    [
        (True, False, 99, 24),
        (False, False, 99, 20),
        (True, True, 99, 24),
        (True, False, 20, 32),
        (True, True, 30, 35),
    ],
)
def test_decoding_is_as_if_all_ran(
    cached: bool, masked: bool, window: int, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache all tokens are given in each pass, and scores grow by their square.

    Positions may be read, which changes nothing: they grow steadily. Where a window is full
    another law begins, which four passes show.

    Of the first step's 65 passes 19 run: the prompt's and the next one, four that show the law,
    those that confirm it, the 8th, 16th, 32nd, four more where lengths come to 24 and five to 64,
    numbers of the model (8 is among the first), and training's; of the second step's 5: the
    prompt's and the next one, the 64th of both steps, the last, and training's. 19 + 5 = 24.
    """
    monkeypatch.setattr(fold, "_folded", lambda calls: [c for c in calls if c.op != AGAIN])
    Decoder.runs, program = 0, partial(generating, partial(Decoder, window), cached, masked)
    found = captured(program, repeats=True)
    assert Decoder.runs == runs
    whole = captured(program, repeats=False)
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host
    assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)


def test_a_pass_that_follows_a_law_is_one_call_until_it_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand: 62 of the second step's 64 passes, of 7 to 68 keys. The prompt's is none, nor the
    next one, which is given the prompt's cache, laid out otherwise.
    """
    found = list[Any]()

    def folded(calls: Any, stood_for: Any) -> Any:
        found.extend([(c, stood_for(c)) for c in calls if c.op == fold.PASS])
        return fold.folded(calls, stood_for)

    monkeypatch.setattr(capture, "folded", folded)
    captured(partial(generating, Decoder), repeats=True)
    assert len(found) == TOKENS - 2
    scores = [[c.args[1] for c in launched if c.op == BMM][-2] for _, launched in found]
    keys = [k.shape[2] for k in scores]
    assert keys == [*range(PROMPT + 2, PROMPT + TOKENS)]


class Padded(Decoder):
    """A decoder that does more where the first row begins with padding."""

    def forward(self, tokens: Tensor, cache: Any = None, mask: Any = None) -> Any:
        logits, cache = super().forward(tokens, cache)
        return (logits if mask[0, 0] else logits.exp()), cache


def padded(passes: int) -> Step:
    """A step that decodes twice: the padding is in the first row, then in the second one."""
    net = Padded()
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        for padded_row in range(2):
            cache = Cache()
            with torch.no_grad():
                for n in range(passes):
                    ones = [1] * (PROMPT + n)
                    rows = [[0, *ones] if row == padded_row else [1, *ones] for row in range(ROWS)]
                    net(torch.randint(0, 64, (ROWS, 1)), cache, torch.tensor(rows))
        net(torch.randint(0, 64, (ROWS, PROMPT)), None, torch.ones(1, 1))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_masks_of_equal_sum_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 40 of a step's passes have padding in the first row, 40 in the second one.

    The sums, least and greatest numbers of their masks are equal. Were they taken for alike, a pass
    that confirms their law would differ, and all would run.
    """
    monkeypatch.setattr(fold, "_folded", lambda calls: [c for c in calls if c.op != AGAIN])
    Decoder.runs = 0
    found = captured(partial(padded, 40), repeats=True)
    assert Decoder.runs < 40 + 40 + 1  # fewer than a single step has
    passes = [call.op for call in found.ranks[0].calls if call.phase == "forward"]
    assert passes.count("aten.exp.default") == 40
    assert passes.count("aten.embedding.default") == 40 + 40 + 1
    assert launches(found) == launches(captured(partial(padded, 40), repeats=False))


@pytest.mark.parametrize(
    ("numbers", "steady"),
    [
        (lambda n: np.tri(n), True),  # a causal mask
        (lambda n: np.tri(3, n + 5)[:, ::-1], True),  # padding on the left, of 3 lengths
        (lambda n: np.arange(50) < n, True),  # a static cache's
        (lambda n: np.full((2, 1), n), True),  # positions
        (lambda n: np.tile(np.arange(n), (4, 1)), True),
        (lambda n: np.arange(n) ** 2 % 7, False),
    ],
)
def test_numbers_that_grow_steadily_are_told_so(numbers: Any, steady: bool) -> None:
    told = [described(np.asarray(numbers(n), dtype=float)) for n in range(20, 24)]
    assert (terms_of(told) is not None) == steady


def test_numbers_are_told_from_others_of_equal_sum() -> None:
    """By hand: of rows of 2 + 3 zeros and ones, all 32 x 32 pairs are described otherwise."""
    rows = list(product((0.0, 1.0), repeat=5))
    assert len({tuple(described(np.array(two))) for two in product(rows, repeat=2)}) == 32**2


def products(program: Any) -> tuple[int, int]:
    """FLOPs and bytes of the products of attention in forward passes without gradients."""
    calls = [program.ranks[0].calls[i] for i in launch_order(program.ranks[0].calls)]
    bmm = [c for c in calls if c.op == BMM and c.phase == "forward" and c.args[0].shape[1] == 1]
    flops = sum(2 * c.args[0].numel * c.outputs[0].shape[2] for c in bmm)
    return flops, sum(c.touched_bytes for c in bmm)


def test_attention_of_each_length_is_counted() -> None:
    """By hand: lengths 6 to 68 of 63 passes; two layers, of each a product with keys and values.

    The middle of 13 lengths stands for them, and no pass of another length is left.
    """
    found = captured(partial(generating, Decoder), repeats=True)
    lengths = range(PROMPT + 1, PROMPT + TOKENS)
    heads = ROWS * HEADS
    flops = sum(2 * 2 * 2 * heads * HEAD * n for n in lengths)
    nbytes = sum(2 * 2 * 4 * heads * (HEAD + HEAD * n + n) for n in lengths)
    assert products(captured(partial(generating, Decoder), repeats=False)) == (flops, nbytes)
    assert products(found) == (pytest.approx(flops, rel=0.01), pytest.approx(nbytes, rel=0.01))
    kept = {
        c.outputs[0].shape[2]
        for c in found.ranks[0].calls
        if c.op == BMM and c.args[0].shape[1] == 1
    }
    assert len(kept - {HEAD}) < 12
