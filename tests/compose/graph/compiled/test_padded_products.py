"""Products that torch.compile pads: which parts they have by hand, and when they are taken."""

from dataclasses import replace

import pytest

from itercast.capture.opcall import PADDABLE, OpCall, TensorSpec
from itercast.compose.capture_model import capture
from itercast.compose.graph.compiled.inductor import inductor_kernels
from itercast.compose.graph.compiled.padded_products import is_paddable, padded_parts
from itercast.compose.pricing.price_book import PriceBook, price_book
from itercast.compose.pricing.priced_op import priceable
from itercast.compose.target import find_target
from itercast.microbench.ops.matrix.gemm import Gemm


def product(m: int, n: int, k: int, **facts: object) -> OpCall:
    a, b, c = (
        TensorSpec(shape=shape, dtype="bf16", storage=i)
        for i, shape in enumerate([(m, k), (k, n), (m, n)])
    )
    return OpCall(op="aten.mm.default", args=(a, b), outputs=(c,), phase="forward", kwargs=facts)


def us(call: OpCall, book: PriceBook) -> float:
    return book.price([priceable(call)])[0].duration_us


@pytest.mark.parametrize(
    ("sides", "padded", "copied"),
    [
        ((16, 50257, 8), (16, 50264, 8), [8 * 50257]),  # columns of B
        ((16, 8, 50257), (16, 8, 50264), [16 * 50257, 50257 * 8]),  # what is summed over
        ((9, 8, 16), (16, 8, 16), [9 * 16]),  # rows of A
        ((1, 8, 9), (1, 8, 16), [9, 9 * 8]),  # a vector stays one
    ],
)
def test_operands_that_grow_are_copied(
    sides: tuple[int, ...], padded: tuple[int, ...], copied: list[int]
) -> None:
    """Sides of 16 bits become multiples of 8; copies are of half as many elements in fp32."""
    m, n, k = sides
    point = Gemm(m=m, n=n, k=k, dtype="bf16")
    first, *copies = padded_parts(point)
    assert is_paddable(point) and (first.params.m, first.params.n, first.params.k) == padded
    moved = [float(c.params.numel) * c.times for c in copies]
    assert moved == pytest.approx([n / 2 for n in copied], abs=0.5)
    assert not is_paddable(replace(point, m=16, n=24, k=32))
    assert not is_paddable(replace(point, dtype="fp8"))


def test_the_faster_one_of_both_runs() -> None:
    """GPT-2's 50,257 words are padded on an H100, unless nothing is compiled; 50,264 are not."""
    target = find_target("h100-sxm-80gb", "dp=1", None)
    book = price_book(target.bundle, target.gpu, 0, target.stack, target.host)
    odd, whole = ((8192, n, 768) for n in (50257, 50264))
    eager_us, padded_us, whole_us = (
        us(product(*odd), book),
        us(product(*odd, **{PADDABLE: True}), book),
        us(product(*whole), book),
    )
    assert whole_us < padded_us < eager_us / 1.1
    small = product(64, 8, 65)  # two copies take longer than it
    assert us(small, book) == us(replace(small, kwargs={PADDABLE: True}), book)


def test_compiled_steps_mark_such_products() -> None:
    step = inductor_kernels(capture("gpt2-small"))
    marked = [c for c in step.calls if PADDABLE in c.kwargs]
    assert len(marked) == 3 and all(50257 in (*c.args[0].shape, *c.args[1].shape) for c in marked)
