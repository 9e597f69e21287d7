"""A certificate: what a probe's verdict rests on, in parts that each have a digest, and one over all. Judges nothing.

Canonical JSON (sorted keys, no spaces, UTF-8, no NaN), so that the same content has the same bytes everywhere. The
digests say *which* part was changed; whether the verdict follows from the parts is for whoever knows what they mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostcache.errors import HostCacheError

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


def check(document: Any) -> Mapping[str, Any]:
    """The parts, when each is what its digest says. Raises CertificateRefused naming the first that is not."""
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CertificateRefused("this is no certificate of hostcache")
    if document.get("version") != VERSION:
        raise CertificateRefused(f"the certificate has version {document.get('version')!r}; version {VERSION} is known")
    parts, digests = document.get("parts"), document.get("digests")
    if not isinstance(parts, dict) or not isinstance(digests, dict):
        raise CertificateRefused("the certificate has no parts, or no digests of them")
    if differing := sorted(parts.keys() ^ digests.keys()):
        raise CertificateRefused(f"part {differing[0]!r} of the certificate has no content or no digest")
    for name in sorted(parts):
        if digest(parts[name]) != digests[name]:
            raise CertificateRefused(f"part {name!r} is not what was certified: its digest is "
                                     f"{digest(parts[name])[:16]}…, {str(digests[name])[:16]}… was bound")
    body = {name: value for name, value in document.items() if name != "sha256"}
    if digest(body) != document.get("sha256"):
        raise CertificateRefused(f"the certificate's own digest is {digest(body)[:16]}…, it says "
                                 f"{str(document.get('sha256'))[:16]}…: digests or header were changed")
    return parts


def write_certificate(path: Path, parts: Mapping[str, Any]) -> str:
    """Its sha256. A new file; raises CertificateRefused where there is one."""
    document = certificate(parts)
    try:
        with path.open("xb") as stream:
            stream.write(canonical(document) + b"\n")
    except FileExistsError:
        raise CertificateRefused(f"{path} exists; a certificate is never overwritten: give a new name") from None
    return str(document["sha256"])


def read_certificate(path: Path) -> dict[str, Any]:
    """Unchecked. Raises CertificateRefused for what is no JSON object."""
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as why:
        raise CertificateRefused(f"{path} cannot be read: {why.strerror}") from None
    except (ValueError, RecursionError):
        raise CertificateRefused(f"{path} is no JSON; a byte of it was lost or changed") from None
    if not isinstance(document, dict):
        raise CertificateRefused(f"{path} holds no object; this is no certificate of hostcache")
    return document
