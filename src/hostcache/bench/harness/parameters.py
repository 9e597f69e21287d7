"""A workload's parameters from a table (TOML, JSON, a pipe), strictly: an unknown name or a wrong type is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hostcache.errors import ConfigError

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], *, where: str) -> T:
    """The dataclass `cls` with the table's values, its defaults for the rest. Raises ConfigError that names `where`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass
    hints = get_type_hints(cls)
    if unknown := sorted(table.keys() - fields.keys()):
        raise ConfigError(f"{where}: {unknown[0]!r} is no parameter; they are {', '.join(fields)}")
    needed = [name for name, field in fields.items()
              if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING]
    if missing := [name for name in needed if name not in table]:
        raise ConfigError(f"{where} needs {missing[0]!r}")
    return cls(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(get_args(hint)[0], item, where) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    raise ConfigError(f"{where} is {value!r}; give {names.get(hint, 'a list' if origin is tuple else 'a table')}")
