"""The branches of a probe: conditions over measured figures, written before the run and read after it. Runs no code.

A condition is arithmetic (+ - * /), comparisons, `and`, `or`, `not`, `abs`, `min`, `max` over the names of figures and
numbers. The verdict is the first branch that holds; a probe in which none does has the verdict `undecided`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hostcache.errors import ConfigError

UNDECIDED = "undecided"

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"abs": abs, "min": min, "max": max}


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    name: str
    when: str


def check_branch(branch: Branch, figures: Sequence[str]) -> None:
    """Raises ConfigError for a condition that cannot be read, or names what is no figure."""
    try:
        _value(_parsed(branch), dict.fromkeys(figures, 1.0), branch, divides=False)
    except RecursionError:
        raise ConfigError(f"branch {branch.name}: the condition is nested too deeply; make it shorter") from None


def decide(branches: Sequence[Branch], figures: Mapping[str, float]) -> str:
    """The first branch that holds, or `undecided`. Raises ConfigError for a figure that a condition needs and that was
    not measured: a verdict is never made from half of what it was to rest on."""
    for branch in branches:
        if _value(_parsed(branch), figures, branch):
            return branch.name
    return UNDECIDED


def _parsed(branch: Branch) -> ast.expr:
    try:
        return ast.parse(branch.when.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"branch {branch.name}: {branch.when!r} is no condition; compare figures and "
                          "numbers") from None


def _value(node: ast.expr, figures: Mapping[str, float], branch: Branch, *, divides: bool = True) -> float:
    """`divides` False: what a figure will be is not known yet, so that a divisor of 0 says nothing."""
    def read(each: ast.expr) -> float:
        return _value(each, figures, branch, divides=divides)

    match node:
        case ast.Constant(value=int() | float() as number) if math.isfinite(number):
            return number
        case ast.Name(id=name):
            if name not in figures:
                raise ConfigError(f"branch {branch.name}: there is no figure {name!r}; there are "
                                  f"{', '.join(sorted(figures))}")
            return figures[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -read(inner)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not read(inner)
        case ast.BoolOp(op=kind, values=parts):
            held = [bool(read(part)) for part in parts]  # all are read: a figure that is missing is missed at once
            return all(held) if isinstance(kind, ast.And) else any(held)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _ARITHMETIC:
            try:
                return _ARITHMETIC[type(kind)](read(left), read(right))
            except ZeroDivisionError:
                if not divides:
                    return 1.0
                raise ConfigError(f"branch {branch.name}: {ast.unparse(node)} divides by 0") from None
            except OverflowError:
                raise ConfigError(f"branch {branch.name}: {ast.unparse(node)[:60]} is more than a float "
                                  "holds") from None
        case ast.Compare(left=left, ops=kinds, comparators=others) if all(type(kind) in _COMPARISONS for kind in kinds):
            values = [read(left), *map(read, others)]
            return all(_COMPARISONS[type(kind)](*pair) for kind, pair in zip(kinds, pairwise(values), strict=True))
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS and given:
            values = [read(each) for each in given]
            if (name == "abs") != (len(values) == 1):
                raise ConfigError(f"branch {branch.name}: {ast.unparse(node)} has {len(values)} values; abs takes one, "
                                  f"min and max take more")
            return _FUNCTIONS[name](*values)
    raise ConfigError(f"branch {branch.name}: {ast.unparse(node)!r} is not part of a condition; figures, numbers, "
                      "+ - * /, comparisons, and, or, not, abs, min, max are")
