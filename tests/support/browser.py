"""A real browser without a screen: Debian's Chromium, driven by its own driver."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiers import absent

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

#: What keeps a page from measuring itself before it is drawn.
TWO_FRAMES = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()))"


@dataclass
class Browser:
    """Opens pages from files, and knows what they said and requested."""

    chrome: Chrome
    #: Messages of the console, and requests for anything but the page itself.
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, page: bytes, file: Path, *, width: int = 1280, scheme: str = "light") -> None:
        file.write_bytes(page)
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.read_logs()
        self.messages, self.requests = [], []
        self.chrome.get(file.as_uri())
        self.settle()
        self.read_logs(file.as_uri())

    def call(self, method: str, **arguments: Any) -> Any:  # noqa: ANN401 - JSON of the DevTools protocol
        return self.chrome.execute_cdp_cmd(method, arguments)

    def settle(self) -> None:
        self.chrome.execute_async_script(TWO_FRAMES)

    def evaluate(self, script: str) -> Any:  # noqa: ANN401 - whatever the script returns
        return self.chrome.execute_script(f"return {script}")

    def find(self, identity: str) -> WebElement:
        return self.chrome.find_element("id", identity)

    def press(self, identity: str, *keys: str) -> None:
        self.find(identity).send_keys(*keys)
        self.settle()

    def read_logs(self, page: str = "") -> None:
        """Read what the console and the network have noted so far."""
        self.messages += [entry["message"] for entry in self.chrome.get_log("browser")]
        for entry in self.chrome.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                url = event["params"]["request"]["url"]
                self.requests += [] if url in (page, "data:,") else [url]

    def colours(self, canvas: str) -> int:
        """Return how many colours a canvas shows: one if it is empty."""
        return int(
            self.evaluate(
                f"new Set(new Uint32Array(document.getElementById('{canvas}').getContext('2d')"
                f".getImageData(0, 0, 400, 200).data.buffer)).size"
            )
        )

    def is_wider_than_the_screen(self) -> bool:
        return bool(self.evaluate("document.documentElement.scrollWidth > innerWidth"))

    def background(self) -> str:
        return str(self.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Return a browser. Skips where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        absent("needs Debian's Chromium and its driver: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # The superuser's Chromium has no sandbox, and a container little shared memory.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(chrome)
    finally:
        chrome.quit()
