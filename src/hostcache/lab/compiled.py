"""Loops that numba compiles where it is installed and Python runs where it is not. Knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

Loop = TypeVar("Loop", bound=Callable[..., Any])

try:
    import numba
except ImportError:
    HAVE_NUMBA = False
else:
    HAVE_NUMBA = True


def compiled(loop: Loop) -> Loop:
    """The same function, compiled at its first call and kept on disk between runs. As it is without numba."""
    if not HAVE_NUMBA:
        return loop
    fast: Any = numba.njit(cache=True, nogil=True)(loop)
    return cast(Loop, fast)
