"""A certificate holds, or says which part does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.lab.certificate import (
    CertificateRefused,
    canonical,
    certificate,
    check,
    read_certificate,
    write_certificate,
)

PARTS: dict[str, Any] = {"probe": {"name": "p", "ceiling": 0.169}, "verdict": "impossible",
                         "counters": ["hits_total 815968", "queries_total 2111376"]}


def test_it_holds_and_its_bytes_do_not_depend_on_the_order_of_parts(tmp_path: Path) -> None:
    document = certificate(PARTS)
    assert check(document) == PARTS
    assert canonical(document) == canonical(certificate(dict(reversed(PARTS.items()))))
    assert write_certificate(tmp_path / "c.json", PARTS) == document["sha256"]
    assert check(read_certificate(tmp_path / "c.json")) == PARTS
    with pytest.raises(CertificateRefused, match="never overwritten"):
        write_certificate(tmp_path / "c.json", PARTS)


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_changed_part_is_named(part: str) -> None:
    document = certificate(PARTS)
    document["parts"][part] = "another"
    with pytest.raises(CertificateRefused, match=f"part '{part}' is not what was certified"):
        check(document)


@given(st.data())
def test_no_single_byte_can_be_flipped(data: st.DataObject) -> None:
    text = canonical(certificate(PARTS))
    at = data.draw(st.integers(0, len(text) - 1))
    flipped = bytes([*text[:at], text[at] ^ (1 << data.draw(st.integers(0, 7))), *text[at + 1 :]])
    try:
        document = json.loads(flipped.decode("utf-8"))
    except ValueError:
        return  # `read_certificate` refuses it
    with pytest.raises(CertificateRefused):
        check(document)


def test_what_is_no_certificate_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(CertificateRefused, match="cannot be read"):
        read_certificate(path)
    for text, says in (("{", "no JSON"), ("[1]", "no object")):
        path.write_text(text)
        with pytest.raises(CertificateRefused, match=says):
            read_certificate(path)
    for document in ({}, {"kind": "other"}, {**certificate(PARTS), "version": 2}, {**certificate(PARTS), "parts": 3},
                     {**certificate(PARTS), "digests": {}}, {**certificate(PARTS), "sha256": "0"}):
        with pytest.raises(CertificateRefused):
            check(document)
