"""Picks the next token from a row of logits. Pure: the randomness is an argument."""

from __future__ import annotations

from random import Random

import torch

from hostcache.engine.requests import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them would overflow."""


def sample(logits: torch.Tensor, params: SamplingParams, rng: Random) -> int:
    """`logits` float32 [vocab]. Greedy takes the lowest id among equals and draws nothing from `rng`; else exactly one
    number is drawn per call, so a seed gives the same tokens whatever else runs."""
    if params.temperature < GREEDY_BELOW:
        return int(torch.argmax(logits))
    draw = rng.random()
    probabilities = torch.softmax(logits.double() / params.temperature, dim=-1)
    if params.top_p >= 1.0:
        return _pick(probabilities.cumsum(0), draw)
    ordered, ids = torch.sort(probabilities, descending=True, stable=True)
    sums = ordered.cumsum(0)
    # The smallest set that reaches top_p; at least one token.
    kept = min(int(torch.searchsorted(sums, params.top_p)) + 1, sums.shape[0])
    return int(ids[_pick(sums[:kept], draw)])


def greedy(logits: torch.Tensor) -> list[int]:
    """Of every row of [rows, vocab] at once."""
    ids: list[int] = torch.argmax(logits, dim=-1).tolist()
    return ids


def _pick(sums: torch.Tensor, draw: float) -> int:
    """Index whose share of the running sums the draw falls into; `sums` need not end at 1."""
    total = float(sums[-1])
    return min(int(torch.searchsorted(sums, draw * total, right=True)), sums.shape[0] - 1)
