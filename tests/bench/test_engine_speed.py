"""The comparison with transformers runs both sides on the same weights and judges what it measured."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from hostcache.bench import engine_speed


class Ticks:
    """A clock on which every reading is one second after the last."""

    def __init__(self) -> None:
        self._readings = self._count()

    def _count(self) -> Iterator[float]:
        now_s = 0.0
        while True:
            yield now_s
            now_s += 1.0

    def now(self) -> float:
        return next(self._readings)

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a measurement does not sleep")

    async def sleep_until(self, due_s: float) -> None:
        raise AssertionError("a measurement does not sleep")


def test_a_small_run_gives_a_record_for_json_and_its_table() -> None:
    threads = torch.get_num_threads()
    told: list[str] = []
    record = engine_speed.run(model="random:tiny", threads=1, pairs=2, prefill_tokens=(40, 70), chunk_tokens=32,
                              contexts=(40, 512), decode_steps=2, clock=Ticks(), progress=told.append)
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(record)) == record
    # Every turn took one tick: what a ratio counts is tokens.
    assert record["figures"] == {"prefill_ratio": 1.0, "decode_ratio": 1.0, "streams_ratio_40": 8.0,
                                 "streams_ratio_512": 8.0}
    assert record["missed"] == ["decode_ratio"]
    assert [row["ours_tokens_per_s"] for row in record["prefill"]] == [40.0, 70.0]
    table = engine_speed.table(record)
    assert "decode_ratio 1.00, bar 1.5: missed" in table
    assert "streams_ratio_512 8.00, bar 3.0: met" in table
    assert told
