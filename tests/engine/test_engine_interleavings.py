"""Any order of requests, steps, departures, resets, failing and late copies: every slot is right, books balance."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.engine.fake_model import Rig, greedy_answer, make_rig, tokens

from hostcache.engine.device import Verify
from hostcache.engine.requests import CacheLimits
from hostcache.tier import Mode
from hostcache.tier.copying import CopyJob

FATES = ("copy", "copy", "copy", "hold", "queue", "fail")


class Interleavings(RuleBasedStateMachine):
    rig: Rig

    @initialize(mode=st.sampled_from(list(Mode)), frames=st.sampled_from([10, 40, 120]), entries=st.integers(1, 6),
                slots=st.integers(1, 4), batch=st.sampled_from([3, 8, 40]), verify=st.sampled_from(list(Verify)))
    def begin(self, mode: Mode, frames: int, entries: int, slots: int, batch: int, verify: Verify) -> None:
        self.rig = make_rig(pool_pages=24, frames=frames, bank_entries=entries, slots=slots, mode=mode,
                            prefill_batch_tokens=batch, verify=verify, copy_budget_s=0.2, restore_budget_s=0.3)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.fates: list[str] = []
        if self.rig.copier is not None:
            self.rig.copier.script = self.fate

    def fate(self, job: CopyJob) -> str:
        return self.fates.pop() if self.fates else "copy"

    @rule(seed=st.integers(0, 4), length=st.integers(1, 60), answer=st.integers(1, 12), salt=st.sampled_from(["", "s"]),
          limits=st.sampled_from([CacheLimits(), CacheLimits(), CacheLimits(store=False), CacheLimits(load=False),
                                  CacheLimits(max_load_tokens=9, max_store_tokens=13, store_answer=False)]))
    def ask(self, seed: int, length: int, answer: int, salt: str, limits: CacheLimits) -> None:
        prompt = tokens(seed, length)
        self.asked[self.rig.ask(prompt, answer, salt=salt, limits=limits)] = (prompt, answer)

    @rule(data=st.data())
    def continue_a_conversation(self, data: st.DataObject) -> None:
        done = [name for name in self.asked if self.rig.finished(name) and name not in self.aborted]
        if not done:
            return
        prompt, _ = self.asked[data.draw(st.sampled_from(done))]
        longer = [*prompt, *greedy_answer(prompt, 6), 3, 1, 4]
        if len(longer) <= 80:
            self.asked[self.rig.ask(longer, 5)] = (longer, 5)

    @rule(count=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.01, 0.15]))
    def step(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.rig.step(seconds)

    @rule(fates=st.lists(st.sampled_from(FATES), max_size=5))
    def copies_will(self, fates: list[str]) -> None:
        self.fates = fates

    @rule(fate=st.sampled_from(["copy", "fail"]), data=st.data())
    def a_held_copy_ends(self, fate: str, data: st.DataObject) -> None:
        if self.rig.copier is not None and self.rig.copier.held:
            self.rig.copier.release(data.draw(st.sampled_from(self.rig.copier.held)), fate=fate)

    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        live = [name for name in self.asked if not self.rig.finished(name)]
        if live:
            name = data.draw(st.sampled_from(live))
            self.aborted.add(name)
            self.rig.engine.abort(name)

    @rule(weights_unchanged=st.sampled_from([True, True, False]))
    def reset(self, weights_unchanged: bool) -> None:
        self.rig.engine.reset(weights_unchanged=weights_unchanged)

    @invariant()
    def everything_holds(self) -> None:
        if hasattr(self, "rig"):
            self.rig.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig, self.fates = self.rig, []
        rig.run()
        if rig.copier is not None:
            rig.copier.release()
            rig.run()
        for name, (prompt, count) in self.asked.items():
            answer = greedy_answer(prompt, count)
            if name in self.aborted:
                assert rig.answer(name) == answer[: len(rig.answer(name))]
                assert rig.last(name).finish_reason in ("abort", "length")
            else:
                assert rig.answer(name) == answer
        rig.assert_at_rest()
        record = rig.engine.record()
        settled = [name for name in self.asked if rig.last(name).usage.report]
        assert record.accounting.requests == len(settled)
        assert record.accounting.aborted_before_admission == len(self.asked) - len(settled)
        assert record.accounting.prompt_tokens == sum(len(self.asked[name][0]) for name in settled)
        if record.tier is not None:
            assert (record.tier.pinned_pages, record.tier.live_reservations, record.tier.live_stores) == (0, 0, 0)
            assert (record.engine.quarantined_pages, record.tier.quarantined_frames) == (0, 0)
        rig.drain_pages()


Interleavings.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestInterleavings = Interleavings.TestCase
