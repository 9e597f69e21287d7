"""The certificates in docs/ hold with the trace, and the documents say what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.lab.certificate import CertificateRefused, check, read_certificate
from hostcache.lab.verifying import verify

ROOT = Path(__file__).resolve().parents[2]
CONVERSATION = ROOT.parent / "shared/data/mooncake_conversation_trace.jsonl.gz"
SHIPPED = sorted((ROOT / "docs/certificates").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=[each.stem for each in SHIPPED])
@pytest.mark.skipif(not CONVERSATION.exists(), reason="the public traces are not beside the checkout")
def test_a_shipped_certificate_holds_with_the_trace_alone(path: Path) -> None:
    assert verify(read_certificate(path), CONVERSATION) == "explained"


@pytest.mark.parametrize("path", SHIPPED, ids=[each.stem for each in SHIPPED])
def test_its_figures_and_digests_stand_in_the_laboratorys_document(path: Path) -> None:
    document = read_certificate(path)
    parts = check(document)
    said = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    figures = parts["figures"]["figures"]
    for number in (f"{figures['device_hit_rate']:.6f}", f"{figures['bound']:.6f}", document["sha256"][:16],
                   parts["seal"]["sha256"][:16]):
        assert number in said


@pytest.mark.parametrize("path", SHIPPED, ids=[each.stem for each in SHIPPED])
def test_a_byte_of_it_that_was_changed_is_found_in_its_part(path: Path, tmp_path: Path) -> None:
    changed = path.read_bytes().replace(b"request_success", b"request_succesS", 1).replace(b'"outcome":"ok"',
                                                                                         b'"outcome":"oK"', 1)
    assert changed != path.read_bytes()
    (tmp_path / "changed.json").write_bytes(changed)
    with pytest.raises(CertificateRefused, match="'arms'"):
        check(read_certificate(tmp_path / "changed.json"))
