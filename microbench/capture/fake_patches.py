"""Habits in which fake tensors differ from real ones, and what must run as it was written."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from microbench.capture.attention import flex_as_sdpa
from microbench.capture.fake import fake

WARNS = "warn_if_padding_and_no_attention_mask"


def _apply(module: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Module.to and its like in place, as with real tensors; torch swaps fake ones and fails."""
    for owner in module.modules() if recurse else [module]:
        for parameter in owner.parameters(recurse=False):
            with torch.no_grad():
                converted = _on_cpu(fn(parameter))
            if converted is not parameter:
                parameter.data = converted
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = _on_cpu(fn(buffer))
    return module


def _on_cpu(tensor: Any) -> Any:
    if tensor.device.type != "cpu":
        raise ValueError(f"a capture is made on the CPU: do not move the model to {tensor.device}")
    return tensor


def _format(tensor: Any, spec: str) -> str:
    """A tensor without axes formats as its number, where that is known."""
    try:
        return format(tensor.item() if tensor.dim() == 0 else repr(tensor), spec)
    except DataDependentOutputException:
        return format(repr(tensor), spec)


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Another one of its form; torch would copy storage that is not there."""
    if id(tensor) not in memo:
        memo[id(tensor)] = fake(tensor, None)
    return memo[id(tensor)]


@contextmanager
def habits_of_real_tensors() -> Iterator[None]:
    """Inside, modules convert in place and are copied, and ``f"{tensor}"`` is a number, as usual.

    Nothing is initialised: there is no data, and truncated distributions look at theirs. Torch does
    not log its errors at length beside raising them.
    """
    init = {n: f for n, f in vars(torch.nn.init).items() if n.endswith("_") and n[:2] != "__"}
    idle = dict.fromkeys(init, lambda tensor, *args, **kwargs: tensor)
    torch_says = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        patch.dict(vars(torch.nn.init), idle),
        patch.object(torch.nn.Module, "_apply", _apply),
        patch.object(FakeTensor, "__format__", _format),
        patch.object(FakeTensor, "__deepcopy__", _deepcopy),
        patch.object(torch_says, "disabled", True),
    ):
        yield


@contextmanager
def runs_as_written() -> Iterator[None]:
    """Inside, nothing is compiled, flex_attention is one op and encoder layers are many."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # inference of nn.TransformerEncoder
    try:
        with _compiled_runs_eagerly(), _transformers_runs_eagerly(), flex_as_sdpa():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _compiled_runs_eagerly() -> Iterator[None]:
    """Inside, what torch.compile wrapped runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing was wrapped; to import it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _transformers_runs_eagerly() -> Iterator[None]:
    """Inside, transformers does not take a fake tensor as a sign that a graph is being compiled.

    It would build causal masks that eager steps leave to the attention kernel. Nor does it look
    among the tokens for padding, to warn of it, or for the places of pictures, to count them.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"))
        if hasattr(module, "is_fake_tensor"):
            stack.enter_context(patch.object(module, "is_fake_tensor", lambda value: False))
        if hasattr(models, "PreTrainedModel"):
            silent = patch.object(models.PreTrainedModel, WARNS, lambda *given: None, create=True)
            stack.enter_context(silent)
        yield
