"""The real server as a process of its own, over real sockets: README's examples, a flood, a killed client, SIGTERM.

Needs torch. A failure here means that a user meets it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def complete(self, **body: Any) -> tuple[int, Any, Any]:
        """(status, headers, body)"""
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.headers, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.headers, json.load(refusal)

    def at_rest(self, aborted: int = 0) -> dict[str, Any]:
        """The record once nothing runs any more and at least so many requests were aborted. Fails after a while."""
        waiter = threading.Event()
        for _ in range(300):
            stats: dict[str, Any] = self.get("/v1/stats")
            engine = stats["engine"]
            running = engine["active_requests"] + engine["waiting_requests"]
            if not running and engine["requests_aborted"] >= aborted:
                return stats
            waiter.wait(0.1)
        raise AssertionError(f"the server never came to rest: {stats['engine']}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    process = subprocess.Popen(
        [sys.executable, "-m", "hostcache", "serve", "random:tiny", "--port", str(port), "--pool-tokens", "2048",
         "--host-cache-bytes", "64MiB", "--front-door-wait-s", "2", "--page-tokens", "16"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:  # ends with the process, should it not come up
        if line.startswith(b"serving "):
            break
    drain = threading.Thread(target=process.stderr.read, daemon=True)
    drain.start()
    yield Server(f"http://127.0.0.1:{port}", process)
    if process.poll() is None:
        process.terminate()
        process.wait(30)
    drain.join(10)
    process.stderr.close()


def examples(language: str) -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return [block for block in blocks if "127.0.0.1:8000" in block]


def here(example: str, server: Server) -> str:
    return example.replace("http://127.0.0.1:8000", server.url).replace("smollm2", "random:tiny")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_examples_of_the_readme_work_as_printed(server: Server) -> None:
    ran = 0
    for block in examples("sh"):
        done = subprocess.run(["bash", "-ec", here(block, server)], capture_output=True, text=True, timeout=60,
                              check=True)
        answers = [json.loads(part) for part in re.sub(r"\}\s*\{\"version\"", '}\0{"version"', done.stdout).split("\0")]
        assert answers[0]["choices"][0]["message"]["role"] == "assistant"
        assert answers[1]["accounting"]["requests"] >= 1
        ran += 1
    assert ran == 1


def test_the_client_example_of_the_readme_works_as_printed(server: Server) -> None:
    (block,) = examples("python")
    done = subprocess.run([sys.executable, "-c", here(block, server)], capture_output=True, text=True, timeout=60,
                          check=True)
    assert "prompt tokens" in done.stdout.splitlines()[-1]


def test_conversations_beyond_the_pool_come_back_from_the_host_the_same(server: Server) -> None:
    prompts = [[(7 * name + i) % 250 for i in range(300)] for name in range(12)]
    ask = {"model": "random:tiny", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = [[server.complete(prompt=prompt, **ask)[2] for prompt in prompts] for _ in range(2)]
    for first, again in zip(*answers, strict=True):
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    restored = sum(again["usage"]["hostcache"]["host"] for again in answers[1])
    assert restored > 0
    for usage in (answer["usage"] for half in answers for answer in half):
        report = usage["hostcache"]
        assert report["device"] + report["host"] + sum(report["recomputed"].values()) == usage["prompt_tokens"]


def test_200_requests_against_16_slots_are_served_or_sent_away_and_nothing_is_missing_after(server: Server) -> None:
    def ask(number: int) -> tuple[int, str | None]:
        status, headers, _ = server.complete(model="random:tiny", prompt=[number % 250] * 200, max_tokens=24,
                                             ignore_eos=True)
        return status, headers["Retry-After"]

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    codes = Counter(status for status, _ in answers)
    assert set(codes) <= {200, 429}, codes
    assert codes[200] >= 16
    assert all(int(retry or "0") >= 1 for status, retry in answers if status == 429)
    stats = server.at_rest()
    assert (stats["engine"]["slots_used"], stats["front_door"]["running"], stats["front_door"]["waiting"]) == (0, 0, 0)
    assert (stats["host_cache"]["live_pins"], stats["host_cache"]["live_reservations"]) == (0, 0)
    assert stats["engine"]["quarantined_pages"] == 0


def test_a_killed_client_in_mid_stream_costs_its_own_answer_only(server: Server) -> None:
    before = server.at_rest()["engine"]["requests_aborted"]
    body = json.dumps({"model": "random:tiny", "prompt": [5] * 100, "max_tokens": 1000, "ignore_eos": True,
                       "stream": True})
    script = ("import sys, urllib.request as u\n"
              f"r = u.Request('{server.url}/v1/completions', sys.argv[1].encode())\n"
              "r.add_header('Content-Type', 'application/json')\n"
              "print(u.urlopen(r).readline(), flush=True)\nsys.stdin.read()")
    client = subprocess.Popen([sys.executable, "-c", script, body], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"b'data: ")
        client.kill()
    stats = server.at_rest(aborted=before + 1)
    assert stats["engine"]["requests_aborted"] == before + 1
    assert stats["host_cache"]["live_pins"] == 0
    assert server.complete(model="random:tiny", prompt=[5] * 100, max_tokens=2)[0] == 200


def test_sigterm_ends_it_with_0(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
