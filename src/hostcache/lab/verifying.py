"""Does a certificate hold, with nothing but the trace? Each part is recomputed, and the first that does not hold named.

Offline: no server, no tokenizer, no stored number taken on trust. The seal's digest gives the seed of the bridge, the
seed and the trace give every prompt, and each record says which prompt was sent; raw counter lines and records give the
figures, the figures and the sealed branches give the verdict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hostcache.errors import HostCacheError
from hostcache.lab.certificate import CertificateRefused, canonical, check
from hostcache.lab.judging import Judged, judge
from hostcache.lab.measured import check_records, counted
from hostcache.lab.prompts import Planned
from hostcache.lab.replay import planned
from hostcache.lab.replayed import Replayed
from hostcache.lab.running import parts_of
from hostcache.lab.sealing import Sealed, check_trace, prompts_of, same, sealed_of, slice_of


def verify(document: Any, trace: Path, *, holds: Callable[[str], None] = lambda text: None) -> str:
    """The verdict. `holds` hears of each thing that was shown. Raises CertificateRefused naming the part."""
    parts = check(document)
    holds("every part is what its digest says")
    sealed = _part("seal", lambda: sealed_of(parts["seal"], "the certificate's seal"))
    holds(f"seal {sealed.sha256[:16]}…")
    _part("trace", lambda: check_trace(sealed, trace))
    holds("trace and oracle are the sealed ones")
    runs: Sequence[Mapping[str, Any]] = parts["arms"]
    _part("attempts", lambda: _attempts(sealed, parts["attempts"], runs))
    holds(f"{len(parts['attempts'])} attempts, the last one completed")
    _part("arms", lambda: _arms(sealed, trace, runs))
    holds("every prompt follows from the seal's digest and the trace, and passes the gates")
    judged: Judged = _part("figures", lambda: judge(sealed, trace, runs))
    again = json.loads(canonical(parts_of(sealed, parts["attempts"], runs, judged)))
    for name in sorted(again.keys() | parts.keys()):
        if not same(again.get(name), parts.get(name)):
            raise CertificateRefused(f"part {name!r} does not follow from the others: {_first(again, parts, name)}")
    holds("figures and verdict follow from raw counter lines, records and the sealed branches")
    return judged.verdict


def _part(name: str, what: Callable[[], Any]) -> Any:
    try:
        return what()
    except CertificateRefused:
        raise
    except (HostCacheError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CertificateRefused(f"part {name!r} does not hold: {error}") from error


def _attempts(sealed: Sealed, attempts: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> None:
    if [each["number"] for each in attempts] != list(range(1, len(attempts) + 1)):
        raise CertificateRefused("part 'attempts' does not hold: they are not numbered from 1 on")
    if any(each["seal"] != sealed.sha256 for each in attempts):
        raise CertificateRefused("part 'attempts' does not hold: one is of another seal")
    if [each["outcome"] for each in attempts if each["outcome"] != "failed"] != ["completed"] or (
            attempts[-1]["outcome"] != "completed"):
        raise CertificateRefused("part 'attempts' does not hold: the last one is to be the one that completed")
    if any(run["attempt"] != len(attempts) for run in runs):
        raise CertificateRefused("part 'arms' does not hold: a run is of another attempt than the one that completed")


def _arms(sealed: Sealed, trace: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    probe = sealed.probe
    arms = {arm.name: arm for arm in probe.arms}
    wanted = {(arm.name, pair, point) for arm in probe.arms for pair in range(1 if probe.short(arm) else probe.pairs)
              for point in range(1 if probe.short(arm) else len(probe.loads))}
    if len(runs) != len(wanted) or {(run["arm"], run["pair"], run["point"]) for run in runs} != wanted:
        raise CertificateRefused(f"part 'arms' does not hold: {len(runs)} runs, the probe asks for {len(wanted)}")
    stream = slice_of(trace, probe)
    for run in runs:
        arm = arms[run["arm"]]
        prompts = prompts_of(sealed, attempt=run["attempt"], pair=run["pair"], point=run["point"], arm=arm)
        asked = planned(stream, requests=arm.requests)
        prompts.gates(asked, engine_block_tokens=probe.engine_block_tokens)
        if run["load"] != json.loads(canonical(probe.loads[run["point"]].as_json())):
            raise CertificateRefused(f"part 'arms' does not hold: the load of {arm.name} is not the sealed one")
        records = [Replayed.from_json(each) for each in run["requests"]]
        check_records(records, counted(run["engine"], run["opening"], run["closing"]))
        if [each.index for each in records] != [each.index for each in asked]:
            raise CertificateRefused(f"part 'arms' does not hold: the requests of {arm.name} are not the trace's")
        for request, record in zip(asked, records, strict=True):
            _sent(request, record, prompts.digest(request), arm.name)


def _sent(request: Planned, record: Replayed, wanted: str, arm: str) -> None:
    if record.prompt_sha256 != wanted and not (record.outcome == "aborted" and not record.prompt_sha256):
        raise CertificateRefused(f"part 'arms' does not hold: request {request.index} of {arm} was sent another prompt "
                                 "than follows from the seal and the trace")
    if record.outcome == "ok" and record.prompt_tokens != request.tokens:
        raise CertificateRefused(f"part 'arms' does not hold: request {request.index} of {arm} has "
                                 f"{record.prompt_tokens} prompt tokens, the trace gives it {request.tokens}")


def _first(again: Mapping[str, Any], parts: Mapping[str, Any], name: str) -> str:
    a, b = again.get(name), parts.get(name)
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if not same(a.get(key), b.get(key)):
                return _first(a, b, key)
    return f"{name} is {_short(b)}, recomputed {_short(a)}"


def _short(value: Any) -> str:
    text = canonical(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
