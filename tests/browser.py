"""Debian's Chromium without a window, over its DevTools protocol: what a page shows, and how it looks."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip


class Browser:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._sent = socket, 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": parameters}))
        while (answer := json.loads(self._socket.recv(timeout=60))).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return answer.get("result", {})

    def look(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Show pages on a screen of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        return str(self.value("document.body ? document.body.innerText : ''"))

    def text_with(self, *parts: str, seconds: float = 120) -> str:
        """The page's text as soon as all parts are in it, or as it is when time is up."""
        end = time.monotonic() + seconds
        while not all(part in (text := self.text()) for part in parts) and time.monotonic() < end:
            time.sleep(0.2)
        return text

    def shot(self, path: Path, whole: bool = True) -> None:
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(picture))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium with its profile in ``folder``."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        file, end = folder / "DevToolsActivePort", time.monotonic() + 60
        while not file.is_file() or len(file.read_text().split()) < 2:
            assert process.poll() is None, "Chromium ended"
            assert time.monotonic() < end, "Chromium is not ready after a minute"
            time.sleep(0.1)
        port, path = file.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as root:
            targets = Browser(root).call("Target.getTargets")["targetInfos"]
        target = next(found["targetId"] for found in targets if found["type"] == "page")
        with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.terminate()
        process.wait(20)
