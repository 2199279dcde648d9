"""Numbers in text: durations such as 20ms or 1h, read and written, and counts of things."""

from __future__ import annotations

import math
import re

# A unit, the next smaller one, its seconds, how many are one, and how many the next larger one has.
SAID = (("min", "s", 1, 60, 60), ("h", "min", 60, 60, 24), ("d", "h", 3600, 24, math.inf))
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


def in_words(duration_s: float) -> str:
    """A duration as one would say it: 450 ms, 6.2 s, 8 min 31 s, 1 h 22 min, 3 d 4 h."""
    if duration_s < 99.5:
        short = duration_s < 0.9995
        return f"{duration_s * 1e3:.3g} ms" if short else f"{duration_s:.3g} s"
    words = ""
    for unit, below, below_s, times, most in SAID:
        number, rest = divmod(round(duration_s / below_s), times)
        words = words or (f"{number} {unit} {rest} {below}" if number < most else "")
    return words


def counted(number: int, thing: str) -> str:
    """A number of things in words: 1 row, 2 rows."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
