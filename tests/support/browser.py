"""A headless Chromium of Debian's that looks at the page of a job."""

from __future__ import annotations

import base64
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_PATIENCE_S = 120.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


def why_not() -> str | None:
    """What is missing for a :class:`Browser`."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return 'selenium is missing: pip install "bamboo_ds[browser]"'
    return None


class Browser:
    """Use it in a ``with`` statement.

    Args:
        profile: a new folder for what it keeps.
    """

    def __init__(self, profile: Path) -> None:
        reason = why_not()
        if reason is not None:
            pytest.skip(reason)
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        for option in (*_OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.binary_location = str(shutil.which("chromium"))
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def size(self, width: int, height: int) -> None:
        """The size of the page's window, in its pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str) -> None:
        """What the user prefers: ``light`` or ``dark``."""
        features = [
            {"name": "prefers-color-scheme", "value": name},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def log_in(self, url: str, token: str) -> None:
        """Open the page by its form."""
        self.driver.get(f"{url}/login")
        self.find("#token").send_keys(token)
        self.find("button").click()
        self.until(
            "the page is drawn", lambda: not self.script("return document.getElementById('main')?.hidden ?? true")
        )

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def click(self, selector: str) -> None:
        """Click on the first element, where nothing covers it."""
        self.script("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        self.find(selector).click()

    def all(self, selector: str) -> list[Any]:
        """All of them."""
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def text(self, selector: str) -> str:
        """What is to be read there."""
        return str(self.script("return document.querySelector(arguments[0]).innerText", selector))

    def script(self, source: str, *arguments: object) -> Any:
        """What a function of this body returns."""
        return self.driver.execute_script(source, *arguments)

    def until(self, what: str, ready: Callable[[], T], seconds: float = _PATIENCE_S) -> T:
        """The first true value of ``ready``."""
        deadline = time.monotonic() + seconds
        while not (found := ready()):
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {what}\n{self.script('return document.body.innerText')}"
            )
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What is red in the console, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def picture(self, path: Path, colours: int = 256) -> None:
        """The window as a PNG of few colours."""
        from PIL import Image

        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
