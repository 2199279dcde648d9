"""Numbers in text: parses durations such as 20ms, 90s, 10m or 1h, and writes counts of things."""

from __future__ import annotations

import re

UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, what: str = "budget") -> float:
    """Seconds of a duration such as 90s, 10m or 1h; ValueError for other text, or over a week."""
    match = re.fullmatch(r"([0-9.e+-]+)(ms|s|m|h)", text)
    try:
        duration_s = float(match[1]) * UNITS_S[match[2]] if match else 0.0
    except ValueError:
        duration_s = 0.0
    if not 0 < duration_s < 7 * 86400:
        raise ValueError(f"{what} {text!r}: expected a duration like 20ms, 90s, 10m or 1h")
    return duration_s


def counted(number: int, thing: str) -> str:
    """A number of things in words: 1 row, 2 rows."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
