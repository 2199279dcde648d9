"""Data sets that a script maps through a model before training: a few rows are computed for all."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from itercast.capture.base.slow_imports import once_imported
from itercast.capture.programs.log import ProgramLog

ROWS = 16  # that are mapped


@contextmanager
def some_rows_through_models(log: ProgramLog) -> Iterator[None]:
    """Let ``Dataset.map`` (package ``datasets``) run models on the GPU for the first rows only.

    Other rows become copies of these. Functions that compute nothing on the GPU get all rows.
    """

    def limit(module: Any) -> None:
        """Replace ``Dataset.map`` of the module ``datasets``."""
        whole = module.Dataset.map

        def map_(dataset: Any, *args: Any, **options: Any) -> Any:
            """As ``Dataset.map``; a function that computes on the GPU gets ``ROWS`` rows."""
            if len(dataset) <= ROWS or not log.live_bytes:  # no tensor, so no model yet
                return whole(dataset, *args, **options)
            few = {**options, "num_proc": None, "load_from_cache_file": False}
            if name := options.get("new_fingerprint"):  # else what runs would be pickled for one
                few["new_fingerprint"] = f"{ROWS}-{name}"[:64]
            before = log.gpu_memory.ops
            head = whole(dataset.select(range(ROWS)), *args, **few)
            if log.gpu_memory.ops == before or not len(head):
                return whole(dataset, *args, **options)
            copied = f"{ROWS} of a data set's {len(dataset):,} rows are mapped through a model"
            log.guesses.setdefault(f"{copied}, others are copies", traceback.extract_stack())
            copies = [head] * -(-len(dataset) // ROWS)
            made = sys.modules["datasets"].concatenate_datasets(copies)
            return made.select(range(round(len(dataset) * len(head) / ROWS)))

        stack.enter_context(patch.object(module.Dataset, "map", map_))

    with ExitStack() as stack, once_imported("datasets.arrow_dataset", limit):
        yield
