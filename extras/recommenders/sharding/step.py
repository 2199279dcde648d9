"""The captured step of a DLRM whose tables a file describes."""

from __future__ import annotations

from dataclasses import replace

from itercast.capture.opcall import StepCapture
from itercast.compose.capture_model import capture
from itercast.extras.recommenders.sharded_model import RankingModel, Table
from itercast.extras.recommenders.tables.captured import CapturedTable, captured_tables
from itercast.extras.recommenders.tables.known_streams import with_index_streams

DENSE_OPTIMIZER = {"adagrad": "adamw", "adam": "adamw", "sgd": "sgd"}


def dlrm_step(model: RankingModel) -> StepCapture:
    """One rank's step with all tables; those that are not spread have dense gradients."""
    from torch import zeros  # torch is slow to import, and priced tables need none
    from torch.nn.functional import binary_cross_entropy_with_logits as loss

    from itercast.capture.opcall import torch_dtype
    from itercast.extras.recommenders.models.tables_dlrm import TablesDlrm

    numbered = dict(enumerate(model.tables))
    sizes = (model.features, model.bottom, len(model.tables), model.dim, model.top)

    def make() -> tuple[object, ...]:
        dtypes = {i: torch_dtype(t.dtype) for i, t in numbered.items()}
        module = TablesDlrm(sizes, {i: t.rows for i, t in numbered.items()}, dtypes)
        lookups = [_lookups(model.batch, t) for t in model.tables]
        inputs = {"dense": zeros(model.batch, model.features), "lookups": lookups}
        return module, inputs, lambda x: loss(x, zeros(x.shape))

    step = capture(make, optimizer=DENSE_OPTIMIZER[model.optimizer])
    return with_index_streams(step, [t.stream for t in model.tables])


def _lookups(batch: int, table: Table) -> tuple[object, ...]:
    """Row numbers, starts of bags, and weights where there are any."""
    from torch import int64, zeros  # as above

    from itercast.capture.opcall import torch_dtype

    count = max(1, round(batch * table.pooling))
    weights = (zeros(count, dtype=torch_dtype(table.dtype)),) if table.weighted else ()
    return zeros(count, dtype=int64), zeros(batch, dtype=int64), *weights


def tables_of(step: StepCapture, model: RankingModel) -> tuple[CapturedTable, ...]:
    """The step's tables, as the file describes them."""
    return tuple(
        replace(captured, lookups=tuple(replace(x, table=table) for x in captured.lookups))
        for captured, table in zip(captured_tables(step), model.tables, strict=True)
    )
