"""Modules of published benchmarks are interpreted from their text, and only what is listed."""

from __future__ import annotations

import pytest
import torch
from public_data import PUBLIC, needs_public

from itercast.compose.capture_model import capture
from itercast.eval.public.readers import read_source
from itercast.eval.public.sources.problem import problem
from itercast.microbench.importers.base import Hints

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
CONV = f"""{HEAD}
class Model(nn.Module):
    \"\"\"A convolution and a scale.\"\"\"
    def __init__(self, width: int, scale: float = 2.0):
        super(Model, self).__init__()
        self.conv = nn.Conv2d(3, width, kernel_size=(1, 1), bias=False)
        self.scale = scale

    def forward(self, x):
        y = F.elu(self.conv(x) * self.scale)
        return torch.sum(y ** 2, dim=1)[:, 0]

size = 4 * 2

def get_inputs():
    shape = (2, 3, size)
    return [torch.rand(*shape, 5)]

def get_init_inputs():
    return [7]
"""


def body(line: str) -> str:
    """A problem whose forward is this line."""
    return f"""{HEAD}
class Model(nn.Module):
    def forward(self, x):
        {line}
def get_inputs():
    return [torch.rand(2, 3)]
"""


def test_a_problem_computes_what_its_text_says() -> None:
    """The same numbers as the module written out."""
    module, (x,) = problem(CONV)
    assert tuple(x.shape) == (2, 3, 8, 5)
    weight = module.get_parameter("conv.weight")
    expected = torch.nn.functional.elu(torch.einsum("oi,nihw->nohw", weight[:, :, 0, 0], x) * 2)
    assert torch.allclose(module(x), expected.pow(2).sum(1)[:, 0], atol=1e-4)


def test_a_problem_is_captured_like_any_module() -> None:
    step = capture(lambda: problem(CONV), mode="infer", dtype="fp32")
    assert any("convolution" in call.op for call in step.calls)
    large = CONV.replace("size = 4 * 2", "size = 2 ** 20")  # 60 MB that nobody allocates
    assert capture(lambda: problem(large), mode="infer", dtype="fp32").calls


def test_norms_take_the_statistics_of_their_batch() -> None:
    """Problems are timed without eval()."""
    norm = CONV.replace("nn.Conv2d(3, width, kernel_size=(1, 1), bias=False)", "nn.BatchNorm2d(3)")
    module, (x,) = problem(norm)
    module.eval()
    first = module(x)
    assert torch.allclose(module(x * 10 + 3), first, rtol=1e-2)


@pytest.mark.parametrize(
    "line",
    [
        "return __import__('os').system('true')",
        "return torch.load('x')",
        "return torch.hub.load('a', 'b')",
        "return torch.ops.aten.relu(x)",
        "return nn.Module()",
        "return open('x')",
        "return x.__class__",
        "return x.numpy()",
        "return self._modules",
        "return self.register_buffer",
        "return self.scope",
        "return [y for y in x]",
        "return (lambda: x)()",
        "return 'a' * 10 ** 9",
        "return 9 ** 9 ** 9",
        "return f'{x}'",
        "self.forward = x",
        "self.__class__ = x",
        "x.data = x",
        "while True: x = x",
        "import os",
        "return unknown",
    ],
)
def test_what_is_not_listed_is_refused(line: str) -> None:
    module, inputs = problem(body(line))
    with pytest.raises(ValueError, match="not allowed"):
        module(*inputs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no Model with forward"),
        ("def", "problem is not Python"),
        ("x = [" + "(" * 10_000, "problem is not Python"),
        ("x = open('y')", "not allowed"),
        (body("return x").replace("return [torch.rand", "return [torch.load"), "torch.load"),
    ],
)
def test_a_text_that_is_no_problem_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(text)


@needs_public("kernelbench")
def test_every_published_problem_can_be_read() -> None:
    """Each has a module and inputs; on fake tensors, as some inputs take gigabytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    rows = read_source("kernelbench", PUBLIC / "kernelbench", Hints()).rows["iteration"]
    texts = set(rows["problem_source"])
    assert len(texts) >= 100
    with FakeTensorMode():
        for text in sorted(texts):
            module, inputs = problem(text)
            assert module.forward(*inputs) is not None
