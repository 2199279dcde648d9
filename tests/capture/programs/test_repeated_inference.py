"""Forwards without gradients run a few times, and the program is as if all ran."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_repeated_layers import WIDTH, Layer, Model, Step, captured, launches
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from itercast.capture.programs.program import AGAIN
from itercast.capture.programs.repeated import fold

STEPS = 8  # of a denoising loop


class Denoiser(nn.Module):
    """Is given a noisy sample, and the number of the time step: one with data, as schedulers do."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.reads, self.model, self.times = reads, Model(), nn.Embedding(64, WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        noise: Tensor = self.model(x + self.times(time))
        return noise.exp() if self.reads and time.item() < 3 else noise


def denoising(model: Callable[[], nn.Module], mode: Any = torch.no_grad) -> Step:
    """Eight steps of a denoising loop, and a training step."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with _disable_current_modes():
        times = torch.arange(STEPS)

    def step() -> None:
        with mode():
            x = torch.randn(4, 8, WIDTH)
            for time in times:
                x = x - net(x, time)
        net(torch.randn(4, 8, WIDTH), times[0]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_denoising_steps_are_as_if_all_ran(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first pass three layers run: the first has no number to compare, two show the rest.

    Of the second pass one runs, and none of the other six. A training step takes six layers; the
    second iteration runs these alone: its passes without gradients are as those of the first.
    Launches of the first, the second (which reads what that one made) and the last pass are kept,
    and three of five alike ones, one of them as repeated three times.
    """
    program = partial(denoising, Denoiser, mode)
    folded = captured(program, repeats=True)
    monkeypatch.setattr(fold, "_folded", lambda calls: [c for c in calls if c.op != AGAIN])
    found = captured(program, repeats=True)
    runs, whole = Layer.runs, captured(program, repeats=False)
    assert launches(found) == launches(whole)
    assert found.ranks[0].host == whole.ranks[0].host and found.peak_bytes == whole.peak_bytes
    assert Layer.runs == 2 * (STEPS + 1) * 9
    assert [c.args for c in folded.ranks[0].calls if c.op == AGAIN] == [(3,), (1,)]
    assert runs == 3 + 1 + 6 + 6


def test_a_model_that_reads_its_time_step_runs_each_time() -> None:
    program = partial(denoising, partial(Denoiser, reads=True))
    found, whole = (captured(program, repeats) for repeats in (True, False))
    assert launches(found) == launches(whole)
    assert sum(op == "aten.exp.default" for op, *_ in launches(found)) == 3 + 1


class State:
    """What a model keeps of words, as caches of libraries are: an object, and a list in it."""

    def __init__(self, seen: list[Tensor]) -> None:
        self.seen, self.length = seen, len(seen)


class Reader(nn.Module):
    """A model of tokens, which may ask whether the first one is 0."""

    runs = 0

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads, self.words, self.out = reads, nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        Reader.runs += 1
        words = self.words(tokens)
        return self.out(words.exp() if self.reads and tokens[0] == 0 else words)  # type: ignore[no-any-return]


class Remembering(Reader):
    """Adds what a state holds to its words, and returns this in another object."""

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:  # type: ignore[override]
        Reader.runs += 1
        words = self.words(tokens) + sum(state.seen if state else ())
        return self.out(words), State([words.exp()] if self.reads else [words, words])


class Replacing(Remembering):
    """Changes the state that it is given: what is in it has the same shape."""

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:  # type: ignore[override]
        output, new = super().forward(tokens, state)
        vars(state or new).update(vars(new))
        return output, new


def accumulating(model: Callable[[], nn.Module], keeps: bool = False) -> Step:
    """A step of five micro-batches of tokens with data, all different; before it are as many passes
    without gradients, each given the same state, if a model ``keeps`` one.
    """
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with _disable_current_modes():
        batches = [torch.full((7,), number) for number in range(5)]

    def step() -> None:
        state = State([torch.zeros(7, WIDTH)])
        for tokens in batches if keeps else ():
            with torch.no_grad():
                net(tokens, state)
        for tokens in batches:
            output = net(tokens)
            (output[0] if isinstance(output, tuple) else output).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("model", "keeps", "runs"),
    [(Remembering, False, 3 + 1), (Remembering, True, 2 + 3 + 1), (Replacing, True, 2 + 3 + 1)],
)
def test_objects_of_libraries_are_made_anew(model: Any, keeps: bool, runs: int) -> None:
    """Outputs are a tensor and an object, which holds another one once or twice.

    Of five micro-batches three run, in the second step one, and two of all passes that are given an
    object, which one of the models changes: where it then holds a tensor twice, the first pass of
    each step is of a kind of its own.
    """
    for has_one in (True, False):
        Reader.runs, program = 0, partial(accumulating, partial(model, has_one), keeps)
        found = captured(program, repeats=True)
        assert Reader.runs == runs + 2 * (model is Replacing and not has_one)
        whole = captured(program, repeats=False)
        assert launches(found) == launches(whole)
        assert (found.peak_bytes, found.held_bytes) == (whole.peak_bytes, whole.held_bytes)


@pytest.mark.parametrize(("reads", "runs"), [(False, 3 + 1), (True, 2 * 5)])
def test_tokens_may_differ_where_nobody_reads_them(reads: bool, runs: int) -> None:
    """In each step the first micro-batch makes gradients; two show what others do in all steps.
    Where numbers are read all run, and the first has an exponential.
    """
    Reader.runs, program = 0, partial(accumulating, partial(Reader, reads))
    found = captured(program, repeats=True)
    assert Reader.runs == runs
    whole = captured(program, repeats=False)
    assert launches(found) == launches(whole) and found.peak_bytes == whole.peak_bytes
    assert sum(op == "aten.exp.default" for op, *_ in launches(found)) == int(reads)


def teaching(passes: int) -> Step:
    """Passes without gradients under one autocast each step: some alike, then one of another size.

    The first of them casts the weights.
    """
    net = Model()

    def step() -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            net(torch.randn(4, 8, WIDTH))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            for rows in [4] * passes + [6, 5]:
                net(torch.randn(rows, 8, WIDTH))

    return step


def test_weights_that_a_repeated_pass_cast_are_cast_once() -> None:
    """The same ops: later passes read casts in memory of their own."""
    found, runs = captured(partial(teaching, 3), repeats=True), Layer.runs
    whole = captured(partial(teaching, 3), repeats=False)
    assert [op for op, *_ in launches(found)] == [op for op, *_ in launches(whole)]
    assert runs < Layer.runs
