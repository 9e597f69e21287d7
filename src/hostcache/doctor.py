"""Is this machine fit, are the settings possible, does a running server bring anything back? Says why where not.

Asks the machine and a server over HTTP; changes nothing of either beyond the server's cache. Prints nothing itself.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hostcache.copiers.memory import check_quota, read_memory
from hostcache.errors import MemoryRefused, ServerError
from hostcache.settings import Settings
from hostcache.sizes import format_size

Ask = Callable[[str, str, Mapping[str, Any] | None], dict[str, Any]]
"""(method, path, body) → the answer's JSON. Raises ServerError when there is none, or it is an error."""
Say = Callable[[str], None]

START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 120.0
_SMOKE_PAGES = 8

WAYS_OUT: Mapping[str, str] = {
    "evicted": "it was on the host and made room for others; raise host_cache_bytes",
    "not_written": "it left the device before it was written back; raise host_cache_copy_budget_ms, or use "
                   "host_cache_mode on-retain",
    "not_ready": "its copy was still on its way and waiting would have cost more; it is a race, try again",
    "dearer": "restoring was expected to cost more than computing it again, as on a small model with fast prefill",
    "late": "the restore took longer than host_cache_restore_budget_ms; raise it",
    "failed": "the copy back failed; the server's log has the reason",
    "no_room": "no device pages were free to restore into; raise pool_tokens or lower concurrency",
    "identity": "the same tokens are held under another key or model only",
    "opted_out": "the request opted out",
    "too_small": "the prompt is shorter than what is worth keeping",
    "tier_off": "the tier is off or has turned itself off; see host_cache_config in /v1/stats and the server's log",
    "forgotten": "the history of seen pages has overflowed, so the reason cannot be told",
    "new": "the server says that it never saw this prompt; another server may have answered (a router?)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoke:
    """What came back. `why` is empty when something was restored."""

    restored_tokens: int
    possible_tokens: int
    why: str


def machine() -> list[str]:
    """What this machine offers, a line each."""
    memory = read_memory()
    limit = "no cgroup limit" if memory.limit_bytes is None else f"cgroup limit {format_size(memory.limit_bytes)}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = "not installed; pip install 'hostcache[engine]'"
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.metadata.version("torch")
    return [
        f"python   {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"cpus     {usable} usable of {os.cpu_count()}",
        f"memory   {format_size(memory.available_bytes)} available of {format_size(memory.total_bytes)} ({limit}; "
        f"bound by {memory.limited_by})",
        f"torch    {torch}",
    ]


def quota(settings: Settings) -> str | None:
    """None when the host quota can be met here, else the refusal."""
    try:
        check_quota(settings.host_cache_bytes)
    except MemoryRefused as refusal:
        return str(refusal)
    return None


def smoke(ask: Ask, *, seed: int, say: Say) -> Smoke:
    """Fill, evict, return: one conversation, as many others as push it off the device, the same one again."""
    stats = ask("GET", "/v1/stats", None)
    engine = stats.get("engine", {})
    if stats.get("host_cache") is None:
        return Smoke(restored_tokens=0, possible_tokens=0, why="the tier is off on this server (host_cache is null in "
                     "/v1/stats); start it with host_cache_bytes above 0 and a host_cache_mode other than off")
    page = int(engine["page_tokens"])
    pages = min(_SMOKE_PAGES, int(engine["pool_pages"]) // 4, (int(engine["max_context"]) - 2) // page - 1)
    if pages < 1:
        return Smoke(restored_tokens=0, possible_tokens=0, why=f"neither context ({engine['max_context']} tokens) nor "
                     f"pool ({engine['pool_pages']} pages) holds a conversation of one page; raise them")
    rng = random.Random(seed)
    conversation = _prompt(ask, rng, pages * page + 1)
    _send(ask, conversation)
    say(f"fill     a conversation of {len(conversation)} tokens")
    others = int(engine["bank_capacity"]) + 2
    for _ in range(others):
        _send(ask, _prompt(ask, rng, min(2, pages) * page + 1))
    after = ask("GET", "/v1/stats", None).get("engine", {})
    evictions = int(after["device_evictions"]) - int(engine["device_evictions"])
    say(f"evict    {others} other conversations; {evictions} snapshots left the device")
    report = _send(ask, conversation)
    restored, device = int(report.get("host", 0)), int(report.get("device", 0))
    say(f"return   {restored} tokens from host, {device} from device, of {pages * page} possible")
    return Smoke(restored_tokens=restored, possible_tokens=pages * page,
                 why="" if restored else _why(report, device, evictions))


def _why(report: Mapping[str, Any], device: int, evictions: int) -> str:
    if device:
        return (f"{device} tokens were still on the device, so nothing had to be restored ({evictions} snapshots were "
                "evicted meanwhile); other traffic may have changed the order, try again on a quiet server")
    recomputed = {reason: int(tokens) for reason, tokens in dict(report.get("recomputed", {})).items()}
    named = {reason: tokens for reason, tokens in recomputed.items() if reason not in ("new", "partial_page")}
    reason = max(named or recomputed, key=lambda each: recomputed[each], default="new")
    first = report.get("first_miss") or {}
    where = f" (first missing at token {first['position']})" if "position" in first else ""
    return f"{reason}: {WAYS_OUT.get(reason, 'the server gave this reason only')}{where}"


def _prompt(ask: Ask, rng: random.Random, tokens: int) -> list[int]:
    """Token ids of seeded words, exactly `tokens` of them, by the server's own tokenizer."""
    text = " ".join(str(rng.randrange(10**6)) for _ in range(tokens))  # at least one token a word
    ids: list[int] = ask("POST", "/tokenize", {"prompt": text})["tokens"]
    return ids[:tokens]


def _send(ask: Ask, prompt: list[int]) -> dict[str, Any]:
    answer = ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
    report: dict[str, Any] = answer["usage"].get("hostcache") or {}
    return report


def http_ask(url: str, api_key: str | None) -> Ask:
    """Asks the server at `url`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ServerError(f"--url is {url!r}; give for example http://127.0.0.1:8000")
    base = parts.path.rstrip("/").removesuffix("/v1")
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection

    def ask(method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        connection = kind(str(parts.hostname), parts.port, timeout=_ANSWER_TIMEOUT_S)
        try:
            connection.request(method, base + path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{url} does not answer {path} ({error}); is `hostcache serve` running there?") from error
        finally:
            connection.close()
        try:
            value = json.loads(raw)
        except ValueError:
            value = None
        if answer.status != 200 or not isinstance(value, dict):
            told = value.get("error", {}).get("message") if isinstance(value, dict) else None
            raise ServerError(f"{url}{path} answered {answer.status}: {told or 'no JSON object'}; doctor needs a "
                              "hostcache server")
        return value

    return ask


@contextlib.contextmanager
def small_server(settings: Settings) -> Iterator[str]:
    """A server of random:tiny on a free port, with the tier as `settings` has it but small; yields its URL."""
    tier = min(settings.host_cache_bytes, 64 * 1024**2)
    command = [sys.executable, "-m", "hostcache", "serve", "random:tiny", "--host", "127.0.0.1", "--port", "0",
               "--prefix-cache-entries", "4", "--concurrency", "2", "--pool-tokens", str(64 * settings.page_tokens),
               "--page-tokens", str(settings.page_tokens), "--host-cache-bytes", str(tier),
               "--host-cache-mode", settings.host_cache_mode, "--host-cache-verify", "always", "--device", "cpu",
               "--drain-s", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                          text=True) as child:
        watchdog = threading.Timer(START_TIMEOUT_S, child.kill)
        watchdog.start()
        try:
            assert child.stderr is not None
            last: deque[str] = deque(maxlen=1)
            url = None
            for line in child.stderr:
                last.append(line.strip())
                if line.startswith("serving "):
                    url = line.split(" on ")[1].split()[0]
                    break
            watchdog.cancel()
            if url is None:
                raise ServerError(f"the small server did not start: {''.join(last) or 'it said nothing'}")
            # Read on, so that the child never waits for room in the pipe.
            reader = threading.Thread(target=deque, args=(child.stderr, 0), daemon=True)
            reader.start()
            try:
                yield url
            finally:
                child.terminate()
                reader.join(START_TIMEOUT_S)
        finally:
            watchdog.cancel()
            if child.poll() is None:
                try:
                    child.wait(10)
                except subprocess.TimeoutExpired:
                    child.kill()
