"""A workload as distributions: read strictly, drawn by quantile."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.profiles import Profile, draw, profile_json, quantiles, read_profile

CODING = Profile(
    name="coding agents", start_tokens=(8000, 30_000, 90_000), growth_tokens=(200, 1600, 6000),
    reply_tokens=(20, 100, 900), gap_s=(2, 10, 60), turns=(1, 20, 200), sessions=4, compact_one_in=200)  # fmt: skip


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_json(CODING))
    assert read_profile(path) == CODING


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "not a profile of version 1"),
        ({"colour": "red"}, "'colour' is no field of a profile"),
        ({"sessions": 0}, "sessions is 0; give at least 1"),
        ({"sessions": "four"}, "sessions is 'four'; give one of type int"),
        ({"gap_s": [5, 1]}, r"gap_s is \[5.0, 1.0\]…; give finite quantiles in ascending order"),
        ({"start_tokens": []}, "start_tokens is"),
        ({"start_tokens": [0, 5]}, "the first at least 1"),
        ({"growth_tokens": ["a"]}, "growth_tokens is .*; give a list of numbers"),
        ({"compact_share": 0}, "compact_share is 0"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**json.loads(profile_json(CODING)), **change}))
    with pytest.raises(ConfigError, match=message) as refused:
        read_profile(path)
    assert "\n" not in str(refused.value)


def test_a_missing_field_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="cannot read the profile"):
        read_profile(path)
    path.write_text('{"version": 1, "name": "empty"}')
    with pytest.raises(ConfigError, match="start_tokens"):
        read_profile(path)
    path.write_text("not json")
    with pytest.raises(ConfigError, match="is not a profile"):
        read_profile(path)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(0, 99))
def test_a_draw_lies_between_the_least_and_the_greatest(values: list[float], seed: int) -> None:
    ordered = quantiles(values)
    assert min(values) - 1e-6 <= draw(ordered, Random(seed)) <= max(values) + 1e-6


def test_draws_follow_the_quantiles() -> None:
    rng = Random(1)
    drawn = [draw((0.0, 10.0, 1000.0), rng) for _ in range(4000)]
    assert sum(value <= 5 for value in drawn) == pytest.approx(1000, rel=0.1)
    assert sum(value <= 10 for value in drawn) == pytest.approx(2000, rel=0.1)
    assert sum(value <= 505 for value in drawn) == pytest.approx(3000, rel=0.1)


def test_no_values_have_no_quantiles() -> None:
    with pytest.raises(ValueError, match="no values"):
        quantiles([])
