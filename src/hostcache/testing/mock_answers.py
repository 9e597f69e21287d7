"""The mock server's requests and answers: JSON in, a call out; a served call in, JSON, events or a log line out. Pure.

Fields that a mock has no use for are accepted and change nothing (unless `openai_fields_only` is set).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostcache.errors import RequestRefused
from hostcache.testing.mock_cache import BlockChain
from hostcache.testing.mock_config import FaultKind, MockConfig
from hostcache.testing.mock_http import HttpRequest, whole
from hostcache.testing.mock_text import WORD_IDS, WORDS, tokenize, tokenize_chat
from hostcache.tier import RequestReport

LEFT = 499
"""Status in the log (never sent) of a request that ended before its answer began."""
DEFAULT_MAX_TOKENS = 16
_OPENAI_FIELDS = frozenset({
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stream",
    "stream_options", "stop", "seed", "user", "logprobs", "presence_penalty", "frequency_penalty", "logit_bias",
    "best_of", "echo", "suffix", "tools", "tool_choice", "response_format", "metadata", "store", "top_logprobs",
})


@dataclass(slots=True, kw_only=True)
class Call:
    """One generation request, and what has become of it. Times on the server's clock; `reply` in words."""

    number: int
    fault: FaultKind | None
    chat: bool
    body: Mapping[str, Any]
    prompt: Sequence[int]
    max_tokens: int
    session: str | None
    arrived_s: float
    created_unix_s: float
    chain: BlockChain
    reply: Sequence[int] = ()
    report: RequestReport | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    """when the last bytes of a whole answer were handed over: taken before, since their reader may run first"""
    sent_tokens: int = 0
    status: int = LEFT

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def asks_for_usage(self) -> bool:
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def asks_for_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))


def parse_call(request: HttpRequest, config: MockConfig, *, number: int, origin_unix_s: float) -> Call:
    """`origin_unix_s`: of the server's clock. Raises RequestRefused for what cannot be served."""
    body, chat = read_json(request.body), request.path == "/v1/chat/completions"
    if config.openai_fields_only:
        for name in body:
            if name not in _OPENAI_FIELDS:
                raise RequestRefused(f"Unrecognized request argument supplied: {name}", param=name)
    if body.get("model") not in (None, config.model):
        raise RequestRefused(f"the model {str(body['model'])[:200]!r} does not exist here; this server has "
                             f"{config.model!r}", status=404, code="model_not_found", param="model")
    prompt = _packed(token_ids(body, chat=chat))
    if not prompt:
        raise RequestRefused("the prompt is empty; send at least one token")
    asked = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
    max_tokens = asked[0] if asked else DEFAULT_MAX_TOKENS
    if type(max_tokens) is not int or max_tokens < 1:
        raise RequestRefused(f"max_tokens is {max_tokens!r}; give a whole number of at least 1", param="max_tokens")
    if len(prompt) + max_tokens > config.max_context_tokens:
        raise RequestRefused(f"this model's context is {config.max_context_tokens} tokens; the prompt has "
                             f"{len(prompt)} and {max_tokens} are asked for", code="context_length_exceeded")
    chain = BlockChain(config.block_tokens, str(body.get("cache_salt") or ""))
    chain.extend(prompt)
    session = request.headers.get("x-session-id") or body.get("session_id") or body.get("user")
    return Call(number=number, fault=config.fault_of(number), chat=chat, body=body, prompt=prompt,
                max_tokens=max_tokens, session=None if session is None else str(session),
                arrived_s=request.arrived_s, created_unix_s=origin_unix_s + request.arrived_s, chain=chain)


def token_ids(body: Mapping[str, Any], *, chat: bool) -> Sequence[int]:
    """Of `messages`, or of `prompt`: a text or ids."""
    if chat:
        return tokenize_chat(_messages(body.get("messages")))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return tokenize(prompt)
    if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
        raise RequestRefused("prompt must be one text or one list of token ids", param="prompt")
    return prompt


def _packed(ids: Sequence[int]) -> array[int]:
    """As 64-bit integers, once for all that hashes them: a long prompt's conversions are what a request costs here."""
    try:
        packed = array("q", ids)
    except OverflowError:
        packed = array("q", (-1,))
    if packed and np.frombuffer(packed, dtype=np.int64).min() < 0:
        raise RequestRefused("prompt holds a token id that is negative or beyond 63 bits", param="prompt")
    return packed


def _messages(raw: Any) -> list[dict[str, str]]:
    if not isinstance(raw, list) or not raw or not all(isinstance(each, dict) for each in raw):
        raise RequestRefused("messages must be a list of at least one message", param="messages")
    messages = []
    for each in raw:
        content = each.get("content")
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(each.get("role"), str) or not isinstance(content, str):
            raise RequestRefused("each message needs a role and a content of text", param="messages")
        messages.append({"role": each["role"], "content": content})
    return messages


def read_json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestRefused("the body must be a JSON object", code="invalid_json")
    return value


# -- answers ---------------------------------------------------------------------------------------------------------


def chunk_tokens(call: Call, config: MockConfig) -> int:
    if config.chunks is not None:
        return max(1, -(-len(call.reply) // config.chunks))
    return config.tokens_per_chunk


def stream_events(call: Call, config: MockConfig) -> list[bytes]:
    """One server-sent event for each chunk. Written by hand: at thousands a second json.dumps is what costs."""
    envelope = to_json(_envelope(call, config)).decode()[:-1]
    opening = f'data: {envelope},"choices":[{{"index":0,"logprobs":null,"finish_reason":'
    closing = "}]" + (',"usage":null' if call.asks_for_usage else "") + "}\n\n"
    step, reply, events = chunk_tokens(call, config), call.reply, []
    for at in range(0, max(1, len(reply)), step):
        words = reply[at : at + step]
        text = "".join([f" {WORDS[word]}" for word in words])
        finish = "null" if at + step < len(reply) else '"length"' if reply else '"stop"'
        ids = f',"token_ids":[{",".join([str(WORD_IDS[word]) for word in words])}]' if call.asks_for_ids else ""
        if call.chat:
            role = '"role":"assistant",' if at == 0 else ""
            said = f',"delta":{{{role}"content":"{text}"}}'
        else:
            said = f',"text":"{text}"'
            if at == 0 and ids and not config.no_prompt_ids:
                ids += f',"prompt_token_ids":{to_json(list(call.prompt)).decode()}'
        events.append(f"{opening}{finish}{said}{ids}{closing}".encode())
    return events


def stream_tail(call: Call, config: MockConfig) -> bytes:
    """The usage, where asked for, and [DONE]."""
    usage = usage_json(call, config, completion_tokens=len(call.reply)) if call.asks_for_usage else None
    last = b"" if usage is None else b"data: " + to_json(
        {**_envelope(call, config), "choices": [], "usage": usage}) + b"\n\n"
    return last + b"data: [DONE]\n\n"


def whole_answer(call: Call, config: MockConfig) -> dict[str, Any]:
    text, ids = "".join(f" {WORDS[word]}" for word in call.reply), [WORD_IDS[word] for word in call.reply]
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": "length" if ids else "stop"}
    if call.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    answer = {**_envelope(call, config), "choices": [choice]}
    if call.asks_for_ids:  # where vLLM puts them
        choice["token_ids"] = ids
    if call.asks_for_ids and not config.no_prompt_ids:
        (answer if call.chat else choice)["prompt_token_ids"] = list(call.prompt)
    usage = usage_json(call, config, completion_tokens=len(ids))
    return answer if usage is None else {**answer, "usage": usage}


def _envelope(call: Call, config: MockConfig) -> dict[str, Any]:
    prefix, kind = ("chatcmpl", "chat.completion") if call.chat else ("cmpl", "text_completion")
    return {"id": f"{prefix}-mock-{call.number}", "object": f"{kind}.chunk" if call.streamed and call.chat else kind,
            "created": int(call.created_unix_s), "model": config.model}


def usage_json(call: Call, config: MockConfig, *, completion_tokens: int) -> dict[str, Any] | None:
    """None where it is omitted."""
    report = call.report
    if report is None or config.usage == "none" or call.fault == "no-usage":
        return None
    prompt, cached = report.prompt_tokens, report.device_tokens + report.host_tokens
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion_tokens,
                             "total_tokens": prompt + completion_tokens}
    if config.usage == "full":
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if config.style == "hostcache":
            usage |= {"prompt_cache_hit_tokens": cached, "prompt_cache_miss_tokens": prompt - cached,
                      "hostcache": report.as_json()}
    return usage


def log_line(call: Call, config: MockConfig, *, arrived_unix_s: float, now_s: float) -> dict[str, Any]:
    """Of the request log; its keys are told in `mock_server`. `now_s`: the end of what broke off."""
    ended_s = now_s if call.ended_s is None else call.ended_s
    request: dict[str, Any] = {
        "model": config.model, "endpoint": "chat" if call.chat else "completions", "prompt_tokens": len(call.prompt),
        "max_tokens": call.max_tokens, "stream": call.streamed, "user": call.body.get("user")}
    if config.log_content:
        name = "messages" if call.chat else "prompt"
        request[name] = call.body[name]
    usage, first_s = None, call.first_token_s
    if call.report is not None and first_s is not None:
        usage = {"prompt_tokens": len(call.prompt), "completion_tokens": call.sent_tokens,
                 "cached_tokens": call.report.device_tokens + call.report.host_tokens}
    every, blocks = config.log_every_blocks, len(call.prompt) // config.block_tokens
    return {
        "ts": round(arrived_unix_s, 6), "latency_s": round(ended_s - call.arrived_s, 6),
        "ttft_s": None if first_s is None else round(first_s - call.arrived_s, 6), "status": call.status,
        "session": call.session, "request": request, "usage": usage,
        "prefix": [digest.hex() for digest in call.chain.digests[:blocks][every - 1 :: every]],
        "prefix_tokens": every * config.block_tokens,
    }


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(status: int, value: Any, *, extra: Mapping[str, str] | None = None) -> bytes:
    return whole(status, to_json(value), extra=extra)


def error_json(message: str, *, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
