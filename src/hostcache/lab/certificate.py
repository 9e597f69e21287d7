"""A certificate: what a probe's verdict rests on, in parts that each have a digest, and one over all. Judges nothing.

Canonical JSON (sorted keys, no spaces, UTF-8, no NaN), so that the same content has the same bytes everywhere; a file
with other bytes is refused, since what a digest is of is what was read, and two texts may be read as the same number.
The digests say *which* part was changed; whether the verdict follows from the parts is for whoever knows what they
mean.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from hostcache.errors import HostCacheError
from hostcache.folders import write_new
from hostcache.workload.trace_formats.rows import once_each

KIND = "hostcache-certificate"
VERSION = 1


class CertificateRefused(HostCacheError):
    """It does not hold, and which part does not."""


def canonical(value: Any) -> bytes:
    """Raises ValueError for what JSON cannot say (NaN, other types)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def certificate(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The document. `parts`: name → JSON; their order does not matter."""
    body = {"kind": KIND, "version": VERSION, "parts": dict(parts),
            "digests": {name: digest(part) for name, part in parts.items()}}
    return {**body, "sha256": digest(body)}


def parsed(data: bytes) -> Any:
    """Strict JSON. Raises ValueError for a key that stands twice in one object, for NaN, for a number without end, and
    for what is no JSON in UTF-8."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=once_each, parse_constant=_finite,
                          parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check(document: Any) -> Mapping[str, Any]:
    """The parts, when each is what its digest says. Raises CertificateRefused naming the first that is not."""
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CertificateRefused("this is no certificate of hostcache")
    if document.get("version") != VERSION:
        raise CertificateRefused(f"the certificate has version {document.get('version')!r}; version {VERSION} is known")
    parts, digests = document.get("parts"), document.get("digests")
    if not isinstance(parts, dict) or not isinstance(digests, dict):
        raise CertificateRefused("the certificate has no parts, or no digests of them")
    if differing := [*(f"part {name!r} has no content" for name in sorted(digests.keys() - parts.keys())),
                     *(f"part {name!r} has no digest" for name in sorted(parts.keys() - digests.keys()))]:
        raise CertificateRefused(f"{', '.join(differing[:4])}; this is not what was certified")
    for name in sorted(parts):
        if (found := _digest(parts[name], f"part {name!r}")) != digests[name]:
            raise CertificateRefused(f"part {name!r} is not what was certified: its digest is "
                                     f"{found}, {str(digests[name])[:80]} was bound")
    body = {name: value for name, value in document.items() if name != "sha256"}
    if (found := _digest(body, "the certificate")) != document.get("sha256"):
        raise CertificateRefused(f"the certificate's own digest is {found}, it says "
                                 f"{str(document.get('sha256'))[:80]}: digests or header were changed")
    if strange := sorted(document.keys() - _KEYS):
        raise CertificateRefused(f"{strange[0]!r} is no part of a certificate and nothing vouches for it")
    return parts


def write_certificate(path: Path, parts: Mapping[str, Any]) -> str:
    """Its sha256. A new file; raises CertificateRefused where there is one, or where it cannot be written."""
    document = certificate(parts)
    try:
        write_new(path, canonical(document) + b"\n")
    except FileExistsError:
        raise CertificateRefused(f"{path} exists; a certificate is never overwritten: give a new name") from None
    except OSError as why:
        raise CertificateRefused(f"{path} cannot be written: {why.strerror}; give a folder where there is room"
                                 ) from None
    return str(document["sha256"])


def read_certificate(path: Path) -> dict[str, Any]:
    """Of its content only the form is checked. Raises CertificateRefused for what is no JSON object, or is not written
    as `write_certificate` writes it."""
    try:
        data = path.read_bytes()
    except OSError as why:
        raise CertificateRefused(f"{path} cannot be read: {why.strerror}") from None
    try:
        document = parsed(data)
        rewritten = canonical(document) + b"\n"
    except (ValueError, RecursionError) as why:
        raise CertificateRefused(f"{path} is no JSON; a byte of it was lost or changed in {_damaged(data)} "
                                 f"({_line(why)})") from None
    if not isinstance(document, dict):
        raise CertificateRefused(f"{path} holds no object; this is no certificate of hostcache")
    if rewritten != data:
        check(document)
        raise CertificateRefused(f"{path}: {_damaged(data)} says what was certified in other bytes: spaces, or a "
                                 "number or text written another way; take the file as it was made")
    return document


def _damaged(data: bytes) -> str:
    """Where bytes differ from what was written: the first part whose bytes do not have their digest, else the rest."""
    rest = "its digests or header"
    begin, middle = b'{"digests":', b',"kind":'
    head, found, _ = data.partition(middle)
    try:
        digests = json.loads(head.removeprefix(begin)) if head.startswith(begin) and found else {}
    except (ValueError, RecursionError):
        return rest
    at = data.find(b'"parts":{') + len(b'"parts":')
    for name in sorted(digests):
        key = f'"{name}":'.encode()
        first = done = at + 1 + len(key)
        state = hashlib.sha256()
        for end in re.finditer(rb"[,}]", data[first:]):  # a part ends before one of these
            state.update(data[done : first + end.start()])
            done = first + end.start()
            if state.hexdigest() == digests[name]:
                break
        else:
            return f"part {name!r}"
        if data[at + 1 : first] != key:
            return f"part {name!r}"
        at = done
    return rest


_KEYS = frozenset({"kind", "version", "parts", "digests", "sha256"})


def _digest(value: Any, where: str) -> str:
    try:
        return digest(value)
    except (ValueError, TypeError, RecursionError) as why:
        raise CertificateRefused(f"{where} is not what was certified: no JSON can say it ({_line(why)})") from None


def _finite(text: str) -> float:
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no number")
    return number


def _line(why: Exception) -> str:
    return " ".join(str(why).split())[:80]
