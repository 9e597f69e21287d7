"""Byte sizes as people write them: `24GiB`, `512 MB`, `1073741824`."""

from __future__ import annotations

import re

from hostcache.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int, *, name: str = "size") -> int:
    """Bytes. `KiB/MiB/GiB/TiB` (and bare `K/M/G/T`) are powers of 1024, `KB/MB/GB/TB` of 1000.

    Raises ConfigError naming `name` and the offending text.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"{name} is {text}; give 0 or more bytes, for example 24GiB")
        return text
    found = _SIZE.fullmatch(str(text))
    unit = found.group(2).lower() if found else None
    if found is None or unit not in _UNITS:
        raise ConfigError(f"{name} is {text!r}, which is not a size; write a number with a unit, for example 24GiB")
    return int(float(found.group(1)) * _UNITS[unit]) if "." in found.group(1) else int(found.group(1)) * _UNITS[unit]


def format_size(count: float) -> str:
    """A short form in powers of 1024: `1.4 GiB`, `0 B`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
