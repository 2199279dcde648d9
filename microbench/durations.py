"""Parse durations such as 90s, 10m or 1h."""

from __future__ import annotations


def seconds(text: str) -> float:
    """Seconds of a duration such as 90s, 10m or 1h; ValueError for other text, or over a week."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    try:
        value = float(text[:-1]) * units[text[-1:]]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < 7 * 86400:
        raise ValueError(f"budget {text!r}: expected a duration like 90s, 10m or 1h")
    return value
