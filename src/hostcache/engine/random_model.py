"""Small models with seeded random weights and a byte-level tokenizer: the whole engine in a second, for tests.

The same name gives the same bits on every machine. Weights are drawn wide enough that the best token is clear of the
second, so greedy answers do not hang on rounding.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from hostcache.engine.checkpoint import Checkpoint, expected_tensors, spec_from_config
from hostcache.engine.tokenizer import ChatTemplate, ModelTokenizer, byte_characters
from hostcache.errors import ModelError

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None,
                     "tie_word_embeddings": False},
    "tiny-qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "tiny-qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
}
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def random_checkpoint(name: str) -> Checkpoint:
    """`name`: `tiny`, `tiny-mistral`, `tiny-qwen2` or `tiny-qwen3`."""
    if name not in _VARIANTS:
        raise ModelError(f"random:{name} is not known; choose from "
                         f"{', '.join(f'random:{known}' for known in _VARIANTS)}")
    tokenizer = _byte_tokenizer()
    config = {**_BASE, **_VARIANTS[name], "vocab_size": tokenizer.vocab_size, "eos_token_id": tokenizer.eos_ids[0]}
    seed = hashlib.sha256(json.dumps(["hostcache random weights 1", name, config], sort_keys=True).encode())
    spec = spec_from_config(config, model_id=f"random:{name}", revision=seed.hexdigest(), eos_ids=tokenizer.eos_ids,
                            source=f"random:{name}")
    tensors = {key: _draw(key, shape, seed.digest()) for key, shape in expected_tensors(spec).items()}
    return Checkpoint(spec=spec, config=config, tensors=tensors, tokenizer=tokenizer)


def _draw(name: str, shape: tuple[int, ...], seed: bytes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(seed + name.encode()).digest()[:7], "little"))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return values.mul_(0.1) if name.endswith("bias") else values.mul_(0.1).add_(1.0)
    return values if name == "model.embed_tokens.weight" else values.mul_(1.5 * shape[-1] ** -0.5)


def _byte_tokenizer() -> ModelTokenizer:
    """Tokens 0 … 255 are the bytes, then three special ones."""
    vocab = {char: byte for byte, char in enumerate(byte_characters())}
    added = [{"id": 256 + index, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for index, content in enumerate(_SPECIALS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    definition = json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": vocab | {content: 256 + index for index, content in enumerate(_SPECIALS)}, "merges": []},
    })
    template = ChatTemplate(_TEMPLATE, {"eos_token": "<|im_end|>"})
    return ModelTokenizer(definition, eos_ids=(258,), template=template)
