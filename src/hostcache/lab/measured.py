"""Figures of a probe from raw counter lines and records, by exact names; and the faults that would make them untrue.

`run` and `verify` both come through here, so that a verdict never rests on a number that was only stored. Faults:

    counters_missing            a counter that the figures need is in no raw line
    created_taken_for_count     what a scraper took for a count is a `_created` line's clock reading
    counter_misread             what a scraper took for a count is not what its own raw lines say
    counter_reset               a counter went down: the server started again in between
    balance_broken              the engine's own sums do not add up
    records_and_counters_differ what requests were told and what the engine counted are two numbers
    record_field_lost           an answered request without a count that others have, or that the engine counted
    record_impossible           a count of a record is no count, or more came from a cache than there was
    request_failed              a request of a closed load was not answered
    prompt_changed              a request was answered for more or fewer tokens than its prompt has
    control_not_zero            a control arm was served something from a cache
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from hostcache.client.adapters import Engine, scrape_of
from hostcache.client.counters import PROCESS, Scrape, balance, read, resets
from hostcache.client.exposition import read_exposition
from hostcache.errors import ServerError
from hostcache.lab.certificate import parsed
from hostcache.lab.prompts import Planned
from hostcache.lab.replay import Load, Replay
from hostcache.lab.replayed import ProbeVoid, Replayed

NEEDED = ("prompt_tokens", "device_tokens", "host_tokens")
_READ = ("cached_tokens", "recomputed_tokens", "bound_tokens", "preemptions", "vllm:prefix_cache_queries_total",
         "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
"""Of these, too, figures or balances are made where they are there."""
_ALONE = frozenset({"vllm"})
"""Engines that have no `host_tokens` before a connector counts any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What an engine counted between two scrapes, in tokens.

    `queries`: what its prefix cache was asked for; 0 where it is off. `possible`: of the prompts, what it or its tier
    could have held had nothing been forgotten, where the engine says so (hostcache does).
    """

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    queries: int
    possible: int | None
    preemptions: int | None
    checked: tuple[str, ...]
    skipped: tuple[str, ...]

    @property
    def cached_tokens(self) -> int:
        return self.device_tokens + self.host_tokens


def scrape_again(engine: str, raw: Sequence[str]) -> Scrape:
    """The scrape that these raw lines make, read anew by exact name. Raises ProbeVoid for lines that cannot be read."""
    if raw and raw[0].partition(" ")[2].startswith("{"):
        return _of_stats(engine, raw)
    kinds: dict[str, str] = {}
    for line in raw:
        name = line.partition("{")[0].partition(" ")[0]
        if name.endswith("_total"):
            kinds[name] = "counter"
        elif not name.endswith("_created"):
            kinds[name] = "gauge"
    text = "\n".join([*(f"# TYPE {name} {kind}" for name, kind in kinds.items()), *raw, ""])
    try:
        return scrape_of(cast(Engine, engine), read_exposition(text, "text/plain"), 0.0)
    except ServerError as error:
        raise ProbeVoid("counters_missing", f"the raw lines cannot be read: {error}") from error


def _of_stats(engine: str, raw: Sequence[str]) -> Scrape:
    """The sections of /v1/stats, one a line."""
    counters: dict[str, float] = {}
    created: dict[str, float] = {}
    sections: set[str] = set()
    for line in raw:
        section, _, text = line.partition(" ")
        try:
            values = parsed(text.encode())
        except ValueError as error:
            raise ProbeVoid("counters_missing", f"the raw line {line[:60]!r} is no JSON ({error})") from error
        if section in sections:
            raise ProbeVoid("counters_missing", f"two raw lines are of the section {section!r}; which one counts?")
        sections.add(section)
        names = {"accounting": ("prompt_tokens", "device_tokens", "host_tokens", "recomputed_tokens", "bound_tokens",
                                "requests"), "engine": ("preemptions",)}.get(section, ())
        counters.update({name: float(value) for name in names
                         if (value := read({section: values}, section, name)) is not None})
        if (up_s := read({section: values}, "engine", "uptime_s")) is not None:
            created[PROCESS] = -up_s  # a process that ran on is up for longer at every later scrape
    if "device_tokens" in counters and "host_tokens" in counters:
        counters["cached_tokens"] = counters["device_tokens"] + counters["host_tokens"]
    return Scrape(engine=engine, counters=counters, created=created, raw=tuple(raw), at_s=0.0)


def check_reading(scrape: Scrape) -> None:
    """A scraper's counts are what its own raw lines say, by exact name. Raises ProbeVoid."""
    again = scrape_again(scrape.engine, scrape.raw)
    for name in ("prompt_tokens", "cached_tokens", "device_tokens", "host_tokens", "preemptions"):
        took, says = scrape.counters.get(name), again.counters.get(name)
        if took == says or took is None:
            continue
        if took in again.created.values() or took > 1e9:
            raise ProbeVoid("created_taken_for_count", f"{name} was read as {took!r}, which a `_created` line says: "
                            f"the time at which the counter began; the count is {says!r}")
        raise ProbeVoid("counter_misread", f"{name} was read as {took!r}, its raw lines say {says!r}")


def counted(engine: str, opening: Sequence[str], closing: Sequence[str]) -> Counted:
    """Raises ProbeVoid for a counter that is missing, was reset, or contradicts another."""
    before, after = scrape_again(engine, opening), scrape_again(engine, closing)
    needed = [name for name in NEEDED if not (name == "host_tokens" and engine in _ALONE)]
    for name in needed:
        for which, scrape in (("opening", before), ("closing", after)):
            if name not in scrape.counters:
                raise ProbeVoid("counters_missing", f"the {which} scrape of {engine} has no {name}; a figure is never "
                                "made from what was not counted")
    for scrape in (before, after):
        if endless := [name for name, value in scrape.counters.items() if not isfinite(value)]:
            raise ProbeVoid("counter_misread", f"{endless[0]} is {scrape.counters[endless[0]]}, which is no count")
    if gone := [name for name in resets(before, after) if name in (*needed, *_READ)]:
        raise ProbeVoid("counter_reset", f"{gone[0]} went down or began anew between the scrapes: the server started "
                        "again, so nothing can be said")
    sums = balance(before.counters, after.counters)
    if sums.broken:
        raise ProbeVoid("balance_broken", sums.broken[0])

    def moved(name: str) -> int | None:
        if name not in after.counters:
            return None
        return round(after.counters[name] - before.counters.get(name, 0.0))

    prompt = moved("prompt_tokens") or 0
    asked = moved("vllm:prefix_cache_queries_total")
    return Counted(
        prompt_tokens=prompt, device_tokens=moved("device_tokens") or 0, host_tokens=moved("host_tokens") or 0,
        queries=prompt if asked is None else asked, possible=moved("bound_tokens"), preemptions=moved("preemptions"),
        checked=sums.checked, skipped=sums.skipped)


def check_records(records: Sequence[Replayed], totals: Counted) -> None:
    """What the requests were told adds up to what the engine counted. Raises ProbeVoid."""
    answered = [each for each in records if each.outcome == "ok"]
    for each in answered:
        if each.prompt_tokens is None:
            raise ProbeVoid("record_field_lost", f"request {each.index} was answered and has no prompt_tokens "
                            f"({each.reason})")
        if any(count is not None and not (type(count) is int and 0 <= count <= each.prompt_tokens) for count in (
                each.prompt_tokens, each.cached_tokens, each.device_tokens, each.host_tokens)):
            raise ProbeVoid("record_impossible", f"request {each.index} {_told(each)}")
    prompt = sum(each.prompt_tokens or 0 for each in answered)
    if len(answered) < len(records) and prompt <= totals.prompt_tokens:
        return  # what became of the others on the server is not known here
    if prompt != totals.prompt_tokens:
        raise ProbeVoid("records_and_counters_differ", f"the requests had {prompt} prompt tokens, the engine counted "
                        f"{totals.prompt_tokens}; is somebody else using the server?")
    told = [each for each in answered if each.cached_tokens is not None]
    if told and len(told) < len(answered):
        lost = next(each for each in answered if each.cached_tokens is None)
        raise ProbeVoid("record_field_lost", f"request {lost.index} has no cached_tokens, {len(told)} others have")
    if not told and totals.cached_tokens:
        raise ProbeVoid("record_field_lost", f"no request has cached_tokens, and the engine counted "
                        f"{totals.cached_tokens}; vLLM tells them with --enable-prompt-tokens-details")
    cached = sum(each.cached_tokens or 0 for each in told)
    if told and cached != totals.cached_tokens and not totals.preemptions:
        raise ProbeVoid("records_and_counters_differ", f"the requests were told of {cached} cached tokens, the engine "
                        f"counted {totals.cached_tokens}")


def _told(each: Replayed) -> str:
    return (f"of {each.prompt_tokens!r} tokens was told of {each.cached_tokens!r} cached ones, {each.device_tokens!r} "
            f"from the device and {each.host_tokens!r} from the host")


def check_answers(name: str, load: Load, asked: Sequence[Planned], records: Sequence[Replayed],
                  totals: Counted) -> None:
    """Each of an arm's requests was answered, as a closed load needs it, for exactly its prompt, and where it was told
    of device and host both add up, in each and in all. Raises ProbeVoid."""
    answered = [each for each in records if each.outcome == "ok"]
    parted = [(each, each.device_tokens + each.host_tokens) for each in answered
              if each.device_tokens is not None and each.host_tokens is not None]
    for each, parts in parted:
        if each.cached_tokens != parts:
            raise ProbeVoid("record_impossible", f"request {each.index} of {name} {_told(each)}")
    host = sum(each.host_tokens or 0 for each, _ in parted)
    if parted and len(parted) == len(records) and host != totals.host_tokens and not totals.preemptions:
        raise ProbeVoid("records_and_counters_differ", f"the requests of {name} were told of {host} tokens from the "
                        f"host, the engine counted {totals.host_tokens}")
    for request, got in zip(asked, records, strict=True):
        if got.outcome != "ok" and load.rate_factor is None:
            raise ProbeVoid("request_failed", f"request {got.index} of {name}: {got.reason}")
        if got.outcome == "ok" and got.prompt_tokens != request.tokens:
            raise ProbeVoid("prompt_changed", f"request {got.index} of {name} was sent as {request.tokens} tokens, the "
                            f"server read {got.prompt_tokens}; does it put tokens of its own before it?")


def check_control(name: str, totals: Counted, *, fresh: bool) -> str:
    """Raises ProbeVoid unless nothing came from a cache. Returns the reading: 0 of the queries where the cache is off,
    else of what could have come from it, which is nothing when each prompt is new."""
    of = totals.queries
    if of and totals.possible is not None:
        of = totals.possible
    elif fresh:
        of = 0
    if totals.cached_tokens or of:
        raise ProbeVoid("control_not_zero", f"the control arm {name} reads {totals.cached_tokens} of {of}, not 0 of 0; "
                        "the probe is void: turn its prefix caching off, or make it fresh")
    return f"{totals.cached_tokens} of {of}"


def check_replay(outcome: Replay) -> Counted:
    """Everything that can be checked of a replay without a model. Raises ProbeVoid."""
    for scrape in (outcome.opening, outcome.closing):
        check_reading(scrape)
    totals = counted(outcome.opening.engine, outcome.opening.raw, outcome.closing.raw)
    check_records(outcome.requests, totals)
    return totals


def arm_figures(name: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of an arm's runs as they stand in a certificate (`Replay.as_json`). `name_…` → number. Raises ProbeVoid."""
    prompt = device = host = requests = failed = 0
    seconds = 0.0
    for run in runs:
        totals = counted(run["engine"], run["opening"], run["closing"])
        records = [Replayed.from_json(each) for each in run["requests"]]
        check_records(records, totals)
        prompt += totals.prompt_tokens
        device += totals.device_tokens
        host += totals.host_tokens
        requests += len(records)
        failed += sum(each.outcome != "ok" for each in records)
        seconds += max((each.ended_s for each in records), default=0.0)
    return {
        f"{name}_prompt_tokens": prompt, f"{name}_cached_tokens": device + host, f"{name}_device_tokens": device,
        f"{name}_host_tokens": host, f"{name}_hit_rate": (device + host) / prompt if prompt else 0.0,
        f"{name}_device_hit_rate": device / prompt if prompt else 0.0, f"{name}_requests": requests,
        f"{name}_failed": failed, f"{name}_seconds": seconds,
        f"{name}_requests_per_s": requests / seconds if seconds else 0.0,
    }
