"""Logs a fleet: a parent run per plan with its progress, a run per chunk and family below it."""

from __future__ import annotations

from itercast.eval.tracking import store
from itercast.microbench.store import Facts

EXPERIMENT = "fleet"
FACTS = ("host", "gpu_uuid", "gpu_index", "node", "reason")
NUMBERS = ("sm_clock_hz", "power_w", "temperature_c", "drift_us", "anchor_us", "measured_s")


def end_killed(root: str) -> None:
    """End the runs of commands on this root that were killed, as KILLED."""
    client = store.connect()
    place = store.experiment(client, EXPERIMENT, store.note(EXPERIMENT))
    query = f"attributes.status = 'RUNNING' and tags.root = '{root}'"
    for run in client.search_runs([place], query):
        client.set_terminated(run.info.run_id, "KILLED")


class FleetRuns:
    """The MLflow runs of one start of a fleet's plan; ``log_chunk`` logs a chunk that ended."""

    def __init__(self, name: str, root: str, chunks: int, done: int) -> None:
        self.client = store.connect()
        self.place = store.experiment(self.client, EXPERIMENT, store.note(EXPERIMENT))
        self.tags = {"root": root, "mlflow.source.name": "itercast fleet"}
        self.run = self.client.create_run(self.place, tags=self.tags, run_name=name).info.run_id
        self.chunks, self.done, self.rows = chunks, done, 0
        self.results: list[Facts] = []
        self._progress()

    def _progress(self) -> None:
        """The parent's metrics: chunks that are done and left, rows of this start."""
        now = store.now_ms()
        shown = {"chunks_done": self.done, "chunks_left": self.chunks - self.done}
        for name, value in {**shown, "rows": self.rows}.items():
            self.client.log_metric(self.run, name, float(value), now)

    def log_chunk(self, machines: str, kind: str, result: Facts) -> None:
        """Log a chunk of ``kind`` (what it measured) on machines of this name, a run per family."""
        self.results.append(result)
        families = result.get("families") or {kind: 0}
        for family, rows in families.items():
            self._child(machines, kind, family, rows, result)
        if result["state"] == "done":
            self.done += 1
            self.rows += sum(families.values())
        self._progress()

    def _child(self, machines: str, kind: str, family: str, rows: int, result: Facts) -> None:
        """Log the rows of one family in a chunk as a run below the parent's."""
        versions = result.get("versions") or {}
        facts = {"machines": machines, "kind": kind, "family": family, "state": result["state"]}
        facts |= {n: result[n] for n in (*FACTS, "chunk") if result.get(n) not in (None, "")}
        facts |= {n: versions[n] for n in ("driver", "torch", "cuda", "commit") if n in versions}
        tags = {**self.tags, **{k: str(v) for k, v in facts.items()}}
        tags[store.PARENT] = self.run
        begin_ms = round(1000 * result.get("began", store.now_ms() / 1000))
        statuses = result.get("statuses") or {}
        failed = sum(statuses.values()) - statuses.get("ok", 0)
        numbers = {"rows": rows, "chunk_rows_failed": failed}
        numbers |= {n: result[n] for n in NUMBERS if n in result}
        ended = "FINISHED" if result["state"] == "done" else "FAILED"
        name = f"{machines} · {family}"
        store.log_run(self.client, self.place, name, tags, numbers, start_ms=begin_ms, state=ended)

    def end(self, state: str) -> None:
        """End the parent run: FINISHED, FAILED or KILLED; its artifact has all results."""
        self.client.log_dict(self.run, {"chunks": self.results}, "chunks.json")
        self.client.set_terminated(self.run, state)
