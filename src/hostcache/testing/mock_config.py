"""What a mock server is told to be: tiers, times, faults; and the same as flags of a command. Serves nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from hostcache.errors import ConfigError

Style: TypeAlias = Literal["hostcache", "vllm"]
UsageDetail: TypeAlias = Literal["full", "plain", "none"]
FaultKind: TypeAlias = Literal["refuse", "http-500", "slow", "no-usage", "malformed", "stall", "reset", "cut-short",
                               "stream-error", "no-token", "drift"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Every `every`-th generation request, counted from the server's start or restart, retries included, goes wrong.

    Before anything is served: `refuse` (`refuse_status` and `retry_after_s`), `http-500`. Instead of the second half
    of a streamed answer: `stall` (nothing comes any more), `reset` (RST), `cut-short` (the stream ends in order but
    without [DONE]), `stream-error` (an error object, then [DONE]). In the middle of a stream that goes on: `malformed`
    (half a JSON object). In the answer: `no-usage`, `no-token`, `drift` (one other word). `slow`: the first byte comes
    `slow_s` later. A `reset` or `stall` of an answer that is not streamed comes before its first byte; `malformed`,
    `cut-short` and `stream-error` are of streams only.
    """

    kind: FaultKind
    every: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ConfigError(f"fault {self.kind!r} is not known; known are {', '.join(get_args(FaultKind))}")
        if self.every < 1:
            raise ConfigError(f"fault {self.kind}:{self.every} hits no request; give a number of at least 1")


def parse_fault(text: str) -> Fault:
    """Of KIND:EVERY. Raises ConfigError."""
    kind, _, every = text.partition(":")
    if not every.isdecimal():
        raise ConfigError(f"fault {text!r} is not KIND:EVERY, for example stall:10")
    return Fault(kind=kind, every=int(every))  # type: ignore[arg-type]  # checked by Fault itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MockConfig:
    """One mock server; what each field means stands in `SAYS`, which makes its flag too. Of `faults`, the first that is
    due happens.

    Time to the first token = (`ttft_s`, or `base_s` + computed × `s_per_token` + restored × `s_per_restored`) + the
    wait for one of `slots`. Chunk n comes n × `itl_s` after the first.
    """

    style: Style = "hostcache"
    model: str = "mock"
    seed: int = 0
    block_tokens: int = 16
    device_blocks: int = 4096
    host_blocks: int = 0
    token_bytes: int = 1024
    max_context_tokens: int = 131072
    slots: int = 256
    waiting: int = 4096
    base_s: float = 0.005
    s_per_token: float = 0.0002
    s_per_restored: float = 0.00001
    ttft_s: float | None = None
    itl_s: float = 0.01
    tokens_per_chunk: int = 1
    chunks: int | None = None
    usage: UsageDetail = "full"
    refuse_status: int = 429
    retry_after_s: float | None = 0.1
    slow_s: float = 1.0
    openai_fields_only: bool = False
    no_tokenize: bool = False
    no_prompt_ids: bool = False
    plugin: bool = False
    corrupt_restores: bool = False
    reset_keeps_host: bool = False
    request_log: Path | None = None
    log_content: bool = False
    log_every_blocks: int = 4
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("style", get_args(Style)), ("usage", get_args(UsageDetail))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give one of {', '.join(known)}")
        if self.refuse_status not in (429, 503):
            raise ConfigError(f"refuse_status is {self.refuse_status}; give 429 or 503")
        for name in ("block_tokens", "token_bytes", "max_context_tokens", "slots", "tokens_per_chunk", "chunks",
                     "log_every_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1")
        for name in ("device_blocks", "host_blocks", "waiting", "base_s", "s_per_token", "s_per_restored", "ttft_s",
                     "itl_s", "retry_after_s", "slow_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value}; give at least 0")

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    def first_token_s(self, *, computed_tokens: int, restored_tokens: int) -> float:
        """Without the wait for a slot."""
        if self.ttft_s is not None:
            return self.ttft_s
        return self.base_s + computed_tokens * self.s_per_token + restored_tokens * self.s_per_restored

    def fault_of(self, number: int) -> FaultKind | None:
        """What goes wrong with the `number`-th request, from 1."""
        return next((fault.kind for fault in self.faults if number % fault.every == 0), None)


SAYS = {
    "style": "whose shapes and counters: hostcache or vllm",
    "model": "the model's id",
    "seed": "of the replies: the same prompt gets the same reply from the same seed",
    "block_tokens": "tokens in a block of the prefix cache",
    "device_blocks": "blocks of the device; 0: no prefix cache there",
    "host_blocks": "blocks of the host tier; 0: off",
    "token_bytes": "bytes that a token's cache is said to take",
    "max_context_tokens": "longest prompt + answer",
    "slots": "requests served at the same time",
    "waiting": "requests that may wait for a slot; one more gets 429",
    "base_s": "seconds to the first token, whatever the prompt",
    "s_per_token": "seconds more for each computed prompt token",
    "s_per_restored": "seconds more for each restored prompt token",
    "ttft_s": "script the time to the first token instead",
    "itl_s": "seconds between chunks",
    "tokens_per_chunk": "tokens in a chunk of a stream",
    "chunks": "cut every streamed answer into so many chunks instead",
    "usage": "full: as the style has it; plain: without cached tokens; none: omitted",
    "refuse_status": "status of the fault refuse",
    "retry_after_s": "Retry-After of every refusal, in seconds",
    "slow_s": "delay of the fault slow",
    "openai_fields_only": "answer 400 to request fields that OpenAI's API does not have",
    "no_tokenize": "have no /tokenize",
    "no_prompt_ids": "leave prompt_token_ids out where ids are asked for: half the work of a long prompt",
    "plugin": "of style vllm: the host tier is hostcache's plugin, and counts as it does",
    "corrupt_restores": "give another reply whenever anything was restored",
    "reset_keeps_host": "/reset_prefix_cache leaves the host tier alone, and says nothing",
    "request_log": "write a line for each request to this new file, as a proxy would",
    "log_content": "with the prompts themselves",
    "log_every_blocks": "log the digest of every so many blocks of a prompt",
}
_CHOICES = {"style": get_args(Style), "usage": get_args(UsageDetail)}
_TYPES: dict[str, type] = {"ttft_s": float, "retry_after_s": float, "chunks": int, "request_log": Path}
"""Where the default does not tell."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--host, --port, --fault and a flag for every other field of MockConfig."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one (default)")
    defaults = {each.name: each.default for each in fields(MockConfig)}
    for name, says in SAYS.items():
        flag, default = f"--{name.replace('_', '-')}", defaults[name]
        if default is False:
            parser.add_argument(flag, action="store_true", help=says)
            continue
        kind = _TYPES.get(name) or type(default)
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(flag, type=kind, default=default, choices=_CHOICES.get(name),
                            metavar=kind.__name__.upper(), help=says + shown)
    parser.add_argument("--fault", action="append", default=[], metavar="KIND:EVERY",
                        help=f"let every EVERY-th request go wrong; KIND is one of {', '.join(get_args(FaultKind))}; "
                             "may be given again")


def config_from(args: argparse.Namespace) -> MockConfig:
    """Raises ConfigError."""
    return MockConfig(**{name: getattr(args, name) for name in SAYS},
                      faults=tuple(parse_fault(text) for text in args.fault))
