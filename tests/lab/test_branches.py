"""Conditions over figures: arithmetic and nothing else."""

from __future__ import annotations

import pytest

from hostcache.errors import ConfigError
from hostcache.lab.branches import UNDECIDED, Branch, check_branch, decide

FIGURES = {"engine": 0.0383, "model": 0.0387, "bound": 0.1687}


@pytest.mark.parametrize(("when", "holds"), [
    ("engine <= 0.08", True),
    ("engine >= 0.12", False),
    ("abs(engine - model) <= 0.005 and engine <= bound", True),
    ("engine > bound or not model < 1", False),
    ("0 <= engine < model < bound", True),
    ("max(engine, model) / bound > 0.2", True),
    ("min(engine, model, bound) == engine", True),
    ("-engine + 2 * model > 0", True),
])
def test_a_condition_says_what_it_says(when: str, holds: bool) -> None:
    assert decide([Branch(name="it", when=when)], FIGURES) == ("it" if holds else UNDECIDED)


def test_the_first_branch_that_holds_is_the_verdict() -> None:
    branches = [Branch(name="above", when="engine > bound"), Branch(name="near", when="abs(engine - model) < 0.005"),
                Branch(name="any", when="engine >= 0")]
    assert decide(branches, FIGURES) == "near"


@pytest.mark.parametrize("when", [
    "__import__('os')", "engine.real > 0", "engine[0]", "lambda: 1", "'a' == 'a'", "engine if 1 else 2",
    "abs(engine, 1)", "min(engine)", "engine ** 9", "exec('1')", "[engine]", "engine is model", "True and engine()",
    "1e999 > engine",
])
def test_what_is_no_condition_is_refused_before_anything_runs(when: str) -> None:
    with pytest.raises(ConfigError, match="branch it: "):
        check_branch(Branch(name="it", when=when), sorted(FIGURES))


def test_a_divisor_is_looked_at_when_its_figures_are_known() -> None:
    """`bound - model` is 0 for nobody but who tries it with the same number for both."""
    share = Branch(name="it", when="(engine - model) / (bound - model) < 0.5")
    check_branch(share, sorted(FIGURES))
    assert decide([share], FIGURES) == "it"


@pytest.mark.parametrize("when", ["0" + "+0" * 3000 + " > 1", "9" * 400 + " / 3 > engine", "not " * 3000 + "engine"])
def test_what_no_float_or_stack_holds_is_refused_in_one_line(when: str) -> None:
    with pytest.raises(ConfigError, match="branch it: "):
        check_branch(Branch(name="it", when=when), sorted(FIGURES))


def test_a_missing_figure_and_a_division_by_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no figure 'hits'; there are bound, engine, model"):
        decide([Branch(name="it", when="hits > 0")], FIGURES)
    with pytest.raises(ConfigError, match="divides by 0"):
        decide([Branch(name="it", when="1 / (engine - engine) > 0")], FIGURES)
    with pytest.raises(ConfigError, match="is no condition"):
        decide([Branch(name="it", when="engine >")], FIGURES)
