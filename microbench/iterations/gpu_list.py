"""The training iterations that are measured on one GPU: small and large, host-bound and not."""

from __future__ import annotations

from itercast.capture.base.yaml_text import facts_of
from itercast.capture.cases.registry import case
from itercast.microbench.iterations.measure import Iteration

FACTS = facts_of(__file__)
FIRST: list[tuple[str, int, str, str]] = FACTS["first"]
DLRM = tuple(f"dlrm-r{number:02d}" for number in range(20))


def gpu_iterations() -> list[Iteration]:
    """Lists all iterations to measure: ``FIRST``, more eager steps, CUDA graphs, compiled steps."""
    first = [_iteration(*one) for one in FIRST]
    eager = [
        _iteration(name, sizes[number][0], sizes[number][1], "eager")
        for number in range(max(map(len, FACTS["eager"].values())))
        for name, sizes in FACTS["eager"].items()
        if number < len(sizes)
    ]
    dlrm = [one for name in DLRM if (one := _iteration(name, 0, "fp32", "eager")) not in first]
    rest = [one for both in zip(eager, dlrm, strict=False) for one in both]
    rest += eager[len(dlrm) :] + dlrm[len(eager) :]
    return [*first, *rest, *(_iteration(*one) for one in FACTS["last"])]


def _iteration(name: str, batch: int, dtype: str, engine: str) -> Iteration:
    chosen, optimizer = case(name), "sgd" if name in DLRM else "adamw"
    return Iteration(
        case=name,
        batch=batch or chosen.batch,
        seq=chosen.seq,
        dtype=dtype,
        optimizer=optimizer,
        engine=engine,
    )
