"""The whole way, in fresh processes with the real engine: fill, evict, return. Needs torch; a failure means that a
first-time user would see a tier that does nothing, or a doctor that cannot say why."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostcache.cli import main
from hostcache.settings import SETTINGS


@pytest.mark.parametrize(("flags", "code", "verdict"), [
    ((), 0, "restored 256 of 256 tokens: the tier works"),
    (("--host-cache-bytes", "0"), 1, "nothing was restored: the tier is off on this server"),
], ids=["defaults", "off"])
def test_the_doctor_sees_a_real_server_restore_or_says_why_not(
        capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...],
        code: int, verdict: str) -> None:
    monkeypatch.chdir(tmp_path)
    for each in SETTINGS:
        monkeypatch.delenv(each.variable, raising=False)
    assert main(["doctor", *flags]) == code
    out, err = capsys.readouterr()
    assert verdict in out.splitlines()[-1]
    assert err == ""
