"""Keys, the place of blocks in tensors, and statistics: what needs neither vLLM nor a running pair of sides."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from tests.vllm_plugin import fakes
from tests.vllm_plugin.mini import MiniVllm

from hostcache.copiers.layout import Segment
from hostcache.errors import ConfigError
from hostcache.tier import KeyChain
from hostcache.vllm_plugin import stats
from hostcache.vllm_plugin.keys import extended, identity_of, page_key
from hostcache.vllm_plugin.layout import blocks_of, evenly_spaced
from hostcache.vllm_plugin.rates import Rates

HASHES = [bytes([i]) * 32 for i in range(5)]


def configured(**changed: Any) -> tuple[Namespace, Namespace]:
    value = {"model": "m", "revision": None, "dtype": "bfloat16", "cache_dtype": "auto", "kv_dtype": "bfloat16",
             "algo": "sha256", "tp": 1, "block": 16, "layout": "LBHNC", "page": 1024, **changed}
    vllm = Namespace(
        model_config=Namespace(model=value["model"], revision=value["revision"], dtype=value["dtype"],
                               quantization=None),
        cache_config=Namespace(cache_dtype=value["cache_dtype"], prefix_caching_hash_algo=value["algo"]),
        parallel_config=Namespace(tensor_parallel_size=value["tp"], world_size=value["tp"]))
    spec = fakes.FullAttentionSpec(block_size=value["block"], page_size_bytes=value["page"], dtype=value["kv_dtype"])
    return vllm, fakes.kv_cache_config(fakes.group(spec), kv_cache_layout=value["layout"])


def chain(**changed: Any) -> KeyChain:
    return extended(KeyChain(identity=identity_of(*configured(**changed)), keys=(), plain=()), HASHES)


@pytest.mark.parametrize("changed", [
    {"model": "other"}, {"revision": "main"}, {"dtype": "float16"}, {"cache_dtype": "fp8"}, {"kv_dtype": "float32"},
    {"algo": "sha256_cbor"}, {"tp": 2}, {"block": 32}, {"layout": "BLHNC"}, {"page": 2048},
], ids=str)
def test_blocks_of_another_model_type_or_layout_share_no_key(changed: dict[str, Any]) -> None:
    assert not set(chain().keys) & set(chain(**changed).keys)


def test_keys_are_the_same_in_every_process_and_after_every_restart() -> None:
    assert chain().keys == chain().keys
    assert chain().keys[2].hex() == "a807de66739674abcbae9e3a5c9ac2cc"


def test_a_chain_grows_with_a_request_and_each_key_is_that_of_its_block_in_the_pool() -> None:
    grown = extended(extended(chain().prefix(0), HASHES[:2]), HASHES)
    assert grown == chain()
    assert extended(grown, HASHES[:3]) is grown
    assert grown.keys[3] == page_key(grown.identity.digest, HASHES[3])


@dataclass
class Tensor:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 4


def test_layers_outermost_are_segments_of_one_distance() -> None:
    layers = {f"layer {i}": Tensor(1000 + i * 6144, (24, 2, 32, 1), (64, 32, 1, 1)) for i in range(3)}
    blocks = blocks_of(layers, 24)
    assert (blocks.count, blocks.block_bytes) == (24, 3 * 256)
    assert evenly_spaced(blocks.layout.segments) == (1000, 3, 6144)


def test_blocks_outermost_over_all_layers_are_one_segment() -> None:
    layers = {f"layer {i}": Tensor(1000 + i * 256, (24, 2, 32, 1), (3 * 64, 32, 1, 1)) for i in range(3)}
    blocks = blocks_of(layers, 24)
    assert blocks.layout.segments == (Segment(1000, 768, 768),)
    assert evenly_spaced(blocks.layout.segments) == (1000, 1, 0)


def test_layers_that_share_a_tensor_count_once() -> None:
    one = Tensor(1000, (24, 2, 32, 1), (64, 32, 1, 1))
    assert blocks_of({"a": one, "b": one}, 24).block_bytes == 256


@pytest.mark.parametrize(("tensor", "message"), [
    (Tensor(0, (2, 24, 32, 1), (24 * 32, 32, 1, 1)), "its outermost dimension is not the 24 blocks"),
    (Tensor(0, (24, 2, 32, 1), (128, 64, 1, 1)), "a block is not in one piece"),
    ([1, 2], "the KV cache of layer a is list, not one tensor"),
])
def test_a_layout_that_is_not_known_is_refused_in_one_line(tensor: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        blocks_of({"a": tensor}, 24)


def test_uneven_layers_are_refused_by_the_thread_copier() -> None:
    layers = {f"layer {i}": Tensor(1000 + at, (24, 2, 32, 1), (64, 32, 1, 1)) for i, at in enumerate((0, 9000, 30000))}
    with pytest.raises(ConfigError, match="layer 2 of the KV cache lies at"):
        evenly_spaced(blocks_of(layers, 24).layout.segments)


def test_a_restore_is_dearer_only_when_both_speeds_are_known_and_it_would_take_longer() -> None:
    rates = Rates()
    assert not rates.dearer(tokens=1, copied_bytes=1 << 40, bytes_ahead=0)
    rates.saw_prefill(1000, 1.0)
    rates.saw_restore(1 << 20, 1.0)
    assert not rates.dearer(tokens=1000, copied_bytes=1 << 19, bytes_ahead=1 << 18)
    assert rates.dearer(tokens=1000, copied_bytes=1 << 19, bytes_ahead=1 << 20)


def test_a_restore_is_waited_for_no_longer_than_computing_takes_nor_than_four_times_its_copy() -> None:
    """Twenty thousand tokens of a 70B model: 6 GiB, which no default of 0.5 s would let pass at 4 GiB/s."""
    what = {"tokens": 20_000, "copied_bytes": 6 << 30, "bytes_ahead": 0}
    rates = Rates()
    assert rates.patience_s(least_s=0.5, **what) == 0.5
    rates.saw_prefill(2000, 1.0)
    assert rates.patience_s(least_s=0.5, **what) == 10.0
    rates.saw_restore(4 << 30, 1.0)
    assert rates.patience_s(least_s=0.5, **what) == 6.0
    assert rates.patience_s(least_s=0.5, **{**what, "bytes_ahead": 2 << 30}) == 8.0
    assert rates.patience_s(least_s=0.5, **{**what, "bytes_ahead": 60 << 30}) == 10.0
    assert rates.patience_s(least_s=0.5, tokens=200, copied_bytes=6 << 20, bytes_ahead=0) == 0.5
    only_copies = Rates()
    only_copies.saw_restore(4 << 30, 1.0)
    assert only_copies.patience_s(least_s=0.5, **what) == 6.0


def test_changes_add_up_to_what_the_tier_says_and_gauges_are_as_they_are() -> None:
    mini, changes = MiniVllm(), stats.Changes()
    total: dict[str, float] = {}
    for name in [*range(6), *range(6)]:
        mini.ask([*[name] * 32, name])
        total = stats.merged(total, changes.take(stats.metrics(mini.side)))
    assert changes.take(stats.metrics(mini.side)) == {}
    assert total["hostcache_restore_bytes"] == mini.side.tier.stats().counters.restore_bytes > 0
    assert total["hostcache_evicted_saved_pages"] == mini.side.counters.saved_pages
    times = {name: count for name, count in total.items() if stats.is_histogram(name)}
    assert sum(times.values()) == total["hostcache_restores"] > 0
    assert all(float(name.partition("|")[2]) >= 0 for name in times)
    assert total["hostcache_cached_tokens|host"] == mini.side.accounting.stats().host_tokens
    assert total["hostcache_resident_bytes"] == mini.side.tier.stats().resident_pages


def test_every_metric_that_can_change_is_known_beforehand() -> None:
    mini = MiniVllm()
    known = {family.name: family for family in stats.known()}
    for family in stats.metrics(mini.side):
        assert known[family.name].samples.keys() == family.samples.keys()
