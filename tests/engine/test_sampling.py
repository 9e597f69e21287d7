"""The choice of a token follows its probabilities, and nothing but the seed."""

from __future__ import annotations

from collections import Counter
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st

from hostcache.engine.requests import SamplingParams
from hostcache.engine.sampling import greedy, sample

LOGITS = torch.tensor([0.5, 3.0, 0.0, 2.0, -40.0, 3.0])


def test_temperature_zero_takes_the_best_and_draws_nothing() -> None:
    rng = Random(1)
    before = rng.getstate()
    assert sample(LOGITS, SamplingParams(temperature=0.0), rng) == 1
    assert rng.getstate() == before
    assert greedy(torch.stack((LOGITS, LOGITS.flip(0)))) == [1, 0]


@given(seed=st.integers(), temperature=st.floats(0.1, 3), top_p=st.floats(0.01, 1))
def test_a_seed_always_gives_the_same_token(seed: int, temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p)
    assert sample(LOGITS, params, Random(seed)) == sample(LOGITS, params, Random(seed))


@given(seed=st.integers())
def test_one_number_is_drawn_per_token(seed: int) -> None:
    used, counted = Random(seed), Random(seed)
    sample(LOGITS, SamplingParams(top_p=0.5), used)
    counted.random()
    assert used.getstate() == counted.getstate()


def test_draws_follow_the_probabilities() -> None:
    rng = Random(7)
    draws = 4000
    for params in (SamplingParams(), SamplingParams(temperature=2.0), SamplingParams(top_p=0.999999)):
        counts = Counter(sample(LOGITS, params, rng) for _ in range(draws))
        for token, probability in enumerate(torch.softmax(LOGITS / params.temperature, dim=-1).tolist()):
            assert abs(counts[token] / draws - probability) < 0.04


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    rng = Random(3)
    # Tokens 1 and 5 have about 0.40 each, token 3 about 0.15.
    assert {sample(LOGITS, SamplingParams(top_p=0.3), rng) for _ in range(200)} == {1}
    assert {sample(LOGITS, SamplingParams(top_p=0.6), rng) for _ in range(200)} == {1, 5}
    assert {sample(LOGITS, SamplingParams(top_p=0.9), rng) for _ in range(200)} == {1, 3, 5}


def test_a_tiny_temperature_does_not_overflow() -> None:
    assert sample(LOGITS * 1000, SamplingParams(temperature=1e-4), Random(0)) in (1, 5)
