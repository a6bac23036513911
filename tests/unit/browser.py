"""A headless Chromium over its DevTools protocol: enough to load a page, ask it things, press keys and take a picture."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ABSENT = "no Chromium on this machine: apt-get install chromium"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=ABSENT)
START_S = 240.0
"""For the browser's first start on a busy machine."""


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Exceptions of scripts, errors on the console and what the content security policy stopped."""
        self.requested: list[str] = []
        """Every URL the page asked for."""

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._note(event["method"], event["params"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        reply = await answer
        assert "error" not in reply, (method, reply)
        return dict(reply["result"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def ask(self, expression: str) -> Any:
        """The value of a script expression; a promise is waited for."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, (expression, reply)
        return reply["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression holds; the test's own limit ends a wait in vain."""
        while not await self.ask(f"Boolean({condition})"):
            await asyncio.sleep(0.02)

    async def text(self, selector: str = "body") -> str:
        return str(await self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        await self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text="\r" if key == "Enter" else "", **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def look(self, *, width: int, height: int, scheme: str) -> None:
        """As on a screen of that many CSS pixels, in `light` or `dark`."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG, its height included."""
        picture = await self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        raw = base64.b64decode(picture["data"])
        path.write_bytes(raw)
        return raw

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab, and nothing of the network but this machine."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--disable-gpu", "--no-first-run"]
    options += ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars"]
    environment = os.environ | {"HOME": str(profile)}
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *options, "about:blank", env=environment, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(START_S):
            port = await _port(profile)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                tabs = [tab for tab in await reply.json() if tab["type"] == "page"]
            async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{domain}.enable")
                yield page
                listening.cancel()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _port(profile: Path) -> int:
    """Where it listens, which it writes down once it does."""
    path = profile / "DevToolsActivePort"
    while not path.exists() or not path.read_text().strip():
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])
