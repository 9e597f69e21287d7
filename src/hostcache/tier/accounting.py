"""Where every prompt token came from: device, host, or computed, and then why. Serves no request.

    prompt tokens = device + host + recomputed          recomputed = Σ over reasons
    bound = what an infinite cache of whole pages, at most n − 1 tokens, would have served of the traffic so far
    bound − served = Σ of the reasons other than new, partial_page and identity

A request's account is opened at its first admission, when the bound and the state of every page in it are noted,
and settled once, at the first output token or at the end. Exact until the history overflows; after that
`bound_exact` is False and what cannot be told is `forgotten`, counted inside the bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from hostcache.errors import InvariantBroken
from hostcache.tier.history import History
from hostcache.tier.keys import KeyChain, PageKey
from hostcache.tier.notes import read_note
from hostcache.tier.reasons import OUTSIDE_BOUND, Reason


class Holdings(Protocol):
    """What the accounts ask the tier."""

    def held(self, keys: tuple[PageKey, ...]) -> list[Reason | None]: ...


@dataclass(slots=True)
class Account:
    """One request's, open until settled. `pages[i]`: why page i of the bound is in no tier (None: one holds it)."""

    request_id: str
    prompt_tokens: int
    limit: int
    pages: list[Reason | None]
    beyond: list[Reason]
    cause: Reason | None = None
    settled: bool = False

    def miss(self, reason: Reason) -> None:
        """The driver's own reason why pages that a tier holds were not used. The first one counts."""
        self.cause = self.cause or reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """Tokens of one request. `first_miss`: reason and token position of the first page that had to be computed."""

    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    bound_tokens: int
    recomputed: Mapping[Reason, int] = field(default_factory=dict)
    first_miss: tuple[Reason, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """For the answer. That the same tokens exist under another salt or adapter must not show: it reads `new`."""
        recomputed: Counter[str] = Counter()
        for reason, tokens in self.recomputed.items():
            recomputed[_public(reason).value] += tokens
        return {
            "device": self.device_tokens,
            "host": self.host_tokens,
            "recomputed": dict(recomputed),
            "first_miss": self.first_miss
            and {"reason": _public(self.first_miss[0]).value, "position": self.first_miss[1]},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingStats:
    """Totals in tokens over all settled requests. They only grow."""

    requests: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    recomputed: Mapping[Reason, int]
    bound_tokens: int
    bound_exact: bool
    recovery_device_tokens: int
    recovery_host_tokens: int
    recovery_recomputed_tokens: int
    aborted_before_admission: int

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "device_tokens": self.device_tokens,
            "host_tokens": self.host_tokens,
            "recomputed_tokens": sum(self.recomputed.values()),
            "recomputed": {reason.value: self.recomputed.get(reason, 0) for reason in Reason},
            "bound_tokens": self.bound_tokens,
            "bound_exact": self.bound_exact,
            "recovery": {
                "device_tokens": self.recovery_device_tokens,
                "host_tokens": self.recovery_host_tokens,
                "recomputed_tokens": self.recovery_recomputed_tokens,
            },
            "aborted_before_admission": self.aborted_before_admission,
        }


class Accounting:
    """The books. `cache` answers for the pages it holds; the history for those that left."""

    def __init__(self, page_tokens: int, history: History, cache: Holdings) -> None:
        self._page = page_tokens
        self._history = history
        self._cache = cache
        self._requests = 0
        self._tokens: Counter[str] = Counter()
        self._recomputed: Counter[Reason] = Counter()
        self._recovery: Counter[str] = Counter()
        self._aborted_before_admission = 0
        self._open: set[str] = set()

    def open(self, request_id: str, chain: KeyChain, prompt_tokens: int) -> Account:
        """At the request's first admission, before anything of it is computed. `chain` covers its whole pages."""
        limit = max(0, prompt_tokens - 1) // self._page
        keys = chain.keys[:limit]
        pages = self._cache.held(keys)
        # While the history is exact it knows whatever a tier holds, and need be asked for the rest only.
        asked = [i for i, reason in enumerate(pages) if reason is not None] if self._history.exact else range(limit)
        ids = self._history.ids(chain.identity.digest, [keys[i] for i in asked])
        seen = limit
        for i, note in zip(asked, self._history.notes(ids), strict=True):
            if note is None:
                seen = i
                break
            if note and pages[i] is Reason.FORGOTTEN:  # by the tier: the history knows why
                pages[i] = read_note(note)[0].reason
        del pages[seen:]
        if self._history.exact:
            elsewhere = self._history.known_elsewhere(chain, seen, limit)
            beyond = [Reason.IDENTITY if known else Reason.NEW for known in elsewhere]
        else:
            # An unknown page may have been seen and forgotten: it stays inside the bound, which is inexact now.
            pages += [Reason.FORGOTTEN] * (limit - seen)
            beyond = []
        self._open.add(request_id)
        return Account(request_id, prompt_tokens, limit, pages, beyond)

    def settle(self, account: Account, *, device_pages: int, host_pages: int) -> RequestReport:
        """At the first output token: the first `device_pages` pages came from the device, the next from the host."""
        return self._close(account, device_pages, host_pages, None)

    def abort(self, account: Account, *, device_pages: int, host_pages: int) -> RequestReport:
        """The client left before the first token: what it missed is `aborted`."""
        return self._close(account, device_pages, host_pages, Reason.ABORTED)

    def aborted_before_admission(self) -> None:
        self._aborted_before_admission += 1

    def recovered(self, *, device_tokens: int, host_tokens: int, recomputed_tokens: int) -> None:
        """A preempted request was admitted again: counted apart, its account is not touched."""
        self._recovery.update(device=device_tokens, host=host_tokens, recomputed=recomputed_tokens)

    def _close(self, account: Account, device_pages: int, host_pages: int, all_misses: Reason | None) -> RequestReport:
        if account.settled:
            raise ValueError(f"the account of request {account.request_id} is settled already")
        served = device_pages + host_pages
        if served > account.limit:
            raise InvariantBroken(
                f"request {account.request_id} was served {served} pages, of {account.prompt_tokens} tokens at most "
                f"{account.limit} can be"
            )
        account.settled = True
        self._open.discard(account.request_id)
        bound = max(len(account.pages), served)
        recomputed: Counter[Reason] = Counter()
        missed = account.pages[served:]
        if all_misses:
            missed = [all_misses] * len(missed)
        carried = account.cause or Reason.NOT_READY
        # A page that is held but lies behind one that is not cannot be used either: it shares that one's reason.
        reasons = [carried := cause or carried for cause in missed]
        reasons += account.beyond[max(0, served - len(account.pages)) :]
        for reason, run in groupby(reasons):
            recomputed[reason] += sum(self._page for _ in run)
        rest = account.prompt_tokens - account.limit * self._page
        recomputed[Reason.PARTIAL_PAGE] += rest
        first = (reasons[0] if reasons else Reason.PARTIAL_PAGE, served * self._page) if account.prompt_tokens else None
        report = RequestReport(
            prompt_tokens=account.prompt_tokens,
            device_tokens=device_pages * self._page,
            host_tokens=host_pages * self._page,
            bound_tokens=bound * self._page,
            recomputed={reason: recomputed[reason] for reason in Reason if recomputed[reason]},
            first_miss=first,
        )
        self._book(report)
        return report

    def _book(self, report: RequestReport) -> None:
        check_balance(report)
        self._requests += 1
        self._tokens.update(
            prompt=report.prompt_tokens, device=report.device_tokens, host=report.host_tokens, bound=report.bound_tokens
        )
        self._recomputed.update(report.recomputed)

    @property
    def open_accounts(self) -> int:
        return len(self._open)

    def stats(self) -> AccountingStats:
        return AccountingStats(
            requests=self._requests,
            prompt_tokens=self._tokens["prompt"],
            device_tokens=self._tokens["device"],
            host_tokens=self._tokens["host"],
            recomputed=dict(self._recomputed),
            bound_tokens=self._tokens["bound"],
            bound_exact=self._history.exact,
            recovery_device_tokens=self._recovery["device"],
            recovery_host_tokens=self._recovery["host"],
            recovery_recomputed_tokens=self._recovery["recomputed"],
            aborted_before_admission=self._aborted_before_admission,
        )


def check_balance(record: RequestReport | AccountingStats) -> None:
    """The two equations of the module, for one request or for the totals. Raises InvariantBroken with the numbers."""
    served = record.device_tokens + record.host_tokens
    recomputed = sum(record.recomputed.values())
    if served + recomputed != record.prompt_tokens:
        raise InvariantBroken(f"{served} served + {recomputed} recomputed tokens are not {record.prompt_tokens}")
    avoidable = sum(tokens for reason, tokens in record.recomputed.items() if reason not in OUTSIDE_BOUND)
    if record.bound_tokens - served != avoidable:
        raise InvariantBroken(f"bound {record.bound_tokens} − served {served} is not the {avoidable} tokens missed")


def _public(reason: Reason) -> Reason:
    return Reason.NEW if reason is Reason.IDENTITY else reason
