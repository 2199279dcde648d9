"""Hold many more drawn plans to the laws over machines and policies than the tests do.

Prints each case that breaks a law; exit code 1 if one does.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import typer

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


def main(count: int = 500, seed: int = 100) -> None:
    """Draw so many plans for each law and check them."""
    broken = 0

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
    for of_law, (law, (key, check)) in enumerate(laws.items(), start=seed):
        for n, case in enumerate(drawn(count, of_law, least=key)):
            try:
                check(n, *case)
            except AssertionError:
                broken += 1
                print(f"{law}: {case[0]}, {case[1]!r}, number {n}", flush=True)
        print(f"{law}: {count} plans", flush=True)
    sys.exit(broken > 0)


if __name__ == "__main__":
    typer.run(main)
