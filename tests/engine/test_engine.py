"""The engine without pressure: answers, text, ends, seeds, refusals, reports. Fingerprints guard every slot."""

from __future__ import annotations

import pytest
from tests.engine.fake_model import FakeTokenizer, greedy_answer, logits_of, make_rig, tokens

from hostcache.engine.requests import GenerationRequest, SamplingParams
from hostcache.errors import RequestRefused
from hostcache.tier import Mode


def test_an_answer_is_what_the_model_says_whatever_the_chunks() -> None:
    for batch in (1, 3, 16, 1000):
        rig = make_rig(prefill_batch_tokens=batch)
        rig.serve(tokens(1, 53), 9)
        rig.assert_at_rest()


def test_every_token_comes_in_an_event_of_its_own_and_the_last_one_says_why_it_ended() -> None:
    rig = make_rig()
    name = rig.ask(tokens(1, 10), 5)
    rig.run()
    assert [len(event.token_ids) for event in rig.events[name]] == [1] * 5
    assert [event.finish_reason for event in rig.events[name]] == [None] * 4 + ["length"]
    assert rig.text(name) == FakeTokenizer().decode(rig.answer(name))
    assert [event.usage.completion_tokens for event in rig.events[name]] == [1, 2, 3, 4, 5]


def test_the_report_is_there_from_the_first_token_on() -> None:
    rig = make_rig()
    rig.serve(tokens(1, 41), 1)
    name = rig.ask(tokens(1, 41), 3)
    rig.run()
    for event in rig.events[name]:
        assert event.usage.cached_tokens == 40
        assert event.usage.report["device"] == 40
        assert event.usage.report["recomputed"] == {"partial_page": 1}


def test_requests_of_one_step_decode_together_while_another_prefills() -> None:
    rig = make_rig(prefill_batch_tokens=8)
    early = [rig.ask(tokens(n, 6), 12) for n in (1, 2)]
    rig.step()
    rig.step()
    late = rig.ask(tokens(3, 40), 4)
    rig.run()
    mixed = [batch for batch in rig.model.batches if len(batch) == 3]
    assert any(sorted(count for count, _ in batch)[:2] == [1, 1] and max(count for count, _ in batch) > 1
               for batch in mixed)
    for number, name in enumerate([*early, late], 1):
        prompt = tokens(number, 40 if name == late else 6)
        assert rig.answer(name) == greedy_answer(prompt, len(rig.answer(name)))
    rig.assert_at_rest()


def test_prefill_never_exceeds_its_budget_in_a_step() -> None:
    rig = make_rig(prefill_batch_tokens=8, slots=8)
    for number in range(6):
        rig.ask(tokens(number, 20), 3)
    rig.run()
    for batch in rig.model.batches:
        assert sum(count for count, _ in batch if count > 1) <= 8


def test_a_stop_string_ends_the_answer_and_is_not_shown_even_when_it_comes_in_pieces() -> None:
    prompt = tokens(4, 12)
    whole = FakeTokenizer().decode(greedy_answer(prompt, 12))
    stop = whole[5:8]
    at = whole.find(stop)
    rig = make_rig()
    name = rig.ask(prompt, 12, stop=(stop, "§"))
    rig.run()
    assert rig.text(name) == whole[:at]
    assert rig.last(name).finish_reason == "stop"
    assert len(rig.answer(name)) == at + 3


def test_what_might_become_a_stop_string_is_shown_in_the_end_when_it_did_not() -> None:
    prompt = tokens(4, 12)
    whole = FakeTokenizer().decode(greedy_answer(prompt, 6))
    rig = make_rig()
    name = rig.ask(prompt, 6, stop=(whole[-2:] + "§",))
    rig.run()
    assert rig.text(name) == whole
    assert rig.last(name).finish_reason == "length"


def prompt_that_ends_at_once() -> list[int]:
    return next(tokens(seed, 9) for seed in range(1000) if greedy_answer(tokens(seed, 9), 1) == [0])


def test_the_end_token_ends_the_answer_unless_ignored() -> None:
    prompt = prompt_that_ends_at_once()
    rig = make_rig()
    name = rig.ask(prompt, 8, ignore_eos=False)
    other = rig.ask(prompt, 8)
    rig.run()
    assert (rig.answer(name), rig.text(name), rig.last(name).finish_reason) == ([0], "", "stop")
    assert rig.answer(other) == greedy_answer(prompt, 8)
    rig.assert_at_rest()


def test_a_seed_gives_the_same_answer_whatever_else_runs() -> None:
    alone, crowd = make_rig(seed=3), make_rig(seed=4)
    first = alone.ask(tokens(1, 20), 10, temperature=1.0, seed=11)
    alone.run()
    others = [crowd.ask(tokens(n, 9), 12, temperature=1.0) for n in (5, 6)]
    second = crowd.ask(tokens(1, 20), 10, temperature=1.0, seed=11)
    crowd.run()
    assert alone.answer(first) == crowd.answer(second)
    assert crowd.answer(others[0]) != crowd.answer(others[1])


def test_without_a_seed_the_engines_own_stream_decides_and_is_reproducible() -> None:
    def three(seed: int) -> list[list[int]]:
        rig = make_rig(seed=seed)
        names = [rig.ask(tokens(1, 20), 10, temperature=1.0) for _ in range(3)]
        rig.run()
        return [rig.answer(name) for name in names]

    assert three(7) == three(7)
    assert three(7) != three(8)
    assert len({tuple(answer) for answer in three(7)}) == 3


def test_traced_logits_tell_digest_and_margin_of_every_token() -> None:
    rig = make_rig()
    prompt = tokens(1, 10)
    name = rig.ask(prompt, 3, trace=True)
    again = rig.ask(prompt, 3, trace=True)
    plain = rig.ask(prompt, 3)
    rig.run()
    traces = [trace for event in rig.events[name] for trace in event.logits]
    assert len(traces) == 3
    assert traces == [trace for event in rig.events[again] for trace in event.logits]
    assert all(trace.margin >= 0 for trace in traces)
    assert len({trace.digest for trace in traces}) == 3
    assert not any(event.logits for event in rig.events[plain])
    assert logits_of(1).shape == (97,)


@pytest.mark.parametrize(("prompt", "answer", "numbers"), [
    (0, 4, "empty"),
    (10, 0, "max_tokens is 0"),
    (60, 5, r"60 tokens \+ max_tokens 5 = 65 is over the context of 64"),
])
def test_what_can_never_fit_is_refused_with_the_numbers(prompt: int, answer: int, numbers: str) -> None:
    rig = make_rig(max_context=64)
    with pytest.raises(RequestRefused, match=numbers) as refusal:
        rig.ask(tokens(1, prompt), answer)
    assert refusal.value.status == 400
    assert rig.engine.idle


def test_a_request_larger_than_the_pool_is_refused_with_the_pages() -> None:
    rig = make_rig(pool_pages=8, max_context=1000)
    with pytest.raises(RequestRefused, match="needs 9 pages of 4 tokens, the pool has 8"):
        rig.ask(tokens(1, 30), 4)
    rig.serve(tokens(1, 29), 4)


def test_a_prompt_of_one_token_and_an_answer_of_one_token_work() -> None:
    rig = make_rig()
    rig.serve([5], 1)
    rig.serve([5], 1)
    rig.serve(tokens(1, 4), 1)
    rig.assert_at_rest()


def test_an_id_that_is_in_use_ends_with_an_error_and_disturbs_nobody() -> None:
    rig = make_rig()
    rig.ask(tokens(1, 10), 4, name="same")
    first = rig.events["same"]
    rig.ask(tokens(2, 10), 4, name="same")
    second = rig.events["same"]
    rig.run()
    assert first[-1].finish_reason == "length"
    assert [event.finish_reason for event in second] == ["error"]


def test_a_receiver_that_raises_loses_its_request_only() -> None:
    rig = make_rig()

    def broken(event: object) -> None:
        raise ValueError("nobody home")

    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    rig.engine.submit(GenerationRequest(request_id="b", prompt=(1, 2, 3), sampling=params), broken)
    other = rig.ask(tokens(1, 10), 6)
    rig.run()
    assert rig.answer(other) == greedy_answer(tokens(1, 10), 6)
    assert rig.engine.record().engine.requests_aborted == 1
    assert "event_not_taken" in [event for event, _ in rig.log]
    rig.assert_at_rest()


def test_with_no_pressure_no_byte_moves_and_the_output_is_that_of_an_engine_without_tier() -> None:
    def run(mode: Mode) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        rig = make_rig(pool_pages=256, bank_entries=24, mode=mode)
        history = tokens(1, 30)
        answers = []
        for turn in range(6):
            side = rig.ask(tokens(50 + turn, 9), 4)
            main = rig.ask(history, 6)
            rig.run()
            answers += [rig.answer(side), rig.answer(main)]
            history = [*history, *rig.answer(main), *tokens(90 + turn, 5)]
        rig.assert_at_rest()
        record = rig.engine.record()
        assert (record.tier is None) == (mode is Mode.OFF)
        if record.tier is not None:
            counters = record.tier.counters
            assert (counters.store_bytes, counters.restore_bytes, counters.stores_issued) == (0, 0, 0)
            assert (record.tier.counters.evict_waits, record.transfers.prefill_holds) == (0, 0)
        return answers, rig.model.batches

    assert run(Mode.ON_PRESSURE) == run(Mode.OFF)


def test_a_turn_hits_prompt_and_answer_up_to_the_last_whole_page() -> None:
    rig = make_rig()
    prompt = tokens(1, 21)
    answer = greedy_answer(prompt, 6)
    rig.serve(prompt, 6)
    event = rig.serve([*prompt, *answer, 1, 2, 3], 2)
    assert event.usage.device_tokens == 24, "26 slots were written: the 27th token was only sampled"


def test_the_books_balance_with_the_tier_off_too() -> None:
    rig = make_rig(mode=Mode.OFF, pool_pages=16)
    for number in (1, 2, 3, 1):
        rig.serve(tokens(number, 30), 3)
    record = rig.engine.record()
    assert record.tier is None
    assert record.accounting.requests == 4
    assert record.accounting.bound_tokens == 28
    assert {reason.value for reason in record.accounting.recomputed} == {"new", "partial_page", "tier_off"}
    body = record.as_json(uptime_s=1.0, rss_bytes=2)
    assert body["host_cache"] is None
    assert body["host_cache_config"] is None


def test_salts_never_share_and_equal_salts_do() -> None:
    rig = make_rig()
    prompt = tokens(1, 30)
    rig.serve(prompt, 2, salt="a")
    assert rig.serve(prompt, 2, salt="b").usage.cached_tokens == 0
    assert rig.serve(prompt, 2).usage.cached_tokens == 0
    assert rig.serve(prompt, 2, salt="a").usage.cached_tokens == 28


def test_a_reset_forgets_the_device_and_what_runs_goes_on_unharmed() -> None:
    rig = make_rig()
    rig.serve(tokens(1, 30), 2)
    running = rig.ask(tokens(2, 30), 8)
    for _ in range(4):
        rig.step()
    rig.engine.reset(weights_unchanged=False)
    rig.run()
    assert rig.answer(running) == greedy_answer(tokens(2, 30), 8)
    assert rig.serve(tokens(1, 30), 2).usage.cached_tokens == 0
    assert rig.serve(tokens(2, 30), 2).usage.cached_tokens == 0, "it was computed before the reset"
    rig.drain_pages()


def test_metrics_and_stats_name_what_the_record_says() -> None:
    rig = make_rig(pool_pages=16)
    for number in (1, 2, 3, 1):
        rig.serve(tokens(number, 30), 3)
    record = rig.engine.record()
    body = record.as_json(uptime_s=1.5, rss_bytes=2)
    assert body["engine"]["uptime_s"] == 1.5
    assert body["host_cache"]["restore_latency"]["count"] == body["host_cache"]["restores"] == 1
    assert body["host_cache"]["restore_submissions"] + body["host_cache"]["store_submissions"] == \
        body["host_cache"]["copy_submissions"]
    text = record.metrics_text(uptime_s=1.5, rss_bytes=2)
    assert "hostcache_restore_latency_seconds_count 1\n" in text
    samples = [line.split(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples))
