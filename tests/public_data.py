"""Published measurements, which are not in this repository: where they are, and who needs them."""

import os
from pathlib import Path

import pytest

BESIDE = Path(__file__).parents[2] / "shared" / "public-data"
PUBLIC = Path(os.environ.get("ITERCAST_PUBLIC", BESIDE)).absolute()


def needs_public(folder: str = ".") -> pytest.MarkDecorator:
    """Skips a test, and says why, where this folder of the public data is missing."""
    path = PUBLIC / folder
    reason = f"no public data at {path}; ITERCAST_PUBLIC=folder names another place"
    return pytest.mark.skipif(not path.is_dir(), reason=reason)
