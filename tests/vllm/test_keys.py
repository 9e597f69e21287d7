"""What a key commits to, with vLLM's own hashes: the salt, the adapter, the tokens before. No engine runs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.vllm.engine import BLOCK, prompt

from hostcache.tier import Identity, KeyChain, PageKey
from hostcache.tier.keys import KEY_BYTES
from hostcache.vllm_plugin.keys import extended

pytestmark = pytest.mark.vllm

MODEL = Identity(model="m", revision="1", dtype="float32", layout="LBHNC", page_tokens=BLOCK)


def keys(*, salt: str | None = None, adapter: str | None = None, path: str = "/a", seed: int = 1,
         model: Identity = MODEL) -> tuple[PageKey, ...]:
    """Of a prompt of four blocks."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    lora: Any = None if adapter is None else LoRARequest(adapter, 1, path)
    request = Request("r", prompt(seed, 4 * BLOCK + 1), SamplingParams(), None, lora_request=lora, cache_salt=salt,
                      block_hasher=get_request_block_hasher(BLOCK, sha256))
    return extended(KeyChain(identity=model, keys=(), plain=()), request.block_hashes).keys


def test_different_salts_adapters_models_and_prompts_share_no_key_and_equal_ones_share_all() -> None:
    """Among them a salt that is called like an adapter, which must not pass for it."""
    import dataclasses

    kinds: list[dict[str, Any]] = [
        {}, {"salt": "x"}, {"salt": "y"}, {"adapter": "x"}, {"adapter": "y"}, {"adapter": "x", "path": "/b"},
        {"salt": "x", "adapter": "x"}, {"salt": "y", "adapter": "x"}, {"seed": 2},
        {"model": dataclasses.replace(MODEL, revision="2")}, {"model": dataclasses.replace(MODEL, dtype="bfloat16")}]
    for one, other in itertools.combinations(kinds, 2):
        assert not set(keys(**one)) & set(keys(**other)), (one, other)
    for kind in kinds:
        assert keys(**kind) == keys(**kind)
        assert {len(key) for key in keys(**kind)} == {KEY_BYTES} == {16}


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="vLLM takes the seed of its hashes from PYTHONHASHSEED")
def test_another_process_makes_the_same_keys_byte_for_byte() -> None:
    """As a restart does. Python's own hashes differ between the two."""
    code = "from tests.vllm.test_keys import keys; print([key.hex() for key in keys(salt='x', adapter='y')])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert there.stdout.splitlines()[-1] == str([key.hex() for key in keys(salt="x", adapter="y")])
