"""A page in a headless Chromium, driven over its own protocol (Chrome DevTools)."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time

import aiohttp

from support.browser import chromium

READY_S = 60
KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}


class Page:
    """One page. Its methods are coroutines of the loop that opened it."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = iter(range(1, 10**9))
        self.errors = []
        """What the page's scripts have thrown, and what its policy has refused."""

    async def call(self, method, **parameters):
        """A command of the protocol; returns its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(READY_S):
            while True:
                told = json.loads((await self._socket.receive()).data)
                self._note(told)
                if told.get("id") == number:
                    assert "error" not in told, told
                    return told["result"]

    def _note(self, told):
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(told["params"]["exceptionDetails"])
        if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
            self.errors.append(told["params"]["entry"])

    async def open(self, url, width=1400, height=900, dark=False):
        """Open an address in a window of this size."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call("Page.navigate", url=url)
        await self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def resize(self, width, height):
        """Give the window another size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 620
        )

    async def evaluate(self, script):
        """The value of an expression of JavaScript."""
        done = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    async def wait(self, script, timeout_s=READY_S):
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (found := await self.evaluate(script)):
            assert time.monotonic() < deadline, (script, self.errors, await self.evaluate("document.body.innerText"))
            await asyncio.sleep(0.1)
        return found

    async def press(self, key):
        """Press a key and let it go."""
        text = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)


@contextlib.asynccontextmanager
async def opened_page(folder):
    """A `Page` of a Chromium that keeps its files in a folder."""
    command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-proxy-server"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--remote-allow-origins=*", "about:blank"]
    log = folder.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while not (found := re.search(r"DevTools listening on ws://([^/]+)/", log.read_text())):
            assert time.monotonic() < deadline, log.read_text()
            assert process.poll() is None, log.read_text()
            await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{found[1]}/json") as reply:
                target = next(one for one in await reply.json() if one["type"] == "page")
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=2**28) as socket:
                yield Page(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
