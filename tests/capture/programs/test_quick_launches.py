"""What recording a launch does not do, since it happens for each of a million."""

import sys
from typing import Any

import pytest
import torch
from test_repeated_layers import Step, captured
from torch._subclasses.fake_tensor import FakeTensorMode

from itercast.capture.recorder.facts import Facts

ASKED = list[str]()
HEARD = {"builtins.id": False}  # a hook cannot be taken back: only the test makes it hear


def test_known_launches_ask_torch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first addition ten more, each of 2 arguments and a result, ask torch's mode of fake
    tensors for nothing, which takes as long as recording one; nor Python for the number of a
    tensor (``id``), of which hooks that note files hear.
    """
    monkeypatch.setattr(FakeTensorMode, "dispatch", noted(FakeTensorMode.dispatch))
    monkeypatch.setitem(HEARD, "builtins.id", True)
    sys.addaudithook(lambda event, args: ASKED.append(event) if HEARD.get(event) else None)

    def program() -> Step:
        x, y = torch.ones(4), torch.ones(4)
        kept = [x + y]
        ASKED.clear()
        kept += [x + y for _ in range(10)]
        asked = list(ASKED)
        assert "dispatch" not in asked and len(asked) < 3 * 10
        return lambda: None

    calls = captured(program, repeats=True)
    assert not calls.ranks[0].calls


def test_facts_of_a_recording_that_is_over_are_none_of_the_next() -> None:
    """Python gives an object's number to another one as soon as it is gone."""
    tensor = torch.ones(2)
    for _ in range(3):
        facts = Facts()
        assert tensor not in facts
        facts[tensor] = None
        del facts


def noted(dispatch: Any) -> Any:
    """A function that notes that it is called."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        ASKED.append("dispatch")
        return dispatch(*args, **kwargs)

    return noting
