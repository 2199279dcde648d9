"""Points that recommenders' iterations consist of: lookups and updates, dense parts, messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from itercast.capture.base.yaml_text import facts_of
from itercast.extras.lookups.embedding_bag import EmbeddingBag, bags_of
from itercast.extras.lookups.random_streams import with_random_stream
from itercast.extras.recommenders.sparse_update import SparseUpdate
from itercast.extras.recommenders.tables.placement import Placement
from itercast.microbench.ops import families, find_family
from itercast.microbench.ops.family import Point, log_uniform
from itercast.microbench.ops.sizes import swept
from itercast.microbench.ops.step.collective import Collective
from itercast.microbench.ops.step.host import EVENTS, OPTIMIZERS, REPEATED

FACTS = facts_of(__file__)
MOST_POINTS = 4000  # of a family; more than any sweep measures
HOST_EVENTS = (*EVENTS, *OPTIMIZERS, REPEATED)  # of no parallel wrapper
OF_TABLES = ("embedding_bag", "sparse_update")
MODELS = 24  # dense parts that are captured
DENSE_POINTS = 80  # of a family, so that most of a sweep's time is left for lookups
MOST_LOOKUPS = 2**17
MOST_ELEMENTS = 2**24
MOST_TABLE_ELEMENTS = 2**26  # of all of them


def lookup_points() -> dict[str, list[Point]]:
    """Embedding bags and sparse updates of tables as in ``itercast.extras.recommenders.tasks``."""
    how = (_fits, with_random_stream)
    return {
        "embedding_bag": _drawn("embedding_bag", bags_of, *how),
        "sparse_update": _drawn("sparse_update", SparseUpdate, *how),
    }


def _drawn(family: str, *how: Any) -> list[Point]:
    """Points of a family, ``swept`` as points.yaml states them."""
    return list(islice(swept(np.random.default_rng(0), FACTS[family], *how), MOST_POINTS))


def _fits(p: EmbeddingBag | SparseUpdate) -> bool:
    gathered, held = (p.tables * n * p.dim for n in (p.lookups, p.rows))
    small = p.lookups <= MOST_LOOKUPS and gathered <= MOST_ELEMENTS
    return small and held <= MOST_TABLE_ELEMENTS


def dense_points() -> dict[str, list[Point]]:
    """Points by family of a rank's ops beside lookups, and copies of all sizes.

    Of random DLRMs whose tables are on another rank, and of every fourth with tables cut by rows.
    """
    from itercast.extras.recommenders.sharding.step import dlrm_step, tables_of
    from itercast.extras.recommenders.tables.rank_step import rank_step  # torch is slow to import
    from itercast.extras.recommenders.tasks import any_configuration, unequal_task

    rng = np.random.default_rng(0)
    points: dict[str, dict[Any, None]] = {}
    for number in range(MODELS):
        model = any_configuration(rng) if number % 2 else unequal_task(rng)
        wide = tuple(8 * log_uniform(rng, 4, 40) for _ in range(2))
        model = replace(model, batch=log_uniform(rng, 24, 320), bottom=wide, top=wide)
        model = replace(model, optimizer="sgd" if number % 3 else "adam")
        by_rows, whole = Placement("row_wise", (0, 1)), Placement("table_wise", (1,))
        step, places = dlrm_step(model), (whole if number % 4 else by_rows,) * len(model.tables)
        for call in rank_step(step, tables_of(step, model), places, 0, 2, 2, on_cpu=True).calls:
            family, params = find_family(call)
            if family is not None and family.name not in OF_TABLES:
                points.setdefault(family.name, {})[params] = None
    copies = (p for p in families()["elementwise"].sweep() if p.op in ("copy_", "clone"))
    points["elementwise"] = dict.fromkeys([*islice(copies, 100), *points.get("elementwise", ())])
    points["host"] = dict.fromkeys(p for p in families()["host"].sweep() if p.op in HOST_EVENTS)
    return {
        name: [list(some)[i] for i in rng.permutation(len(some))[:DENSE_POINTS]]
        for name, some in points.items()
    }


def message_points() -> dict[str, list[Point]]:
    """Messages of 256 bytes to 16 MiB: all_to_all of vectors, all_reduce of gradients."""
    return {"collective": _drawn("collective", Collective)}
