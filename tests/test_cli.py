"""What the command line prints, where, and the code it ends with; the doctor's verdicts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hostcache import __version__, doctor
from hostcache.cli import main
from hostcache.errors import ServerError
from hostcache.settings import SETTINGS


@pytest.fixture(autouse=True)
def _away_from_the_users_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for each in SETTINGS:
        monkeypatch.delenv(each.variable, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """The exit code and the one line of a command that must refuse: nothing on stdout, one line on stderr."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("hostcache: error: ")
    return code, err.strip()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_and_no_traceback() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-m", "hostcache", "config", "show"], stdout=full,
                               stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "hostcache: error: No space left on device\n")


@pytest.mark.parametrize(("argv", "code", "words"), [
    ([], 2, ["COMMAND", "--help"]),
    (["srve"], 2, ["srve", "serve"]),
    (["serve", "--host-cache-byte", "1"], 2, ["--host-cache-byte", "did you mean --host-cache-bytes?"]),
    (["serve", "--port", "http"], 2, ["--port", "'http'", "0 and 65535"]),
    (["serve", "--port"], 2, ["--port", "expected one argument"]),
    (["serve", "--host-cache-bytes", "24 gigs"], 2, ["--host-cache-bytes", "24 gigs", "24GiB"]),
    (["serve", "--memory-reservation", "150%"], 2, ["--memory-reservation", "150%", "50%"]),
    (["serve", "--host-cache-mode", "always"], 2, ["always", "on-pressure"]),
    (["serve", "--pool-tokens", "8"], 2, ["8", "32", "raise pool_tokens"]),
    (["serve", "--config", "nowhere.toml"], 2, ["nowhere.toml"]),
    (["serve", "a", "--model", "b"], 2, ["'a'", "'b'", "one of them"]),
    (["serve", "--host", "0.0.0.0"], 2, ["'0.0.0.0'", "HOSTCACHE_API_KEY", "127.0.0.1"]),
    (["serve", "--host", "192.0.2.1", "--api-key", "k"], 6, ["192.0.2.1:8000", "--host"]),
    (["model", "export", "smollm2"], 2, ["--hf"]),
    (["config", "show", "--config", "x.toml"], 2, ["x.toml"]),
])
def test_each_refusal_is_one_line_with_the_value_and_the_way_out(capsys: pytest.CaptureFixture[str], argv: list[str],
                                                                 code: int, words: list[str]) -> None:
    got, line = refused(capsys, *argv)
    assert got == code
    for word in words:
        assert word in line


def test_a_port_in_use_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, line = refused(capsys, "serve", "/no/such/model", "--port", str(port))
    assert code == 6
    assert f"127.0.0.1:{port} is in use" in line
    assert "--port" in line


def test_an_unknown_environment_variable_or_key_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostcache.toml").write_text("prot = 1\n", encoding="utf-8")
    assert refused(capsys, "config", "show")[0] == 2
    (tmp_path / "hostcache.toml").unlink()
    monkeypatch.setenv("HOSTCACHE_PROT", "1")
    code, line = refused(capsys, "serve")
    assert code == 2
    assert "did you mean HOSTCACHE_PORT" in line


def test_a_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    script = ("import sys\nfor name in ('torch', 'uvicorn', 'uvloop', 'gguf', 'tokenizers', 'httpx', 'numpy'):\n"
              "    sys.modules[name] = None\nfrom hostcache.cli import main\n"
              "sys.exit(main(['serve', 'random:tiny', '--port', '0']))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (7, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'hostcache[engine]'" in done.stderr


def test_the_process_ends_with_the_same_line_and_code() -> None:
    done = subprocess.run([sys.executable, "-m", "hostcache", "serve", "--port", "x"], capture_output=True, text=True,
                          check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "hostcache: error: --port is 'x'; give a whole number between 0 and 65535\n"


def test_version_and_help_go_to_stdout_and_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hostcache {__version__}\n"
    for argv in (["--help"], ["serve", "--help"], ["doctor", "-h"], ["model", "-h"], ["config", "show", "-h"]):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert out.startswith("usage: hostcache")
        assert err == ""


def test_serve_help_teaches_every_setting_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    out = capsys.readouterr().out
    for each in SETTINGS:
        assert each.flag in out
    assert "24GiB" in out
    assert "curl http://127.0.0.1:8000" in out


def test_config_show_tells_values_and_origins(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostcache.toml").write_text('host_cache_bytes = "1536MiB"\n', encoding="utf-8")
    monkeypatch.setenv("HOSTCACHE_API_KEY", "hush")
    assert main(["config", "show", "--port", "9"]) == 0
    out = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()}
    assert rows["host_cache_bytes"] == "1.5GiB hostcache.toml"
    assert rows["port"] == "9 flag"
    assert rows["memory_reservation"] == "50% default"
    assert rows["host_cache_restore_budget_ms"] == "500 ms default"
    assert "hush" not in out
    assert main(["config", "show", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["host_cache_bytes"] == {"value": 1536 * 1024**2, "origin": "hostcache.toml", "unit": "bytes"}
    assert record["api_key"]["value"] is True


# -- the doctor ------------------------------------------------------------------------------------------------------


class ScriptedServer:
    """Answers as a server whose device holds `bank` conversations, oldest out, and whose host does as told."""

    def __init__(self, *, host: str = "restores", bank: int = 3, says: int = 3, tier: bool = True) -> None:
        self.host = host
        self.bank = bank
        self.says = says
        self.tier = tier
        self.device: list[tuple[int, ...]] = []
        self.evictions = 0

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if path == "/v1/stats":
            return {"engine": {"page_tokens": 16, "pool_pages": 64, "max_context": 512, "bank_capacity": self.says,
                               "device_evictions": self.evictions}, "host_cache": {} if self.tier else None}
        assert body is not None
        if path == "/tokenize":
            return {"tokens": [int(word) % 1000 for word in body["prompt"].split()]}
        prompt = tuple(body["prompt"])
        pages = (len(prompt) - 1) // 16 * 16
        report = {"device": 0, "host": 0, "recomputed": {"new": len(prompt)}, "first_miss": None}
        if prompt in self.device:
            report |= {"device": pages, "recomputed": {"partial_page": len(prompt) - pages}}
        elif self.evictions and pages == 128:
            if self.host == "restores":
                report |= {"host": pages}
            else:
                report |= {"recomputed": {self.host: pages, "partial_page": 1},
                           "first_miss": {"reason": self.host, "position": 0}}
        if prompt not in self.device:
            self.device.append(prompt)
        if len(self.device) > self.bank:
            self.device.pop(0)
            self.evictions += 1
        return {"usage": {"hostcache": report}}


def examine(server: ScriptedServer) -> tuple[doctor.Smoke, list[str]]:
    said: list[str] = []
    return doctor.smoke(server, seed=0, say=said.append), said


def test_the_smoke_test_reports_what_was_restored() -> None:
    result, said = examine(ScriptedServer())
    assert result == doctor.Smoke(restored_tokens=128, possible_tokens=128, why="")
    assert [line.split()[0] for line in said] == ["fill", "evict", "return"]


@pytest.mark.parametrize("reason", sorted(doctor.WAYS_OUT))
def test_the_smoke_test_says_why_nothing_was_restored(reason: str) -> None:
    result, _ = examine(ScriptedServer(host=reason))
    assert result.restored_tokens == 0
    assert result.why.startswith(f"{reason}: ")
    assert "token 0" in result.why


def test_the_smoke_test_says_when_the_tier_is_off_or_nothing_was_evicted() -> None:
    assert "tier is off" in examine(ScriptedServer(tier=False))[0].why
    assert examine(ScriptedServer(bank=9))[0].why.startswith("128 tokens were still on the device")


def test_the_doctor_names_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["doctor", "--url", url]) == 6
    out, err = capsys.readouterr()
    assert "machine" in out
    assert err.count("\n") == 1
    assert url in err
    for wrong in ("ftp://x", "http://"):
        with pytest.raises(ServerError, match="--url"):
            doctor.http_ask(wrong, None)
