"""What of an answer is shown, and when a restore is dearer than computing."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hostcache.engine.restores import Rates
from hostcache.engine.text import AnswerText


class Letters:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def flush(self) -> str:
        return ""


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_is_shown_is_the_text_before_the_first_stop_string(letters: list[int], stops: list[str]) -> None:
    whole = Letters().push(letters)
    text = AnswerText(Letters(), stops)
    shown, fed = "", 0
    for token in letters:
        shown += text.push((token,))
        fed += 1
        assert whole.startswith(shown)
        if text.stopped:
            break
    shown += text.flush()
    cut = min((at for stop in stops if (at := whole[:fed].find(stop)) >= 0), default=None)
    assert shown == (whole if cut is None else whole[:cut])
    assert text.stopped == (cut is not None)


def test_nothing_is_held_back_that_can_no_longer_become_a_stop_string() -> None:
    text = AnswerText(Letters(), ("abc",))
    assert text.push((0,)) == ""
    assert text.push((1,)) == ""
    assert text.push((0,)) == "ab"
    assert text.push((2,)) == "ac"


def test_a_restore_is_assumed_worth_it_until_both_speeds_were_measured() -> None:
    rates = Rates()
    assert not rates.dearer(tokens=1, copied_bytes=10**12, bytes_ahead=0)
    rates.saw_prefill(1000, 1.0)
    assert not rates.dearer(tokens=1, copied_bytes=10**12, bytes_ahead=0)
    rates.saw_restore(1000, 1.0)
    assert rates.dearer(tokens=1, copied_bytes=10**12, bytes_ahead=0)


def test_what_the_copier_must_do_first_counts_as_waiting() -> None:
    rates = Rates()
    rates.saw_prefill(1000, 1.0)
    rates.saw_restore(1000, 1.0)
    assert not rates.dearer(tokens=100, copied_bytes=90, bytes_ahead=0)
    assert rates.dearer(tokens=100, copied_bytes=90, bytes_ahead=20)


def test_old_measurements_fade_and_instant_ones_are_ignored() -> None:
    rates = Rates()
    rates.saw_prefill(100, 1.0)
    rates.saw_prefill(100, 0.0)
    assert rates.prefill_tokens_per_s == 100
    for _ in range(40):
        rates.saw_prefill(300, 1.0)
    assert 295 < (rates.prefill_tokens_per_s or 0) <= 300
