"""The tier's page keys from vLLM's block hashes: it hashed the tokens of a block, we add whose bytes they are.

vLLM's hash of a block commits to all tokens before it, the adapter, the salt and the media, and not to the model.
Imports nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from hostcache.tier import Identity, KeyChain, PageKey
from hostcache.tier.keys import KEY_BYTES

GROUP_BYTES = 4
"""A hash in vLLM's block pool ends with the number of its cache group."""


def identity_of(vllm_config: Any, kv_cache_config: Any) -> Identity:
    """Everything besides the tokens that a block's bytes depend on, as far as vLLM's hash does not say it."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    return Identity(
        model=str(model.model),
        revision=str(model.revision),
        dtype=f"{model.dtype}/{spec.dtype}/{cache.cache_dtype}",
        layout="/".join(map(str, (getattr(kv_cache_config, "kv_cache_layout", None), spec.page_size_bytes,
                                  cache.prefix_caching_hash_algo, getattr(model, "quantization", None)))),
        page_tokens=int(spec.block_size),
        parallel=f"tp{parallel.tensor_parallel_size} of {parallel.world_size}",
    )


def page_key(identity_digest: bytes, block_hash: bytes) -> PageKey:
    """Of one block, from the hash that a request carries: all of a pool's hash but its last GROUP_BYTES."""
    return PageKey(blake2b(identity_digest + block_hash, digest_size=KEY_BYTES).digest())


def extended(chain: KeyChain, block_hashes: Sequence[bytes]) -> KeyChain:
    """The chain of all these blocks, of which it holds the first ones."""
    if len(block_hashes) <= len(chain):
        return chain
    more = block_hashes[len(chain) :]
    digest = chain.identity.digest
    return KeyChain(
        identity=chain.identity,
        keys=chain.keys + tuple(page_key(digest, each) for each in more),
        plain=chain.plain + tuple(bytes(each[:KEY_BYTES]) for each in more),
    )
