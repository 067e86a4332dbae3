"""A headless Chromium on the live server: what an operator does in it, and what it has to say about our pages.

Debian's packages ``chromium`` and ``chromium-driver``. It notes every request that a page made and every line of
its console, where a policy's refusals stand too; ``complaints`` hands both out, and a test ends with none.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from tests.processes import POLL

PROGRAMS = ("chromium", "chromedriver")
# a telephone and a desk
WIDTHS = (390, 1440)
SCHEMES = ("light", "dark")
PATIENCE = 30  # seconds for a page
# colours change gradually
SETTLED = "Promise.all(document.getAnimations().map(one => one.finished)).then(() => arguments[0]())"


def is_missing() -> str:
    """Return which of its programs is not on this machine; '' for none."""
    return " and ".join(name for name in PROGRAMS if shutil.which(name) is None)


class Browser:
    """``with Browser(site, folder) as browser:`` shows pages of ``site``; screenshots go to ``folder``."""

    def __init__(self, site: str, folder: Path) -> None:
        self.site = site
        self.folder = folder
        options = webdriver.ChromeOptions()
        binary, driver = (shutil.which(name) for name in PROGRAMS)
        options.binary_location = str(binary)
        quiet = "headless=new disable-dev-shm-usage disable-gpu disable-quic no-first-run disable-sync"
        still = "disable-background-networking disable-component-update disable-extensions"
        for flag in f"{quiet} {still}".split():
            options.add_argument(f"--{flag}")
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium's sandbox refuses root
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(driver))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.driver.quit()

    def open(self, path: str) -> None:
        self.driver.get(f"{self.site}{path}")

    def log_in(self, name: str, password: str) -> None:
        """Come as somebody else, by the admin's own form."""
        self.driver.delete_all_cookies()
        self.open("/admin/login/?next=/admin/")
        self.find("#id_username").send_keys(name)
        self.find("#id_password").send_keys(password)
        self.click("#login-form [type=submit]")
        assert self.find("#user-tools strong").text.lower() == name

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click what leads to another page, and wait until that is there."""
        self.leave(self.find(selector).click)

    def follow(self, text: str) -> None:
        """Click the link with this text, whatever case the style sheet shows it in."""
        link = self.driver.find_element(By.XPATH, f'//a[normalize-space()="{text}"]')
        self.leave(link.click)

    def press(self, button: str) -> None:
        """Click the button with this label."""
        self.click(f'input[type="submit"][value="{button}"]')

    def leave(self, go: Callable[[], object]) -> None:
        """Do what leads to another page, and wait until that is there."""
        here = self.driver.execute_script("return performance.timeOrigin")
        go()
        # never by an element of the page that goes: now and then Chromium has no name for the error that is
        there = f"return document.readyState == 'complete' && performance.timeOrigin > {here}"
        WebDriverWait(self.driver, PATIENCE, POLL).until(lambda driver: driver.execute_script(there))

    def text(self, selector: str = "#content") -> str:
        """Return what a reader sees there."""
        return self.find(selector).text

    def complaints(self) -> list[str]:
        """Return what the console said and which requests left the site since the last time."""
        console = [line["message"] for line in self.driver.get_log("browser")]
        # which the browser asks for by itself
        console = [line for line in console if "/favicon.ico " not in line]
        return console + [f"left the site: {url}" for url in self._requests() if not self._is_here(url)]

    def _requests(self) -> Iterator[str]:
        for entry in self.driver.get_log("performance"):
            event: dict[str, Any] = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                yield event["params"]["request"]["url"]

    def _is_here(self, url: str) -> bool:
        return url.startswith((f"{self.site}/", "data:"))

    def photograph(self, name: str) -> list[str]:
        """Write the whole page, light and dark, at each width; return where it is wider than the window."""
        too_wide = []
        self.driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        for width in WIDTHS:
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            size = self.driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
            if size["width"] > width:
                too_wide.append(f"{name}: {size['width']} of {width}")
            for scheme in SCHEMES:
                feature = {"name": "prefers-color-scheme", "value": scheme}
                self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
                self.driver.execute_async_script(SETTLED)
                picture = self.driver.execute_cdp_cmd(
                    "Page.captureScreenshot", {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
                )
                path = self.folder / f"{name}-{scheme}-{width}.png"
                path.write_bytes(base64.b64decode(picture["data"]))
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        return too_wide
