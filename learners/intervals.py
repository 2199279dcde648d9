"""Intervals of op times, from errors on GPUs that were left out of training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from itercast.capture.base.assumptions import assumed
from itercast.learners.family_model import FamilyModel, Prepared, learn_quickly
from itercast.learners.features.table import CLUSTER_SEPARATOR
from itercast.learners.models.trees import Options
from itercast.learners.transfer.offsets import Offsets

SINGLE_GPU_WIDENING: float = assumed(__file__, "single_gpu_widening")
MIN_GPUS = 3  # to learn errors on unseen GPUs by leaving GPUs out
UNSEEN_TRAINING_ROWS, UNSEEN_TEST_ROWS = 20_000, 5_000  # at most, per fold of GPUs
FOLDS = 3


def unseen_offsets(prepared: Prepared, options: Options, seen: Offsets) -> Offsets:
    """10 and 90 % quantiles of the log error on GPUs left out, a third of them at a time.

    At least as wide as ``seen``; SINGLE_GPU_WIDENING times that where fewer than MIN_GPUS were
    measured. CPUs among GPUs do not count.
    """
    if len(left_out := names_of_gpus(prepared)) < MIN_GPUS:
        return SINGLE_GPU_WIDENING * seen[0], SINGLE_GPU_WIDENING * seen[1]
    errors = errors_on_unseen(prepared, options, [left_out[i::FOLDS] for i in range(FOLDS)])
    low, high = np.quantile(errors["error"], [0.1, 0.9])
    return min(seen[0], float(low)), max(seen[1], float(high))


def names_of_gpus(prepared: Prepared) -> list[str]:
    """Names of the GPUs (with their cluster, for collectives) that have rows; CPUs if all are."""
    names = sorted(np.unique(prepared.query.gpu))
    hardware = prepared.query.gpus
    kinds = {name: hardware[name.partition(CLUSTER_SEPARATOR)[0]].kind for name in names}
    return [name for name, kind in kinds.items() if kind != "cpu"] or names


def errors_on_unseen(
    prepared: Prepared, options: Options, folds: Sequence[Sequence[str]]
) -> pd.DataFrame:
    """Log errors (``error``) of rows of each fold of GPUs (``gpu``), by models of all other rows.

    Of a fold at most UNSEEN_TEST_ROWS, drawn at random, by models of UNSEEN_TRAINING_ROWS.
    """
    gpu, parts = prepared.query.gpu, []
    for number, names in enumerate(folds):
        of_fold = np.isin(gpu, names)
        if not of_fold.any() or of_fold.all():
            continue
        rng = np.random.default_rng
        train_rows = rng(number).permutation(np.flatnonzero(~of_fold))[:UNSEEN_TRAINING_ROWS]
        test_rows = rng(number).permutation(np.flatnonzero(of_fold))[:UNSEEN_TEST_ROWS]
        model = learn_quickly(prepared, train_rows, options)
        error = log_error(model, prepared, test_rows)
        parts.append(pd.DataFrame({"gpu": gpu[test_rows], "error": error}))
    return pd.concat(parts, ignore_index=True)


def log_error(model: FamilyModel, prepared: Prepared, rows: np.ndarray) -> np.ndarray:
    """log(measured / forecast) of rows of a prepared table."""
    table, query = prepared.table.take(rows), prepared.query.take(rows)
    forecast_us = model.source_gpus.predict(model.ensemble, table.x, table.roofline_us, query)
    return np.asarray(np.log(table.time_us / forecast_us))
