"""The debug mode that believes no digest: a key that stands for other tokens is never served."""

from __future__ import annotations

from tests.engine.fake_model import make_rig, tokens

from hostcache.engine.audit import TokenAudit
from hostcache.engine.device import Verify
from hostcache.tier import PageKey

KEYS = [PageKey(bytes([i]) * 16) for i in range(3)]


def test_equal_keys_with_other_tokens_end_the_hit_at_the_first_difference() -> None:
    audit = TokenAudit(2, 10)
    audit.note(KEYS, [1, 2, 3, 4, 5, 6], 0, 3)
    assert audit.agreed(KEYS, [1, 2, 3, 4, 5, 6, 7]) == 3
    assert audit.mismatches == 0
    assert audit.agreed(KEYS, [1, 2, 3, 9, 5, 6]) == 1
    assert audit.mismatches == 1


def test_the_oldest_pages_are_forgotten_and_then_believed() -> None:
    audit = TokenAudit(1, 2)
    audit.note(KEYS, [1, 2, 3], 0, 3)
    assert audit.agreed(KEYS, [9, 2, 3]) == 3
    assert audit.agreed(KEYS, [9, 2, 4]) == 2


def test_an_engine_that_compares_everything_serves_hits_and_finds_no_mismatch() -> None:
    rig = make_rig(pool_pages=16, verify=Verify.ALWAYS)
    for _ in range(3):
        for number in (1, 2, 3):
            rig.ask(tokens(number, 30), 2)
            rig.run()
    record = rig.engine.record()
    assert record.accounting.host_tokens > 0
    assert (record.transfers.token_mismatches, record.transfers.verify_failures) == (0, 0)
    rig.assert_at_rest()


def test_a_colliding_key_costs_the_hit_and_not_the_answer() -> None:
    rig = make_rig(pool_pages=64, verify=Verify.ALWAYS)
    prompt = tokens(1, 30)
    first = rig.ask(prompt, 3)
    rig.run()
    audit = rig.engine.audit
    assert audit is not None
    audit._tokens = dict.fromkeys(audit._tokens, (-1,))  # every key now stands for something else
    second = rig.ask(prompt, 3)
    rig.run()
    assert rig.answer(second) == rig.answer(first)
    assert rig.engine.record().accounting.device_tokens == 0
    assert rig.engine.record().transfers.token_mismatches > 0
