"""What became of each request of a replay: one record, the same on both sides of the pipe. Judges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hostcache.client.openai import Heard
from hostcache.errors import HostCacheError


class ProbeVoid(HostCacheError):
    """Something that was measured cannot be what it is taken for. `fault`: its stable name."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Times in seconds after the replay began. None where the server did not say, or nothing came.

    `due_s`: when it should have been sent; in a closed loop, when it was its turn. `prompt_sha256`: of the token ids
    that were sent (`Prompts.digest`).
    """

    index: int
    due_s: float
    sent_s: float
    first_token_s: float | None
    ended_s: float
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    device_tokens: int | None
    host_tokens: int | None
    retries: int
    outcome: str
    reason: str | None
    prompt_sha256: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Replayed:
        """Exactly these fields, by name. Raises ProbeVoid naming the first that is missing or not known."""
        if differing := sorted(_FIELDS ^ given.keys()):
            name = differing[0]
            what = "was lost on its way" if name in _FIELDS else "is no field of it"
            raise ProbeVoid("record_field_lost", f"request {given.get('index')}: {name} {what}; a record crosses the "
                            "process boundary whole or the run is void")
        return cls(**given)


_FIELDS = frozenset(each.name for each in fields(Replayed))


def replayed(index: int, due_s: float, heard: Heard, *, start_s: float, prompt_sha256: str) -> Replayed:
    """`due_s` and `start_s` on the clock; the record counts from `start_s`."""
    usage = heard.usage
    return Replayed(
        index=index, due_s=due_s - start_s, sent_s=heard.sent_s - start_s,
        first_token_s=None if heard.first_token_s is None else heard.first_token_s - start_s,
        ended_s=heard.ended_s - start_s, prompt_tokens=None if usage is None else usage.prompt_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        cached_tokens=None if usage is None else usage.hit_tokens,
        device_tokens=None if usage is None else usage.device_tokens,
        host_tokens=None if usage is None else usage.host_tokens, retries=len(heard.retries), outcome=heard.outcome,
        reason=heard.reason, prompt_sha256=prompt_sha256)


def aborted(index: int, due_s: float, now_s: float, *, start_s: float, prompt_sha256: str) -> Replayed:
    """Of a request that the replay's own end cut off."""
    return Replayed(index=index, due_s=due_s - start_s, sent_s=min(due_s, now_s) - start_s, first_token_s=None,
                    ended_s=now_s - start_s, prompt_tokens=None, completion_tokens=None, cached_tokens=None,
                    device_tokens=None, host_tokens=None, retries=0, outcome="aborted",
                    reason="the replay ended while it was on its way", prompt_sha256=prompt_sha256)
