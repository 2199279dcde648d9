"""A real headless browser for tests, Debian's chromium: its console, its requests, screenshots."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
OWN_HOSTS = {"127.0.0.1", "localhost"}
OF_NETWORKS = {"http", "https", "ws", "wss"}  # others are files, data, and the browser's own pages


@contextmanager
def browser(
    folder: Path, *, width: int = 1280, height: int = 900, dark: bool = False
) -> Iterator[Any]:
    """A browser with a fresh profile in ``folder``; skips the test where there is none.

    A ``width`` of less than 600 is a phone's.
    """
    found = shutil.which("chromium"), shutil.which("chromedriver")
    if not all(found):
        pytest.skip("no chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(found[0])
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(found[1])))
    try:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def console_errors(driver: Any) -> list[str]:
    """Errors on the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def outside_requests(driver: Any) -> list[str]:
    """Addresses on other hosts that the page asked for since the last call."""
    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = urlsplit(message["params"]["request"]["url"])
            if url.scheme in OF_NETWORKS and url.hostname not in OWN_HOSTS:
                found.append(url.geturl())
    return found


def screenshot(driver: Any, path: Path) -> None:
    """Write a PNG of the whole page, also of what is below the window."""
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    asked = {"captureBeyondViewport": True, "clip": clip}
    path.write_bytes(
        base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", asked)["data"])
    )
