"""A certificate holds, or says which part does not."""

from __future__ import annotations

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
    digest,
    read_certificate,
    write_certificate,
)

PARTS: dict[str, Any] = {"probe": {"name": "p", "ceiling": 0.169, "verdict": 1.5, "seconds": 0.30000000000000004},
                         "verdict": "impossible", "counters": ["hits_total 815968", "queries_total 2111376"]}


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


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@given(st.data())
def test_no_single_byte_can_be_changed_and_the_part_it_lies_in_is_named(folder: Path,
                                                                        data: st.DataObject) -> None:
    text = canonical(certificate(PARTS)) + b"\n"
    at = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != text[at]))
    with pytest.raises(CertificateRefused) as refused:
        check(read_certificate(written(folder / "flipped.json", text[:at] + bytes([byte]) + text[at + 1 :])))
    assert "\n" not in str(refused.value)
    first = text.index(b'"parts":{') + len(b'"parts":{')
    for name in sorted(PARTS):
        end = first + len(canonical({name: PARTS[name]})) - 2
        if first <= at < end:
            assert f"part {name!r}" in str(refused.value)
        first = end + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.mark.parametrize(("old", "new", "says"), [
    (b"0.30000000000000004", b"0.30000000000000005", "part 'probe' says what was certified in other bytes"),
    (b"0.169", b"1.69e-1", "part 'probe' says what was certified in other bytes"),
    (b'"ceiling":0', b'"ceiling": 0', "part 'probe' says what was certified in other bytes"),
    (b'"ceiling":', b'"ceiling":0.5,"ceiling":', "in part 'probe' .\"ceiling\" is there twice"),
    (b'"verdict":"impossible"', b'"verdict":"fine","verdict":"impossible"', "in part 'verdict'"),
    (b"0.169", b"NaN", "in part 'probe' .NaN is no number"),
    (b"0.169", b"1e999", "in part 'probe' .1e999 is no number"),
    (b"0.169", b"9" * 5000, "in part 'probe'"),
    (b'"p"', b'"\\ud800"', "in part 'probe'"),
    (b'"p"', b"[" * 100_000, "nested too deeply"),
    (b"impossible", b"impossibl\xff", "in part 'verdict'"),
    (b"\n", b"", "its digests or header"),
    (b"\n", b"\n\n", "its digests or header"),
    (b'"version":1', b'"version":2', "version 2"),
    (b'"kind":', b'"kind":"other","kind":', "\"kind\" is there twice"),
    (b"hostcache-certificate", b"hostcache-seal", "no certificate of hostcache"),
])
def test_the_same_content_in_other_bytes_and_what_json_may_not_say_are_refused(
        old: bytes, new: bytes, says: str, tmp_path: Path) -> None:
    text = canonical(certificate(PARTS)) + b"\n"
    assert old in text
    with pytest.raises(CertificateRefused, match=says):
        check(read_certificate(written(tmp_path / "c.json", text.replace(old, new))))


def test_nothing_stands_beside_the_parts_and_half_a_file_never_does(tmp_path: Path) -> None:
    body = {**certificate(PARTS), "comment": "it went well"}
    del body["sha256"]
    with pytest.raises(CertificateRefused, match="'comment' is no part of a certificate"):
        check({**body, "sha256": digest(body)})
    with pytest.raises(CertificateRefused, match="part 'probe' is not what was certified: no JSON can say it"):
        check({**certificate(PARTS), "parts": {**PARTS, "probe": float("nan")}})
    write_certificate(tmp_path / "c.json", PARTS)
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]
    with pytest.raises(CertificateRefused, match="cannot be written: No such file or directory"):
        write_certificate(tmp_path / "none" / "c.json", PARTS)


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
