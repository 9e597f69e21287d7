"""What one request wants of the tier: the object `hostcache` in its `kv_transfer_params`. Never fails a request.

Same keys and meanings as the object `hostcache` of hostcache's own server, as far as they make sense here. vLLM has
accepted the request by the time we see it, so that a key we do not know or a bad value is told in the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WHERE = "hostcache"
_FLAGS = ("store", "load", "store_answer")
_CAPS = ("max_store_tokens", "max_load_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Tokens from the start of the prompt that may be saved and restored (None: all). `asked`: the request has such an
    object and wants its report. `refused`: what of it was not understood, by key."""

    store_tokens: int | None = None
    load_tokens: int | None = None
    asked: bool = False
    refused: Mapping[str, str] | None = None


NONE = Wishes()


def wishes_of(params: Any, prompt_tokens: int) -> Wishes:
    raw = params.get(WHERE) if isinstance(params, Mapping) else None
    if raw is None:
        return NONE
    if not isinstance(raw, Mapping):
        return Wishes(asked=True, refused={WHERE: f"is {_show(raw)}; give an object"})
    refused: dict[str, str] = {}
    given: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _FLAGS:
            good, form = type(value) is bool, "true or false"
        elif name in _CAPS:
            good, form = type(value) is int and value >= 0, "a whole number of at least 0"
        else:
            refused[str(name)[:64]] = f"is not known; known are {', '.join((*_FLAGS, *_CAPS))}"
            continue
        if good:
            given[name] = value
        else:
            refused[name] = f"is {_show(value)}; give {form}"
    stores = [given.get("max_store_tokens")]
    if not given.get("store_answer", True):
        stores.append(prompt_tokens)
    if not given.get("store", True):
        stores.append(0)
    loads = [given.get("max_load_tokens"), None if given.get("load", True) else 0]
    return Wishes(store_tokens=_least(stores), load_tokens=_least(loads), asked=True, refused=refused or None)


def _least(caps: list[int | None]) -> int | None:
    return min((cap for cap in caps if cap is not None), default=None)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
