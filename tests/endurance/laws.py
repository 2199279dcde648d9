"""Hold many more drawn plans to the laws over machines and policies than the tests do.

Prints each case that breaks a law; exit code 1 if one does.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "compose")]

from drawn_plans import drawn  # noqa: E402
from test_machine_laws import (  # noqa: E402
    RATES,
    check_bandwidth,
    check_budgets,
    check_faster,
    check_offload,
    check_recompute,
    check_smaller,
    check_zero,
)


def main() -> None:
    """Draw plans and check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="plans for each law")
    parser.add_argument("--seed", type=int, default=100)
    asked, broken = parser.parse_args(), 0

    def bandwidth(n: int, name: str, text: str) -> None:
        check_bandwidth(name, text, *RATES[n % len(RATES)])

    laws: dict[str, tuple[str, Callable[[int, str, str], None]]] = {
        "lower factors are never slower": ("", lambda n, *case: check_faster(*case, n)),
        "more bandwidth is never slower": ("", bandwidth),
        "fewer samples are never slower": ("", lambda n, *case: check_smaller(*case)),
        "offloading saves memory": ("", lambda n, *case: check_offload(*case)),
        "sharding saves memory": ("zero", lambda n, *case: check_zero(*case)),
        "recomputation saves memory": ("", lambda n, *case: check_recompute(*case)),
        "larger budgets keep no less": ("", lambda n, *case: check_budgets(*case)),
    }  # fmt: skip
    for seed, (law, (key, check)) in enumerate(laws.items(), start=asked.seed):
        for n, case in enumerate(drawn(asked.count, seed, least=key)):
            try:
                check(n, *case)
            except AssertionError:
                broken += 1
                print(f"{law}: {case[0]}, {case[1]!r}, number {n}", flush=True)
        print(f"{law}: {asked.count} plans", flush=True)
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
