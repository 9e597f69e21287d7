"""Every error a user can meet, and the exit code of a command that ends with it. Knows nothing of what raises them.

HostCacheError                 1   something went wrong; the message is one line with the value and the way out
├── ConfigError                2   a setting, flag or argument is wrong
├── ModelError                 4   the model cannot be found, read or is not supported
├── MemoryRefused              5   a quota or pool cannot be met on this machine
├── ServerError                6   an address is taken, a server does not answer or is not what was expected
├── MissingDependency          7   an extra is not installed
├── RequestRefused             -   a request was wrong (becomes HTTP 400/404/413, never an exit)
└── InvariantBroken            8   `check()` found a state that must not exist

Being full, missing or late is an answer (see `tier.Refused`), never an exception.
Exit code 3 is not an error: it says that a bar was missed under `--strict`.
"""

from __future__ import annotations

from typing import ClassVar


class HostCacheError(Exception):
    """Root of the tree. `str(error)` is the whole one-line message."""

    exit_code: ClassVar[int] = 1


class ConfigError(HostCacheError):
    exit_code = 2


class ModelError(HostCacheError):
    exit_code = 4


class MemoryRefused(HostCacheError):
    exit_code = 5


class ServerError(HostCacheError):
    exit_code = 6


class MissingDependency(HostCacheError):
    exit_code = 7


class InvariantBroken(HostCacheError):
    exit_code = 8


class RequestRefused(HostCacheError):
    """The client's own mistake: `status` is the HTTP status, `code` and `param` go into OpenAI's error shape."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error",
                 param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


BARS_MISSED = 3
"""Exit code of `demo`, `bench` and `lab` under `--strict` when a bar was missed."""
