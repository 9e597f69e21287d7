"""Small models of every supported family as `transformers` makes them, and the same weights as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hostcache.engine.interfaces import Row
from hostcache.engine.model import LlamaModel

PAGE_TOKENS = 16

_SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "bos_token_id": None,
    "eos_token_id": 7, "pad_token_id": None, "head_dim": 16, "initializer_range": 0.3,
}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama-tied-biased": ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True,
                                               "mlp_bias": True}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "use_sliding_window": False}),
}


def make_directory(family: str, directory: Path, *, max_shard_size: str = "5GB") -> Any:
    """Writes the family's tiny model as a Hugging Face directory and returns the `transformers` model."""
    name, changes = FAMILIES[family]
    config = getattr(transformers, name.replace("ForCausalLM", "Config"))(**{**_SHAPE, **changes})
    torch.manual_seed(5)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1: too easy
                parameter.add_(torch.randn_like(parameter) * (0.5 if parameter_name.endswith("bias") else 0.1))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    tokenizer = train_tokenizer()
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}))
    return model


CHAT_TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
                 "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
                 "{% endif %}")


def train_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE with SmolLM's pre-tokenizer, 300 tokens, three of them special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["the model and the page, the cache and the host; return the tokens 123"] * 9,
                                  trainer)
    return tokenizer


def write_gguf(model: Any, path: Path, *, quantized: bool = False, metadata: Mapping[str, str] | None = None) -> None:
    """A Llama from `make_directory` as llama.cpp's converter writes it: q and k interleaved, tokenizer as metadata."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    definition = json.loads(train_tokenizer().to_str())
    special = {entry["content"] for entry in definition["added_tokens"]}
    tokens = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model((metadata or {}).get("model", "gpt2"))
    writer.add_tokenizer_pre((metadata or {}).get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = definition["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if f"{part}.weight" in name:
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        values = np.ascontiguousarray(values)
        if quantized and values.ndim == 2 and values.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
                         ("model.layers.", "blk."), ("input_layernorm", "attn_norm"),
                         ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
                         ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"),
                         ("post_attention_layernorm", "ffn_norm"), ("mlp.gate_proj", "ffn_gate"),
                         ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down")):
        name = name.replace(ours, theirs)
    return name


def their_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab]"""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return logits


class PagedRun:
    """A pool full of NaN and the calls a scheduler would make: what is not written must not be read."""

    def __init__(self, model: LlamaModel, pages: int, *, page_tokens: int = PAGE_TOKENS) -> None:
        spec = model.spec
        self.model = model
        self.page_tokens = page_tokens
        self.pool = torch.full((pages, spec.layers, 2, spec.kv_heads, page_tokens, spec.head_dim), float("nan"),
                               dtype=model.dtype, device=model.device)

    def step(self, *rows: tuple[Sequence[int], int, Sequence[int]]) -> torch.Tensor:
        """Rows of (tokens, start, pages)."""
        return self.model.forward([Row(tokens=tokens, start=start, pages=pages) for tokens, start, pages in rows],
                                  self.pool, self.page_tokens)

    def fill(self, tokens: Sequence[int], pages: Sequence[int], *, chunk: int) -> torch.Tensor:
        """Prefill in chunks; logits after the last."""
        for start in range(0, len(tokens), chunk):
            logits = self.step((tokens[start:start + chunk], start, pages))
        return logits
