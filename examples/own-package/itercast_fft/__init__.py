"""An op family and a GPU that itercast finds by the entry points in pyproject.toml."""

from pathlib import Path

L40 = Path(__file__).with_name("l40.yaml")
