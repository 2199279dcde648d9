"""Counts of one transform by hand, and how a captured call becomes parameters."""

from __future__ import annotations

import torch
from itercast_fft.fft import FAMILY, Fft, bytes_moved, flops, resize

from itercast.api import capture
from itercast.microbench.hardware.spec import load_gpu
from itercast.microbench.ops import families, find_family


class Spectrum(torch.nn.Module):
    """The magnitudes of a signal's frequencies, scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.fft.rfft(x).abs()


def test_flops_and_bytes_of_two_rows_of_eight() -> None:
    """2.5 * 2 * 8 * 3 flops; 16 reals in, 2 * 5 complex numbers out."""
    p = Fft(rows=2, size=8)
    assert (flops(p), bytes_moved(p)) == (120, 4 * 16 + 8 * 10)
    assert resize(p, 4.0, 0.5) == Fft(rows=8, size=8)


def test_a_captured_call_is_answered() -> None:
    found = capture(Spectrum(), {"x": torch.randn(2, 8)}, loss="none")
    answers = [find_family(call) for call in found.calls if "_fft_r2c" in call.op]
    assert [params for _, params in answers] == [Fft(rows=2, size=8)]


def test_itercast_finds_what_this_package_adds() -> None:
    assert families()["fft"] is FAMILY
    assert load_gpu("our-rtx-6000-ada").peak("bf16") == 364.25e12
