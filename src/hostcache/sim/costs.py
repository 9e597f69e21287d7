"""What the device takes for what it does: tokens → seconds. A frozen record of coefficients, no state.

    prefill of tokens [a, b)   prefill_token_s · (b - a) + prefill_square_s · (b² - a²)
    every admission            admission_s + prompt_token_s · prompt tokens (tokenise, match, set up)
    one decode token           step_s(active streams), piecewise linear through `decode_step_s`
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from hostcache.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """`decode_step_s`: (active streams, seconds a token and stream), ascending; beyond its ends the last slope goes on.

    `round_tokens`: (least, most) that one decode round yields a stream, each of those between at even odds (drafts
    are accepted). A round takes its mean yield times `step_s`.
    """

    prefill_token_s: float
    prefill_square_s: float = 0.0
    admission_s: float = 0.0
    prompt_token_s: float = 0.0
    decode_step_s: tuple[tuple[int, float], ...] = ((1, 0.01),)
    round_tokens: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not self.prefill_token_s > 0:
            raise ConfigError(f"prefill_token_s is {self.prefill_token_s}; a prefill rate must be over 0 and finite")
        for name in ("prefill_square_s", "admission_s", "prompt_token_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more")
        streams = [each for each, _ in self.decode_step_s]
        if not streams or streams != sorted(set(streams)) or min(step for _, step in self.decode_step_s) <= 0:
            raise ConfigError(f"decode_step_s is {self.decode_step_s}; give (streams, seconds), streams ascending")
        if not 1 <= self.round_tokens[0] <= self.round_tokens[1]:
            raise ConfigError(f"round_tokens is {self.round_tokens}; give 1 <= first <= last")

    def prefill_s(self, start: int, stop: int) -> float:
        """Seconds to compute tokens [start, stop) behind the `start` tokens that are there."""
        return self.prefill_token_s * (stop - start) + self.prefill_square_s * (stop * stop - start * start)

    def setup_s(self, prompt_tokens: int) -> float:
        """Seconds that an admission takes apart from prefill."""
        return self.admission_s + self.prompt_token_s * prompt_tokens

    def step_s(self, active: int) -> float:
        """Seconds for one token of each of `active` streams."""
        points = self.decode_step_s
        if len(points) == 1:
            return points[0][1]
        at = min(max(1, bisect_left(points, (active, 0.0))), len(points) - 1)
        (a, low), (b, high) = points[at - 1], points[at]
        return max(1e-9, low + (high - low) * (active - a) / (b - a))

    def round_s(self, active: int) -> float:
        """Seconds of one decode round of `active` streams."""
        return self.step_s(active) * (self.round_tokens[0] + self.round_tokens[1]) / 2
