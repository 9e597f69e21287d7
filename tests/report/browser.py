"""A headless Chromium spoken to over its debugging pipe: no port, no library, nothing but file descriptors 3 and 4."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")
ANSWER_S = 60.0
"""How long a command may take on a busy machine before the test gives up."""


def find_browser() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. `events`: every event so far, (method, params)."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._last = 0
        self._session = ""
        self.events: list[tuple[str, dict[str, Any]]] = []

    def open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._until(lambda said: said.get("id") == self._last)

    def goto(self, address: str) -> None:
        """Returns when the page has loaded."""
        before = len(self.events)
        self.call("Page.navigate", url=address)
        if not any(method == "Page.loadEventFired" for method, _ in self.events[before:]):
            self._until(lambda said: said.get("method") == "Page.loadEventFired")

    def value(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click of the mouse in the middle of what the selector finds."""
        found = f"document.querySelector({json.dumps(selector)})"
        x, y = self.value(f"(() => {{const box = {found}.getBoundingClientRect();"
                          "return [box.x + box.width / 2, box.y + box.height / 2];})()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self) -> list[str]:
        """Exceptions, console errors and warnings, log entries."""
        found = [json.dumps(params) for method, params in self.events if method == "Runtime.exceptionThrown"]
        found += [json.dumps(params) for method, params in self.events
                  if method == "Runtime.consoleAPICalled" and params.get("type") in ("error", "warning", "assert")]
        return found + [json.dumps(params["entry"]) for method, params in self.events if method == "Log.entryAdded"]

    def requests(self) -> list[str]:
        return [params["request"]["url"] for method, params in self.events if method == "Network.requestWillBeSent"]

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            said = self._read()
            if "method" in said:
                self.events.append((said["method"], said.get("params", {})))
            if wanted(said):
                if "error" in said:
                    raise AssertionError(said["error"])
                answer: dict[str, Any] = said.get("result", {})
                return answer

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_S)
            got = os.read(self._answers, 1 << 16) if ready else b""
            if not got:
                raise AssertionError("the browser does not answer")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        return said


_PUT_PIPES = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD_CLOEXEC, 10) for end in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the ends of the pipes where Chromium looks for them."""


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a page, ended on every way out."""
    command_out, command_in = os.pipe()
    answer_out, answer_in = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PUT_PIPES, str(command_out), str(answer_in), program, "--headless", "--no-sandbox",
         "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-extensions", f"--user-data-dir={profile}", "--window-size=1300,1000",
         "--remote-debugging-pipe", "about:blank"],
        pass_fds=(command_out, answer_in), start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    os.close(command_out)
    os.close(answer_in)
    try:
        page = Browser(command_in, answer_out)
        page.open_page()
        yield page
        os.write(command_in, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
        process.wait(timeout=ANSWER_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(command_in)
        os.close(answer_out)
