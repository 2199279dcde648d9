"""Roots at URLs: a real S3 server (moto's, a process), one that fails between, a web server."""

import http.server
import json
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
from servers import free_port
from typed_commands import typed
from typer.testing import CliRunner

from itercast.capture.base.yaml_text import load_yaml
from itercast.command_line import app
from itercast.extras.campaign.archive import pack, unpack
from itercast.extras.roots import urls
from itercast.extras.roots.urls import Root, fetched, fetched_file, send_cards, sent, written
from itercast.microbench import store

DATASETS = Path(__file__).parents[3] / "datasets"
pytest.importorskip("s3fs", reason="pip install 'itercast[fleet]'")
pytest.importorskip("moto.server", reason="pip install 'moto[server]'")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of an S3 server: moto's, in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield address
        process.kill()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of a root in an empty bucket; credentials and address are in the environment."""
    credentials = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    places = {"AWS_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**credentials, **places, "ITERCAST_CACHE": str(tmp_path / "c")}.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    name = f"b{time.monotonic_ns()}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}/rows"


def root_of(folder: Path, run: str, *keys: str) -> Path:
    """A root with one part of such rows."""
    row = {"family": "gemm", "gpu": "toy", "status": "ok", "host": run}
    journal = store.Journal(folder, run)
    journal.append([{**row, "key": key} for key in keys])
    journal.close()
    store.compact(folder, {"what": "test", "hardware": {"name": "toy"}})
    return folder


def keys(root: Path) -> list[str]:
    return sorted(store.read_rows([root], "gemm")["key"])


def test_parts_of_two_machines_meet_at_a_url(bucket: str, tmp_path: Path) -> None:
    assert sent(root_of(tmp_path / "a", "one", "a", "b"), bucket) == 1
    assert sent(root_of(tmp_path / "b", "two", "c"), bucket) == 1
    assert sent(tmp_path / "a", bucket) == 0  # there already
    copy = fetched(bucket)
    assert keys(copy) == ["a", "b", "c"]
    remote = Root(bucket).get("gemm/toy/itercast/card.yaml").decode()
    assert "host: one" in remote and "host: two" in remote and "ok: 3" in remote
    Root(bucket).fs.rm(f"{Root(bucket).base}/gemm/toy/itercast/card.yaml")
    send_cards(bucket, {"gemm/toy/itercast"})  # from the parts
    assert Root(bucket).get("gemm/toy/itercast/card.yaml").decode() == remote


@pytest.fixture
def faulty(
    bucket: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The same bucket behind a process that spoils each request once; the log of that process."""
    import s3fs

    port, log = free_port(), tmp_path / "faults"
    command = [sys.executable, str(Path(__file__).with_name("faulty_store.py"))]
    with subprocess.Popen([*command, str(port), server, str(log)]) as process:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 1)  # so that late is too late
        monkeypatch.setattr(urls, "FIRST_WAIT_S", 0.1)
        s3fs.S3FileSystem.clear_instance_cache()
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield log
        process.kill()


@pytest.mark.slow
def test_a_store_with_faults_loses_no_row(
    faulty: Path,
    bucket: str,
    server: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three machines send a part each: all rows are there, and each fault is one line."""
    for name in "abc":
        assert sent(root_of(tmp_path / name, name, f"{name}1", f"{name}2"), bucket) == 1
    assert keys(fetched(bucket)) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    told = [r.getMessage() for r in caplog.records if "; again in" in r.getMessage()]
    faults = faulty.read_text().splitlines()
    assert {f.split()[0] for f in faults} == {"refused", "cut", "late", "torn"}
    assert len(told) == len(faults) and not any("\n" in line for line in told), (told, faults)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)  # what the store has, without the faults
    Root(bucket).fs.clear_instance_cache()
    for name in "abc":
        part = next((tmp_path / name).glob("*/*/*/part-*"))
        assert Root(bucket).get(part.relative_to(tmp_path / name).as_posix()) == part.read_bytes()


def test_a_command_writes_a_url_and_another_reads_it(bucket: str, tmp_path: Path) -> None:
    """Two rows of an nccl-tests log are imported to the bucket; training says they are too few."""
    log = tmp_path / "all_reduce.log"
    log.write_text(
        "# nThread 1 nGpus 2 minBytes 1048576 maxBytes 2097152 step: 2(factor)"
        " warmup iters: 5 iters: 20\n"
        "#  Rank  0 Group  0 Pid 1 on node device  0 [0x07] NVIDIA H100 80GB HBM3\n"
        "#  Rank  1 Group  0 Pid 2 on node device  1 [0x0f] NVIDIA H100 80GB HBM3\n"
        "#       size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
        "     1048576 262144 float sum -1 30.0 34.95 34.95 0 30.0 34.95 34.95 0\n"
        "     2097152 524288 float sum -1 40.0 52.43 52.43 0 40.0 52.43 52.43 0\n"
    )
    done = typed("import", "nccl-tests", str(log), "--out", bucket)
    assert bucket in done.output
    rows = store.read_rows([fetched(bucket)], "collective")
    assert len(rows) and set(rows["gpu"]) == {"h100-sxm-80gb"}
    done = typed("train", "--data", bucket, "--out", str(tmp_path / "bundle"), rc=2)
    assert "rows" in done.output


def test_rows_at_a_url_are_judged(bucket: str, tmp_path: Path) -> None:
    """`check --measured`: rows that the shipped bundle was trained on fit it."""
    shutil.copytree(DATASETS / "norm", tmp_path / "norm")
    assert sent(tmp_path, bucket) > 0
    done = CliRunner().invoke(app, ["check", "--json", "--measured", bucket])
    assert json.loads(done.stdout)["fits"]


def test_a_card_states_at_a_url_what_its_parts_do_not(bucket: str, tmp_path: Path) -> None:
    """Parts of before they kept facts: the hardware stands in the card alone."""
    rows = pd.DataFrame([{"key": "a", "status": "ok"}])
    part = store.write_part(tmp_path / "a", "gemm", "toy", rows, "one", facts={})
    store.write_card(part.parent, {"hardware": {"name": "toy"}})
    assert sent(tmp_path / "a", bucket) == 1
    card = load_yaml((fetched(bucket) / "gemm/toy/itercast/card.yaml").read_text())
    assert card["hardware"] == {"name": "toy"} and card["rows"] == {"ok": 1}


def test_a_root_that_is_written_keeps_what_could_not_be_sent(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first command ends without a network; the next one sends what it left."""

    def unreachable(*_: object) -> None:
        raise OSError("network")

    with monkeypatch.context() as without:
        with pytest.raises(OSError, match="network"), written(bucket) as folder:
            root_of(folder, "one", "a")
            without.setattr(Root, "put", unreachable)
        assert not Root(bucket).names("gemm")
    with written(bucket):
        pass
    assert keys(fetched(bucket)) == ["a"]


def test_an_archive_in_pieces_is_fetched(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("itercast.extras.campaign.archive.LARGEST_BYTES", 800)
    monkeypatch.setattr("itercast.extras.campaign.archive.PIECE_BYTES", 700)
    for piece in pack(root_of(tmp_path / "a", "one", "a"), tmp_path / "box.tar.gz"):
        Root(bucket).put(piece.name, piece.read_bytes())
    unpack(fetched_file(f"{bucket}/box.tar.gz"), tmp_path / "home")
    assert keys(tmp_path / "home") == ["a"]


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("s3://no-such-bucket/rows", "bucket does not exist"),
        ("http://127.0.0.1:9/rows", "cannot be written"),
    ],
)
@pytest.mark.parametrize("name", ["collect", "fleet"])
def test_a_store_that_refuses_is_one_line(
    bucket: str, where: str, told: str, name: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"root: {where}\nmachines: {{a: {{gpu: cpu, minutes: 1}}}}")
    command = ["collect", "--family", "gemm", "--budget", "2s", "--out", where]
    done = typed(*["fleet", str(plan)] if name == "fleet" else command, rc=2)
    assert told in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1 and "testing" not in done.output


def test_wrong_credentials_of_a_fleet_are_one_line(
    bucket: str, server: str, tmp_path: Path
) -> None:
    """A server that knows no keys: nothing is started, and no key is printed."""
    (tmp_path / "plan.yaml").write_text(
        f"root: {bucket}/rows\nmachines: {{one: {{gpu: cpu, minutes: 1, families: [norm]}}}}"
    )

    def asked_after(requests: bytes) -> None:
        url, kind = f"{server}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(url, requests, kind)).close()

    asked_after(b"0")
    keys = {"AWS_ACCESS_KEY_ID": "wrongkey", "AWS_SECRET_ACCESS_KEY": "wrongsecret"}
    env = {**keys, "ITERCAST_CACHE": str(tmp_path / "cache")}
    done = CliRunner().invoke(app, ["fleet", str(tmp_path / "plan.yaml")], env=env)
    asked_after(b"inf")
    assert done.exit_code == 2 and "cannot be written" in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1 and "wrong" not in done.output
    assert not (tmp_path / "cache").exists()


def test_a_web_server_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ITERCAST_CACHE", str(tmp_path / "c"))
    root_of(tmp_path / "a", "one", "a")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "a"))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        where = f"http://127.0.0.1:{web.server_address[1]}"
        assert keys(fetched(where)) == ["a"]
        with pytest.raises(ValueError, match="http is read-only"):
            sent(tmp_path / "a", where) or Root(where).put("x", b"")
        web.shutdown()


def test_paths_out_of_a_root_are_not_fetched() -> None:
    for name in ("../x.parquet", "a/b/c/d/part-x.parquet", "gemm/../x/part-1.parquet", "a.pkl"):
        assert not urls.OF_ROOT.fullmatch(name), name
    assert os.sep == "/"
