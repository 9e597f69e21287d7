"""OpenAI's request and answer shapes, as pure functions: bytes in, records out; events in, JSON values out.

Knows no socket, no engine, no clock. What is not supported is refused with 400 and its name, never ignored; a field
that only says its neutral value (`n: 1`, `tools: []`, null) is accepted, so the official clients work as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hostcache.engine.requests import CacheHints, CacheLimits, LogitTrace, SamplingParams, Usage
from hostcache.errors import RequestRefused

Kind = Literal["chat", "completion"]

COMPLETION_MAX_TOKENS = 16
"""max_tokens of /v1/completions where the request names none (OpenAI's own default)."""
CHAT_MAX_TOKENS = 1024
"""The same for chat, where the rest of the context is longer."""
MAX_STOPS = 16
_LONGEST_SESSION_ID = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A generation request as its client wrote it, before anything was tokenized. Exactly one of `text`, `token_ids`
    and `messages` is set. `max_tokens` None: not named."""

    kind: Kind
    model: str | None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    """Usage so far on every piece of the stream; only with `include_usage`."""
    return_token_ids: bool = False
    trace_logits: bool = False
    limits: CacheLimits = field(default_factory=CacheLimits)
    hints: CacheHints = field(default_factory=CacheHints)

    def sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=self.temperature, top_p=self.top_p, stop=self.stop,
                              ignore_eos=self.ignore_eos, seed=self.seed)


# Fields whose neutral value changes nothing. Any other value asks for something that is not built.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,), "top_logprobs": (0,),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "prediction": (),
    "reasoning_effort": ("none",), "verbosity": ("medium",), "web_search_options": (), "moderation": (),
    "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,), "use_beam_search": (False,), "prompt_logprobs": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
}
# Fields that name the caller or a place to keep the answer; they never change what is generated here.
_HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "parallel_tool_calls",
})
_READ = frozenset({
    "model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "stream_options", "ignore_eos",
    "return_token_ids", "hostcache",
})
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")


def refuse(message: str, param: str | None = None, *, code: str = "invalid_value") -> RequestRefused:
    return RequestRefused(message, status=400, code=code, param=param)


def read_json(body: bytes) -> dict[str, Any]:
    """The request's JSON object. Refuses what is not UTF-8, not JSON (NaN is not), or no object."""

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        value = json.loads(body.decode("utf-8"), parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise refuse(f"the body is not valid UTF-8 (byte {error.start}); send UTF-8", code="invalid_utf8") from error
    except RecursionError as error:
        raise refuse("the body is nested too deeply; send a flat JSON object", code="invalid_json") from error
    except ValueError as error:
        raise refuse(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise refuse(f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    return value


def parse_completion(body: Mapping[str, Any]) -> Call:
    return Call(kind="completion", **_prompt(body.get("prompt")), max_tokens=_max_tokens(body, "max_tokens"),
                **_common(body, {"prompt"}))


def parse_chat(body: Mapping[str, Any]) -> Call:
    short, long = _max_tokens(body, "max_tokens"), _max_tokens(body, "max_completion_tokens")
    if short is not None and long is not None and short != long:
        raise refuse(f"max_tokens is {short} and max_completion_tokens is {long}; send one of them", "max_tokens")
    return Call(kind="chat", messages=parse_messages(body.get("messages")),
                max_tokens=short if long is None else long, **_common(body, {"messages", "max_completion_tokens"}))


def parse_tokenize(body: Mapping[str, Any]) -> str | tuple[Mapping[str, Any], ...]:
    """The text of `prompt`, or the conversation of `messages`, of POST /tokenize."""
    for name in body:
        if name not in {"model", "prompt", "messages", "add_special_tokens", "add_generation_prompt"}:
            raise _unknown(name)
    _neutral_only(body, ("add_special_tokens", "add_generation_prompt"))
    if body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise refuse("send prompt or messages, not both", "prompt")
        return parse_messages(body["messages"])
    return _text(body.get("prompt"), "prompt")


def parse_messages(raw: Any) -> tuple[Mapping[str, Any], ...]:
    """Each message as {"role", "content"[, "name", "tool_call_id"]} with the content as one text."""
    if not isinstance(raw, list) or not raw:
        raise refuse(f"messages must be a list of at least one message, not {_kind(raw)}", "messages")
    return tuple(_message(each, f"messages[{index}]") for index, each in enumerate(raw))


def answer_budget(call: Call, *, prompt_tokens: int, max_context: int) -> int:
    """max_tokens of this request. Refuses, with the numbers, what does not fit into the context."""
    if prompt_tokens == 0:
        raise refuse("the prompt is empty; send at least one token", "prompt" if call.kind == "completion" else
                     "messages")
    room = max_context - prompt_tokens
    wanted = call.max_tokens or 1
    if room < wanted:
        raise refuse(
            f"this model's context is {max_context} tokens; the prompt has {prompt_tokens} and {wanted} "
            f"{'is' if wanted == 1 else 'are'} asked for the answer, together {prompt_tokens + wanted}; shorten the "
            "prompt or lower max_tokens", "messages" if call.kind == "chat" else "prompt",
            code="context_length_exceeded")
    if call.max_tokens is not None:
        return call.max_tokens
    return min(room, COMPLETION_MAX_TOKENS if call.kind == "completion" else CHAT_MAX_TOKENS)


def _prompt(raw: Any) -> dict[str, Any]:
    if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], (str, list)):
        raw = raw[0]  # a batch of one
    if isinstance(raw, str):
        return {"text": _text(raw, "prompt")}
    if not isinstance(raw, list):
        raise refuse(f"prompt must be a text or a list of token ids, not {_kind(raw)}", "prompt")
    if raw and isinstance(raw[0], (str, list)):
        raise refuse(f"prompt has {len(raw)} prompts; send one in each request", "prompt", code="unsupported_value")
    for index, token in enumerate(raw):
        if type(token) is not int:
            raise refuse(f"prompt[{index}] is {_show(token)}; token ids are whole numbers", "prompt")
    return {"token_ids": tuple(raw)}


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuses ids that the model has no row for."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise refuse(f"prompt[{index}] is {_show(token_ids[index])}; this model's token ids are 0 to {vocab_size - 1}",
                     "prompt")


def _message(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise refuse(f"{where} must be an object with role and content, not {_kind(raw)}", where)
    role = raw.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refuse(f"{where}.role is {_show(role)}; it must be one of {', '.join(sorted(_ROLES))}", f"{where}.role")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role,
                               "content": _content(raw.get("content"), f"{where}.content")}
    for key, value in raw.items():
        if key in ("role", "content") or value is None or value == []:
            continue
        if key not in ("name", "tool_call_id"):
            raise refuse(f"{where}.{key} is not supported; send role and content only", f"{where}.{key}",
                         code="unsupported_parameter")
        message[key] = _text(value, f"{where}.{key}")
    return message


def _content(raw: Any, where: str) -> str:
    if isinstance(raw, str):
        return _text(raw, where)
    if not isinstance(raw, list) or not raw:
        raise refuse(f"{where} must be a text or a list of text parts, not {_kind(raw)}", where)
    texts = []
    for index, part in enumerate(raw):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refuse(f"{where}[{index}].type is {_show(kind)}; only text parts are supported", where,
                         code="unsupported_value")
        texts.append(_text(part.get("text"), f"{where}[{index}].text"))
    return "".join(texts)


def _common(body: Mapping[str, Any], own: set[str]) -> dict[str, Any]:
    for name in body:
        if name == "cache_salt":
            raise refuse("cache_salt is not taken from clients: a salt that the client chooses protects nobody. The "
                         "server derives one from each API key; ask its operator for a key of your own", name,
                         code="unsupported_parameter")
        if name not in _READ and name not in _NEUTRAL and name not in _HARMLESS and name not in own:
            raise _unknown(name)
    _neutral_only(body, tuple(_NEUTRAL))
    stream = _flag(body, "stream")
    options = _object(body.get("stream_options"), "stream_options")
    if options and not stream:
        raise refuse("stream_options is only allowed with stream: true", "stream_options")
    for key, value in options.items():
        if key not in _STREAM_OPTIONS and not (key == "include_obfuscation" and not value):
            raise refuse(f"stream_options.{key} is not supported; {' and '.join(_STREAM_OPTIONS)} are",
                         f"stream_options.{key}", code="unsupported_parameter")
    include_usage, continuous_usage = (_flag(options, name, where="stream_options.") for name in _STREAM_OPTIONS)
    if continuous_usage and not include_usage:
        raise refuse("stream_options.continuous_usage_stats is only allowed with include_usage: true",
                     "stream_options.continuous_usage_stats")
    model = body.get("model")
    extension = _extension(_object(body.get("hostcache"), "hostcache"))
    return {
        "model": None if model is None else _text(model, "model"),
        "temperature": _number(body, "temperature", 1.0, lambda t: 0 <= t <= 2, "between 0 and 2"),
        "top_p": _number(body, "top_p", 1.0, lambda p: 0 < p <= 1, "above 0 and at most 1"),
        "stop": _stops(body.get("stop")),
        "ignore_eos": _flag(body, "ignore_eos"),
        "seed": _seed(body.get("seed")),
        "stream": stream,
        "include_usage": include_usage,
        "continuous_usage": continuous_usage,
        "return_token_ids": _flag(body, "return_token_ids"),
        **extension,
    }


def _extension(raw: Mapping[str, Any]) -> dict[str, Any]:
    known = {"store", "load", "store_answer", "max_store_tokens", "max_load_tokens", "session_id",
             "expected_return_s", "session_closed", "trace_logits"}
    for name in raw:
        if name not in known:
            raise refuse(f"hostcache.{name} is not known; known are {', '.join(sorted(known))}", f"hostcache.{name}",
                         code="unknown_parameter")

    def flag(name: str, default: bool) -> bool:
        return _flag(raw, name, default, where="hostcache.")

    def cap(name: str) -> int | None:
        value = raw.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise refuse(f"hostcache.{name} is {_show(value)}; give a whole number of at least 0", f"hostcache.{name}")
        return value

    session = raw.get("session_id")
    if session is not None:
        session = _text(session, "hostcache.session_id")
        if len(session) > _LONGEST_SESSION_ID:  # a hint never fails a request and never costs memory without bound
            session = hashlib.sha256(session.encode()).hexdigest()
    returns = raw.get("expected_return_s")
    if returns is not None and (isinstance(returns, bool) or not isinstance(returns, (int, float))):
        raise refuse(f"hostcache.expected_return_s is {_show(returns)}; give a number of seconds",
                     "hostcache.expected_return_s")
    if returns is not None and not 0 <= returns < 1e9:  # a wrong hint is no hint
        returns = None
    return {
        "limits": CacheLimits(store=flag("store", True), load=flag("load", True),
                              store_answer=flag("store_answer", True), max_store_tokens=cap("max_store_tokens"),
                              max_load_tokens=cap("max_load_tokens")),
        "hints": CacheHints(session_id=session, expected_return_s=None if returns is None else float(returns),
                            session_closed=flag("session_closed", False)),
        "trace_logits": flag("trace_logits", False),
    }


def _neutral_only(body: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in names:
        value = body.get(name)
        if value is None or any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
                                for neutral in _NEUTRAL[name]):
            continue
        raise refuse(f"{name} is {_show(value)}, which is not supported; leave {name} out", name,
                     code="unsupported_parameter")


def _unknown(name: str) -> RequestRefused:
    return refuse(f"{_show(name)} is not a parameter that this server knows; leave it out", name[:64],
                  code="unknown_parameter")


def _max_tokens(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise refuse(f"{name} is {_show(value)}; give a whole number of at least 1", name)
    return value


def _seed(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
        raise refuse(f"seed is {_show(value)}; give a whole number of 64 bits", "seed")
    return value if value is None or value >= 0 else value + 2**64


def _stops(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    stops = [raw] if isinstance(raw, str) else raw
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise refuse(f"stop must be a text or a list of at most {MAX_STOPS} texts", "stop")
    if any(stop == "" for stop in stops):
        raise refuse("stop holds an empty text, which would stop at once; leave it out", "stop")
    return tuple(_text(stop, "stop") for stop in stops)


def _number(body: Mapping[str, Any], name: str, default: float, fits: Callable[[float], bool], limits: str) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
        raise refuse(f"{name} is {_show(value)}; give a number {limits}", name)
    return float(value)


def _flag(body: Mapping[str, Any], name: str, default: bool = False, *, where: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refuse(f"{where}{name} is {_show(value)}; give true or false", where + name)
    return value


def _object(raw: Any, name: str) -> Mapping[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise refuse(f"{name} must be an object, not {_kind(raw)}", name)
    return raw


def _text(raw: Any, name: str) -> str:
    if not isinstance(raw, str):
        raise refuse(f"{name} must be a text, not {_kind(raw)}", name)
    try:
        raw.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can write half of a surrogate pair
        raise refuse(f"{name} holds half a surrogate pair at character {error.start}, which is no text", name,
                     code="invalid_utf8") from error
    return raw


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number",
             float: "a number"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _show(value: Any) -> str:
    """A value in a message: JSON, ASCII, short."""
    try:
        text = json.dumps(value)
    except ValueError:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# -- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every object of one answer carries. `response_id` without its prefix; `created` in unix seconds."""

    kind: Kind
    response_id: str
    created: int
    model: str
    fingerprint: str

    def wrap(self, choices: list[dict[str, Any]], *, chunk: bool) -> dict[str, Any]:
        if self.kind == "chat":
            prefix, kind = "chatcmpl-", "chat.completion.chunk" if chunk else "chat.completion"
        else:
            prefix, kind = "cmpl-", "text_completion"
        return {"id": prefix + self.response_id, "object": kind, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint, "choices": choices}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
        "hostcache": dict(usage.report),
    }


def _extras(call: Call, token_ids: Sequence[int], logits: Sequence[LogitTrace]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if call.return_token_ids:
        extras["token_ids"] = list(token_ids)
    if call.trace_logits:
        extras["hostcache_logits"] = [
            {"digest": each.digest, "margin": each.margin if math.isfinite(each.margin) else None} for each in logits]
    return extras


def full_answer(call: Call, envelope: Envelope, *, text: str, token_ids: Sequence[int], logits: Sequence[LogitTrace],
                finish_reason: str, usage: Usage, prompt: Sequence[int]) -> dict[str, Any]:
    """The whole answer of a request without `stream`."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if call.kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice.update(_extras(call, token_ids, logits))
    answer = envelope.wrap([choice], chunk=False)
    if call.return_token_ids:  # where vLLM puts them: in a completion's choice, beside a chat's choices
        (choice if call.kind == "completion" else answer)["prompt_token_ids"] = list(prompt)
    return {**answer, "usage": usage_json(usage)}


def chunk(call: Call, envelope: Envelope, *, text: str, token_ids: Sequence[int] = (),
          logits: Sequence[LogitTrace] = (), finish_reason: str | None = None,
          opens: Sequence[int] | None = None, usage: Usage) -> dict[str, Any]:
    """One piece of a stream. `opens`: the prompt's tokens, given with the first piece only. `usage`: so far."""
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
    if call.kind == "chat":
        delta: dict[str, Any] = {"role": "assistant"} if opens is not None else {}
        choice["delta"] = {**delta, "content": text} if text or opens is not None or finish_reason is None else delta
    else:
        choice["text"] = text
    choice.update(_extras(call, token_ids, logits))
    piece = envelope.wrap([choice], chunk=True)
    if call.return_token_ids and opens is not None:
        (choice if call.kind == "completion" else piece)["prompt_token_ids"] = list(opens)
    if call.include_usage:
        piece["usage"] = usage_json(usage) if call.continuous_usage else None
    return piece


def usage_chunk(envelope: Envelope, usage: Usage) -> dict[str, Any]:
    """The last piece of a stream with stream_options.include_usage."""
    return {**envelope.wrap([], chunk=True), "usage": usage_json(usage)}


def sse(value: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
