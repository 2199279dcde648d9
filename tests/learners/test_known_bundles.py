"""Which bundle answers for a device, where no local one knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from itercast.learners.bundle import SHIPPED, SHIPPED_CPU
from itercast.learners.known_bundles import find_bundle


def test_a_name_leads_to_the_bundle_that_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the shipped CPU name it; ``cpu`` is whichever machine this is."""
    monkeypatch.chdir(tmp_path)
    cpu = next(iter(find_bundle("cpu")[1].gpus))
    assert find_bundle("cpu")[0] == find_bundle(cpu)[0] == SHIPPED_CPU
    assert find_bundle("h100-sxm-80gb")[0] == find_bundle("nobody")[0] == SHIPPED
