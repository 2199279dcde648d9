"""Trainings are logged to PostgreSQL and to a tracking server as they are to a local file."""

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from servers import answering, free_port
from toy_products import write_products

from itercast.eval.tracking.fits import log_fit
from itercast.extras.ui.command import addresses
from itercast.learners.held_out import save_held_out
from itercast.learners.train import train

POSTGRES = next(
    (
        str(path.parent)
        for path in (
            *(Path(found) for found in [shutil.which("initdb")] if found),
            *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True),
        )
    ),
    "",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of an empty database of a PostgreSQL server, which refuses to run as root."""
    if not POSTGRES:
        pytest.skip("no PostgreSQL here (initdb)")
    folder, port = Path("/tmp") / f"itercast-postgres-{os.getpid()}", free_port()
    folder.mkdir()
    user = None
    if os.geteuid() == 0:
        user = pwd.getpwnam("nobody").pw_name
        shutil.chown(folder, user)
    data, log = str(folder / "data"), str(folder / "log")

    def run(*command: str) -> None:
        done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    server = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    try:
        run(f"{POSTGRES}/initdb", "-D", data, "-U", "itercast", "-A", "trust", "-E", "UTF8")
        run(f"{POSTGRES}/pg_ctl", "-D", data, "-l", log, "-w", "-o", server, "start")
        yield f"postgresql://itercast@127.0.0.1:{port}/postgres"
        run(f"{POSTGRES}/pg_ctl", "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a plain ``mlflow server`` on that database, which keeps artifacts itself."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    address = f"http://127.0.0.1:{port}"
    options = f"--backend-store-uri {postgres} --artifacts-destination {folder} --workers 1"
    command = [sys.executable, "-m", "mlflow", "server", *options.split(), "--port", str(port)]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(command, env={**os.environ, **quiet}, cwd=folder)

    try:
        answering(f"{address}/health")
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A bundle of products, and its scores."""
    root = write_products(tmp_path_factory.mktemp("data"), 60)
    report = train([root], root / "bundle")
    save_held_out(root / "bundle", report.held_out())
    return root / "bundle", report.to_dict()


@pytest.mark.parametrize("store", ["postgres", "server"])
def test_a_training_is_logged_and_its_champion_loaded(
    store: str,
    request: pytest.FixtureRequest,
    bundle: tuple[Path, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice: the second finds the experiment, the training before and the champion."""
    uri = request.getfixturevalue(store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    device = f"toy-{store}"
    for _ in range(2):
        log_fit(bundle[1], device, bundle[0])
    import mlflow

    mlflow.set_tracking_uri(uri)
    runs = mlflow.search_runs(experiment_names=[f"ops/{device}"])
    assert len(runs) == 2 * 5  # the blend, its trees alone, roofline, linear and nearest
    assert list(runs["tags.verdict"].dropna()).count("first") == 1
    model = mlflow.pyfunc.load_model(f"models:/{device}.gemm@champion")
    found = model.predict(pd.DataFrame({"m": [512], "n": [512], "k": [512]}))
    assert found["predicted_us"].iloc[0] > 0
    assert (tmp_path / "mlartifacts").is_dir() == (store == "postgres")  # else the server has them
    if store == "server":
        (line,) = (one for one in addresses(uri) if one.startswith(f"ops/{device}:"))
        assert f"{uri}/#/experiments/" in line and line.endswith("?workflowType=machine_learning")
