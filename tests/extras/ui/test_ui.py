"""The MLflow UI in a real browser, as ``make ui`` starts it: what is seen without a click."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import requests, serious_findings, shown_as
from report_facts import RESULTS
from servers import answering, free_port, until

from itercast.eval.results import logged_groups
from itercast.eval.tracking import store
from itercast.eval.tracking.logs import log_evaluation

PRICES = {"prices": "yes", "coverage_pct": "33", "champion_version": "1", "champion_pct": "4.3"}
PRICES |= {"verdict": "no difference beyond the noise", "champion_reason": "of 99 rows"}
LEARNERS = {"blend": 4.2, "nearest": 9.9, "roofline": 40.0}

pytestmark = pytest.mark.slow


def heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


Server = tuple[subprocess.Popen[bytes], str]


@pytest.fixture(scope="module")
def server(empty_mlflow_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``itercast ui`` on a store with two families and three learners, and its address."""
    folder = tmp_path_factory.mktemp("ui")
    (folder / "mlflow.db").write_bytes(empty_mlflow_store.read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        fill()
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "MLFLOW_TRACKING_URI"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "itercast", "ui", "--port", str(port)]
    server = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        preexec_fn=heed_interrupts,  # tests that a shell started in the background ignore them
    )
    try:
        answering(f"http://127.0.0.1:{port}/health")
        yield server, f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def address(server: Server) -> str:
    return server[1]


def fill() -> None:
    """Log two families and three learners as a training does, and an older training of one."""
    from mlflow.entities import Metric

    client = store.connect()
    facts = {"bundle": "bundles/b", "data": "d", "digest": "0123", "stack": "torch"}
    facts |= {"learner": "blend", "source": "itercast evaluate"}
    groups = logged_groups(RESULTS, {("toy", "DDP"): "all of them too short"})
    (folder := Path("report")).mkdir()
    (folder / "report.html").write_text("a page")
    log_evaluation("demo", groups, facts, {}, folder, store.now_ms())
    place = store.experiment(
        client, "ops/toy", store.note("ops", device="toy", training="t", iterations="1")
    )
    for family, newest in (("norm", False), ("norm", True), ("gemm", True)):
        for rank, (name, error) in enumerate(LEARNERS.items(), start=1):
            tags = {"family": family, "learner": name, "training": "t"}
            tags |= {"newest": "yes"} if newest else {}
            tags |= PRICES if name == "blend" else {}
            now = store.now_ms()
            run = client.create_run(place, now, tags, run_name=f"{family} · {name}")
            shown = {"rank": rank, "median_ape_pct": error, "p90_ape_pct": 2 * error, "rows": 99}
            shown |= {"shapes": 8 if family == "norm" else 40}
            metrics = [Metric(key, float(value), now, 0) for key, value in shown.items()]
            client.log_batch(run.info.run_id, metrics=metrics)
            client.set_terminated(run.info.run_id)


def shown(driver: Any, url: str, *words: str) -> str:
    """Open an address and return the page's text once it has these words."""
    driver.get(url)

    def text() -> str:
        return str(driver.execute_script("return document.body.innerText"))

    until(lambda: all(word in text() for word in words), text)
    return text()


def test_the_start_page_answers_without_a_click(driver: Any, address: str) -> None:
    """Iterations by kind; a line per family with champion and history; nothing elsewhere."""
    text = shown(driver, address, "gemm", "norm", "nearest 9.9 %")
    assert text.count("norm") == text.count("gemm") == 1
    assert "roofline" not in text  # the third best is not named
    assert text.count("no difference beyond the noise; v1 had 4.3 %") == 2
    assert text.count("8 shapes held out: too few to rank learners (10 needed)") == 1
    for part in ("20.0 %", "off by more than chance", "demo, b"):
        assert part in text
    assert all(url.startswith(address) for url in requests(driver))
    (curve,) = driver.find_elements("css selector", "svg")  # of norm, trained twice
    assert curve.get_attribute("aria-label") == "median errors of 2 trainings in %: 4.2, 4.2"
    red = [found.text for found in driver.find_elements("css selector", "td.bad")]
    assert red == ["0 %", "33 %", "33 %"]  # one DDP case outside; PRICES of both families
    links = driver.find_elements("css selector", "a[href*='mlflow#/']")
    assert all("workflowType=machine_learning" in link.get_attribute("href") for link in links)


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_the_start_page_is_accessible(driver: Any, address: str, width: int, dark: bool) -> None:
    """On a desk and on a phone, where nothing scrolls sideways."""
    shown_as(driver, width=width, dark=dark)
    shown(driver, address, "gemm")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert serious_findings(driver) == []


def test_addresses_of_mlflow_lead_to_its_pages(driver: Any, address: str) -> None:
    shown(
        driver,
        f"{address}#/experiments/2/runs?{store.TRAINING_VIEW}",
        "gemm · blend",
        "norm · nearest",
    )


def test_the_ui_says_where_it_is_and_stops(server: Server) -> None:
    """At Ctrl-C; the last test of this file."""
    process, address = server
    assert process.stdout is not None and address[:-1] in process.stdout.readline().decode()
    process.send_signal(signal.SIGINT)
    until(lambda: process.poll() is not None, lambda: "it goes on")
    assert process.returncode in (0, 128 + signal.SIGINT)
