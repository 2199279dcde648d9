"""An op family, a GPU and a plan key that itercast finds by the entry points in pyproject.toml."""

from pathlib import Path

RTX_6000_ADA = Path(__file__).with_name("our-rtx-6000-ada.yaml")
