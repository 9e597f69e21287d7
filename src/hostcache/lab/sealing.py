"""What is promised before a run: the probe, the trace, the bridge and the oracle's figures, under one digest.

A seal holds all that decides what will be sent and how it will be judged; the seed of the bridge's filler is made from
its digest (`prompts_of`), so the tokens that a server got prove that the seal was there before them. Sends nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import islice
from math import isclose
from pathlib import Path
from typing import Any

from hostcache import __version__
from hostcache.clock import unix_time
from hostcache.errors import ConfigError, HostCacheError
from hostcache.folders import write_new
from hostcache.lab.branches import Branch
from hostcache.lab.certificate import canonical, digest, parsed
from hostcache.lab.gap import Model, Modelled
from hostcache.lab.knee import Goal
from hostcache.lab.oracle import cold_miss_floor, maximum, opt_curve
from hostcache.lab.probe import Probe, ProbeArm
from hostcache.lab.prompts import Prompts
from hostcache.lab.replay import Load, as_sent, due_times
from hostcache.lab.stream import Stream, stream_of
from hostcache.workload.bridge import FEWEST_WORDS, Alphabet, Bridge
from hostcache.workload.traces import open_trace

KIND = "hostcache-seal"
VERSION = 1
_KEYS = frozenset({"kind", "version", "by", "sealed_unix_s", "model", "probe", "trace", "bridge", "oracle"})


class SealBroken(HostCacheError):
    """What would run is not what was sealed, and which part is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A seal that was read. `body` without its digest."""

    body: Mapping[str, Any]
    sha256: str
    probe: Probe

    @property
    def alphabet(self) -> Alphabet:
        bridge = self.body["bridge"]
        return Alphabet(words=tuple(bridge["words"]), ids=tuple(bridge["ids"]))

    @property
    def model(self) -> str | None:
        source = self.body["model"]
        return None if source is None else str(source)


def slice_of(trace: Path, probe: Probe, requests: int | None = None) -> Stream:
    """The first requests of the trace, in the probe's blocks, as they are sent."""
    return as_sent(stream_of(open_trace(trace), limit=requests or probe.requests, block_tokens=probe.block_tokens))


def modelled(probe: Probe, arm: ProbeArm | None = None, engine: str = "") -> Modelled:
    """The engine of an arm: with what its tier holds besides. `engine`: its name as a scrape has it."""
    return Modelled(block_tokens=probe.engine_block_tokens, touch=probe.touch, max_tokens=probe.max_tokens,
                    whole_prompts=engine == "hostcache",
                    capacity_tokens=probe.capacity_tokens + (0 if arm is None else arm.host_tokens))


def oracle_part(probe: Probe, trace: Path) -> dict[str, Any]:
    """What is known of the stream before anything runs. Rates in tokens of the prompts, but `max_hit_rate`'s others."""
    stream = slice_of(trace, probe)
    model = Model(stream, modelled(probe))
    prompt = int(stream.input_tokens.sum())
    optimum = opt_curve(model.view).hits(probe.capacity_tokens // probe.engine_block_tokens)
    arms = {}
    for arm in probe.arms:
        part = stream if arm.requests in (None, probe.requests) else slice_of(trace, probe, arm.requests)
        tokens = 0 if arm.control else int(Model(part, modelled(probe, arm)).lru().sum())
        arms[arm.name] = {"requests": part.requests, "prompt_tokens": int(part.input_tokens.sum()),
                          "model_tokens": tokens, "capacity_tokens": modelled(probe, arm).capacity_tokens}
    return {
        "references": stream.references, "distinct": stream.distinct, "prompt_tokens": prompt,
        "longest_prompt_tokens": int(stream.input_tokens.max()), "max_hit_rate": asdict(maximum(stream)),
        "cold_miss_floor": cold_miss_floor(stream), "bound": maximum(stream).tokens,
        "possible": int(model.possible.sum()) / prompt, "lru": int(model.lru().sum()) / prompt,
        "optimum": min(optimum * probe.engine_block_tokens / prompt, int(model.possible.sum()) / prompt), "arms": arms,
    }


def trace_part(probe: Probe, trace: Path) -> dict[str, Any]:
    """The canonical digest is of the requests as they are in the trace, in its own blocks."""
    return {"digest": stream_of(open_trace(trace), limit=probe.requests).digest, "requests": probe.requests,
            "name": trace.name}


def seal(probe: Probe, trace: Path, alphabet: Alphabet, *, model: str | None,
         now: Callable[[], float] = unix_time) -> dict[str, Any]:
    """The document. Raises ConfigError where the trace is not the one that the probe names."""
    of_trace = trace_part(probe, trace)
    if probe.trace_digest not in (None, of_trace["digest"]):
        raise ConfigError(f"the probe is for a trace of digest {probe.trace_digest}, the first {probe.requests} "
                          f"requests of {trace.name} have {of_trace['digest']}")
    if model is None and any("{model}" in word for arm in probe.arms for word in arm.start):
        raise ConfigError("the probe starts servers of a {model}; say which with --model")
    if any(load.rate_factor is not None for load in probe.loads):
        due_times(list(islice(open_trace(trace), probe.requests)), 1.0)  # refuses a trace that does not say when
    body = {
        "kind": KIND, "version": VERSION, "by": __version__, "sealed_unix_s": round(now(), 3), "model": model,
        "probe": json.loads(canonical(probe.as_json())), "trace": of_trace,
        "bridge": bridge_part(probe, alphabet, slice_of(trace, probe).block_tokens),
        "oracle": oracle_part(probe, trace),
    }
    return {**body, "sha256": digest(body)}


def bridge_part(probe: Probe, alphabet: Alphabet, block_tokens: int) -> dict[str, Any]:
    """Raises BridgeRefused for blocks that are too short to hold an id."""
    bridge = Bridge(alphabet=alphabet, block_tokens=block_tokens, seed=b"")
    return {"send": probe.send, "block_tokens": bridge.block_tokens, "digits": bridge.digits,
            "engine_block_tokens": probe.engine_block_tokens, "alphabet": alphabet.digest,
            "words": list(alphabet.words), "ids": list(alphabet.ids)}


def write_seal(path: Path, document: Mapping[str, Any]) -> None:
    """A new file. Raises ConfigError where there is one: a seal is never replaced."""
    try:
        write_new(path, canonical(document) + b"\n")
    except FileExistsError:
        raise ConfigError(f"{path} exists; a seal is never replaced: give another --out, or remove it yourself"
                          ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --out") from None


def sealed_of(document: Any, where: str) -> Sealed:
    """Raises SealBroken where it is no seal, or not what its digest says."""
    if not isinstance(document, dict) or document.get("kind") != KIND or document.get("version") != VERSION:
        raise SealBroken(f"{where} is no seal of a probe that this version knows; make one with "
                         "`hostcache lab probe seal`")
    body = {name: value for name, value in document.items() if name != "sha256"}
    if digest(body) != document.get("sha256"):
        raise SealBroken(f"{where}: its content has the digest {digest(body)[:16]}…, it was sealed with "
                         f"{str(document.get('sha256'))[:16]}…: something in it was changed")
    if differing := sorted(_KEYS ^ body.keys()):
        raise SealBroken(f"{where}: {differing[0]} {'is missing' if differing[0] in _KEYS else 'is no part of it'}; "
                         "seal it with this version")
    sealed = Sealed(body=body, sha256=str(document["sha256"]), probe=probe_from_json(body["probe"]))
    words, ids = body["bridge"].get("words"), body["bridge"].get("ids")
    if not (isinstance(words, list) and isinstance(ids, list) and len(words) == len(ids) >= FEWEST_WORDS
            and len(set(map(str, words))) == len(set(map(str, ids))) == len(words)
            and all(type(word) is str for word in words) and all(type(each) is int for each in ids)):
        raise SealBroken(f"{where}: the bridge has no alphabet of {FEWEST_WORDS} words and their tokens, each once; "
                         "seal it with this version")
    return sealed


def read_seal(path: Path) -> Sealed:
    """Raises SealBroken."""
    try:
        document = parsed(path.read_bytes())
    except OSError as error:
        raise SealBroken(f"{path} cannot be read: {error.strerror}; make it with `hostcache lab probe seal`") from None
    except ValueError:
        raise SealBroken(f"{path} is no JSON; a byte of it was lost or changed") from None
    return sealed_of(document, path.name)


def check_probe(sealed: Sealed, probe: Probe) -> None:
    """The file is still what was sealed. Raises SealBroken naming the first key that is not."""
    now, then = json.loads(canonical(probe.as_json())), sealed.body["probe"]
    if now != then:
        where, was, is_now = _difference(then, now)
        raise SealBroken(f"the probe was edited after it was sealed: {where} was {_short(was)} and is "
                         f"{_short(is_now)}; seal it anew, under a new name")


def _difference(then: Any, now: Any) -> tuple[str, Any, Any]:
    """Where two that are not equal differ first (`arms.device.start.4`), and what is there; arms and branches go by
    their names."""
    def members(value: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        names = [each["name"] if isinstance(each, dict) and "name" in each else str(place)
                 for place, each in enumerate(value)]
        return dict(zip(names, value, strict=True))

    if type(then) is not type(now) or not isinstance(then, (dict, list)):
        return "", then, now
    old, new = members(then), members(now)
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new or old[name] != new[name]:
            where, was, is_now = _difference(old.get(name), new.get(name))
            return f"{name}.{where}".rstrip("."), was, is_now
    return "", list(old), list(new)  # the same ones in another order


def check_trace(sealed: Sealed, trace: Path) -> None:
    """It is the sealed trace, and the oracle's figures and the bridge's sizes are the sealed ones. Raises SealBroken.

    A trace's name is no part of it, nor is what follows the slice.
    """
    now, then = trace_part(sealed.probe, trace), sealed.body["trace"]
    if now["digest"] != then["digest"]:
        raise SealBroken(f"trace: the first {sealed.probe.requests} requests of {trace.name} have the digest "
                         f"{now['digest'][:16]}…, sealed was {str(then['digest'])[:16]}…")
    bridge = bridge_part(sealed.probe, sealed.alphabet, slice_of(trace, sealed.probe).block_tokens)
    for part, made in (("trace", {**now, "name": then["name"]}), ("oracle", oracle_part(sealed.probe, trace)),
                       ("bridge", bridge)):
        told, figures = sealed.body[part], json.loads(canonical(made))
        if changed := sorted(name for name in figures.keys() | told.keys()
                             if not same(told.get(name), figures.get(name))):
            raise SealBroken(f"{part}: {changed[0]} is {_short(figures.get(changed[0]))} here, sealed was "
                             f"{_short(told.get(changed[0]))}")


def same(a: Any, b: Any) -> bool:
    """Equal JSON; floats to their last bits, in which sums may differ between machines."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, (int, float)) and isinstance(b, (int, float)) and isclose(a, b, rel_tol=1e-12,
                                                                                       abs_tol=1e-15)
    return type(a) is type(b) and bool(a == b)


def prompts_of(sealed: Sealed, *, attempt: int, pair: int, point: int, arm: ProbeArm) -> Prompts:
    """The prompts of one run: the filler's seed is of the seal's digest and of which run it is, so no two runs share a
    prompt, on whatever server they go."""
    seed = sha256(canonical(["hostcache-probe-1", sealed.sha256, attempt, pair, point, arm.name])).digest()
    bridge = Bridge(alphabet=sealed.alphabet, block_tokens=sealed.body["bridge"]["block_tokens"], seed=seed)
    return Prompts(bridge=bridge, fresh=arm.fresh)


def probe_from_json(given: Mapping[str, Any]) -> Probe:
    """Back from `Probe.as_json`. Raises SealBroken for what is no probe."""
    try:
        return Probe(**{
            **given, "loads": tuple(Load(**each) for each in given["loads"]),
            "goal": None if given["goal"] is None else Goal(**given["goal"]),
            "arms": tuple(ProbeArm(**{**each, "start": tuple(each["start"])}) for each in given["arms"]),
            "branches": tuple(Branch(**each) for each in given["branches"]),
            **{name: tuple(given[name]) for name in ("does_not_prove", "prior_art", "retracts")}})
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise SealBroken(f"the sealed probe cannot be read ({error}); seal it with this version") from error


def _short(value: Any) -> str:
    text = canonical(value).decode()
    return text if len(text) <= 70 else f"{text[:67]}..."
