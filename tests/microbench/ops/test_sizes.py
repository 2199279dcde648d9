"""Tables of sweeps: how often kinds and values come, by hand."""

from collections import Counter
from itertools import islice
from typing import Any

from itercast.microbench.ops.sizes import points_of

STATED: dict[str, dict[str, Any]] = {
    "a": {"share": 0.25, "op": "x", "m n": "8 * 1..4", "k": [1, "2..3"]},
    "b": {"share": 0.75, "op": {"y": 3, "z": 1}, "m": "mostly 1..63", "n": "1..10000", "k": 7},
}


def test_kinds_and_values_are_drawn_by_their_shares_and_in_their_ranges() -> None:
    """Half of a's points do not fit: 0.125 of 0.125 + 0.75 remain, a seventh of 7,000.

    Half of 1..10000 is below 100. 0.7 of m are made multiples of 8, and few others are.
    """
    doubled = points_of(0, STATED, dict, lambda p: p["k"] > 1, lambda rng, p: p | {"k": 2 * p["k"]})
    points = list(islice(doubled(), 7000))
    assert list(islice(doubled(), 7000)) == points
    ops = Counter(p["op"] for p in points)
    assert abs(ops["x"] - 1000) < 100 and abs(ops["y"] - 4500) < 150 and ops["z"] > 1350
    a, b = ([p for p in points if (p["op"] == "x") == is_a] for is_a in (True, False))
    assert {(p["m"], p["n"]) for p in a} == {
        (8 * m, 8 * n) for m in (1, 2, 3, 4) for n in (1, 2, 3, 4)
    }
    assert {p["k"] for p in a} == {4, 6} and {p["k"] for p in b} == {14}
    assert 0.47 < sum(p["n"] <= 100 for p in b) / len(b) < 0.53
    assert 0.7 < sum(p["m"] % 8 == 0 for p in b) / len(b) < 0.8
    assert {min(p["m"] for p in b), max(p["m"] for p in b)} == {1, 64}  # rounded up from 63
