"""A real headless browser for tests, Debian's chromium: its console, its requests."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
FLAGS += " disable-component-update disable-sync"
AXE = Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"
OWN_HOSTS = {"127.0.0.1", "localhost"}
OF_NETWORKS = {"http", "https", "ws", "wss"}  # others are files, data, and the browser's own pages


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A browser with a fresh profile in ``folder``; skips the test where there is none."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if not all(found):
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in (*FLAGS.split(), f"user-data-dir={folder}", "window-size=1440,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(found[1])))
    try:
        yield driver
    finally:
        driver.quit()


def shown_as(driver: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
    """The window and its colours; a ``width`` of less than 600 is a phone's."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def serious_findings(driver: Any) -> list[str]:
    """What axe-core finds serious or critical on the open page: rule and element.

    Skips the test where axe-core is not installed.
    """
    if not AXE.is_file():
        pytest.skip("no axe-core: npm install --no-save axe-core")
    driver.execute_script(AXE.read_text())
    asked = "axe.run().then((found) => arguments[0](found.violations))"
    return [
        f"{rule['id']}: {node['html']}"
        for rule in driver.execute_async_script(asked)
        if rule["impact"] in ("serious", "critical")
        for node in rule["nodes"]
    ]


def console_errors(driver: Any) -> list[str]:
    """Errors on the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def requests(driver: Any) -> list[str]:
    """Addresses that pages asked the network for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m for m in messages if m["method"] == "Network.requestWillBeSent"]
    urls = [m["params"]["request"]["url"] for m in sent]
    return [url for url in urls if urlsplit(url).scheme in OF_NETWORKS]


def outside_requests(driver: Any) -> list[str]:
    """Those on other hosts."""
    return [url for url in requests(driver) if urlsplit(url).hostname not in OWN_HOSTS]
