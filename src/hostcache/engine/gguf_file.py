"""Reads a GGUF file as a checkpoint: dequantized tensors under Hugging Face names, tokenizer rebuilt from metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch

from hostcache.engine.checkpoint import SUPPORTED, Checkpoint, check_tensors, spec_from_config
from hostcache.engine.tokenizer import ChatTemplate, ModelTokenizer
from hostcache.errors import ModelError

_ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2"),
                  "qwen3": ("Qwen3ForCausalLM", "qwen3")}
_HASH_CHUNK_BYTES = 1 << 22
_DEQUANTIZE_BYTES = 1 << 17
_CONTROL, _USER_DEFINED = 3, 4  # token types

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_IN_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
             "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

_LLAMA3_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+")
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, {"type": "GPT-2"}],
    "gpt-2": [{"type": "GPT-2"}],
    "gpt2": [{"type": "GPT-2"}],
    "default": [{"type": "GPT-2"}],
    "llama-bpe": [{"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}],
    "llama3": [{"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False}],
    "qwen2": [{"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}],
}


def read_gguf(path: Path, *, model_id: str | None = None) -> Checkpoint:
    """Raises ModelError for what is missing, broken or not supported."""
    try:
        reader = _Reader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as GGUF ({error}); fetch it again") from error
    metadata = _Metadata(reader, path)
    architecture = str(metadata["general.architecture"])
    if architecture not in _ARCHITECTURES:
        raise ModelError(f"architecture {architecture} of {path} is not supported; supported: {SUPPORTED}")
    tensors = _LazyTensors(reader, path, permuted=architecture == "llama",
                           heads=metadata.number(f"{architecture}.attention.head_count"),
                           kv_heads=_kv_heads(metadata, architecture))
    config = _config(metadata, architecture, tensors)
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    eos_ids = _eos_ids(metadata, tokens)
    template_source = metadata.get("tokenizer.chat_template")
    specials = {f"{name}_token": tokens[token_id] for name, key in
                (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("unk", "unknown_token_id"),
                 ("pad", "padding_token_id"))
                if isinstance(token_id := metadata.get(f"tokenizer.ggml.{key}"), int) and token_id < len(tokens)}
    template = ChatTemplate(str(template_source), specials) if template_source else None
    tokenizer = ModelTokenizer(_tokenizer_definition(metadata, tokens, path), eos_ids=eos_ids, template=template)
    spec = spec_from_config(config, model_id=model_id or path.stem, revision=file_sha256(path), eos_ids=eos_ids,
                            source=str(path))
    check_tensors(spec, tensors.shapes, str(path))
    return Checkpoint(spec=spec, config=config, tensors=tensors, tokenizer=tokenizer)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as opened:
        while chunk := opened.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


class _Reader(gguf.GGUFReader):
    """Reads metadata through a plain array: through a memmap, each of 250,000 small slices costs ten times as much."""

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.data, np.memmap):
            self.data = cast(Any, self.data.view(np.ndarray))
        return super()._get(*args, **kwargs)


class _Metadata:
    def __init__(self, reader: Any, path: Path) -> None:
        self._fields = reader.fields
        self._path = path

    def get(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._path} lacks {key}; it is no complete language model, fetch it again")
        return value

    def number(self, key: str) -> int:
        value = self[key]
        if not isinstance(value, int):
            raise ModelError(f"{key} of {self._path} is {value!r}, not one whole number; layers of different shape "
                             f"are not supported (supported: {SUPPORTED})")
        return value


class _LazyTensors(Mapping[str, torch.Tensor]):
    """Dequantized to float32 when looked up; rows of q and k put back into Hugging Face's order where needed."""

    def __init__(self, reader: Any, path: Path, *, permuted: bool, heads: int, kv_heads: int) -> None:
        self._path = path
        self._heads_of = {"q_proj": heads, "k_proj": kv_heads} if permuted else {}
        self._tensors: dict[str, Any] = {}
        self.rope_factors: tuple[float, ...] | None = None
        for tensor in reader.tensors:
            if tensor.name == "rope_freqs.weight":
                self.rope_factors = tuple(float(value) for value in np.array(tensor.data).reshape(-1))
            else:
                self._tensors[_hugging_face_name(tensor.name)] = tensor
        self.shapes = {name: tuple(int(size) for size in reversed(tensor.shape))
                       for name, tensor in self._tensors.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        try:
            # Blocks lie inside rows, and the package goes through 16 rows at a time: few long rows are faster.
            rows = max(1, tensor.data.size // _DEQUANTIZE_BYTES)
            while tensor.data.shape[0] % rows:
                rows -= 1
            values = gguf.quants.dequantize(tensor.data.reshape(rows, -1), tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"tensor {tensor.name} of {self._path} cannot be dequantized ({error}); take another "
                             "quantization of this model") from error
        values = np.asarray(values, dtype=np.float32).reshape(self.shapes[name])
        module = name.rpartition(".")[0].rpartition(".")[2]
        if module in self._heads_of:
            # llama.cpp interleaves the two halves of each head for its own rotation.
            shape = values.shape
            values = values.reshape(self._heads_of[module], -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{parts[3]}"
    return name


def _kv_heads(metadata: _Metadata, architecture: str) -> int:
    key = f"{architecture}.attention.head_count_kv"
    return metadata.number(key if metadata.get(key) is not None else f"{architecture}.attention.head_count")


def _config(metadata: _Metadata, architecture: str, tensors: _LazyTensors) -> dict[str, Any]:
    name, model_type = _ARCHITECTURES[architecture]
    heads = metadata.number(f"{architecture}.attention.head_count")
    hidden_size = metadata.number(f"{architecture}.embedding_length")
    # float32 in the file; the shortest decimal that reads back as the same float32 is what the author wrote.
    epsilon = float(str(np.float32(metadata[f"{architecture}.attention.layer_norm_rms_epsilon"])))
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.number(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": metadata.number(f"{architecture}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(metadata, architecture),
        "head_dim": metadata.get(f"{architecture}.attention.key_length") or hidden_size // heads,
        "max_position_embeddings": metadata.number(f"{architecture}.context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": float(metadata.get(f"{architecture}.rope.freq_base") or 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    shape = tensors.shapes.get("model.embed_tokens.weight")
    if shape is not None:
        config["vocab_size"] = shape[0]  # padded beyond the tokens in some files
    if architecture == "llama" and "model.layers.0.self_attn.q_proj.bias" in tensors:
        config["attention_bias"] = True
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    scaling = metadata.get(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none"):
        config["rope_scaling"] = {"rope_type": str(scaling)}
    elif tensors.rope_factors is not None:
        config["rope_scaling"] = {"rope_type": "factors", "factors": tensors.rope_factors}
    for key, ours in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"),
                      ("padding_token_id", "pad_token_id")):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            config[ours] = value
    return config


def _eos_ids(metadata: _Metadata, tokens: list[str]) -> tuple[int, ...]:
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    return tuple(dict.fromkeys(int(value) for value in ids if value is not None and value < len(tokens)))


def _tokenizer_definition(metadata: _Metadata, tokens: list[str], path: Path) -> str:
    """A `tokenizer.json` with the same tokens, merges and pre-tokenizer."""
    model = metadata["tokenizer.ggml.model"]
    if model != "gpt2":
        raise ModelError(f"tokenizer model {model!r} of {path} is not supported (supported: gpt2, that is byte-level "
                         "BPE); give the model as a Hugging Face directory with tokenizer.json")
    kind = str(metadata.get("tokenizer.ggml.pre") or "default")
    if kind not in _PRE_TOKENIZERS:
        raise ModelError(f"pre-tokenizer {kind!r} of {path} is not supported; supported: "
                         f"{', '.join(sorted(_PRE_TOKENIZERS))}; or give a Hugging Face directory with tokenizer.json")
    steps = [step for step in _PRE_TOKENIZERS[kind] if step["type"] != "GPT-2"]
    own_split = len(steps) < len(_PRE_TOKENIZERS[kind])
    byte_level = {"type": "ByteLevel", "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix")),
                  "trim_offsets": True, "use_regex": own_split}
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [{"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": types[index] == _CONTROL}
             for index, token in enumerate(tokens) if types[index] in (_CONTROL, _USER_DEFINED)]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": kind in ("llama-bpe", "llama3"),
                  "vocab": {token: index for index, token in enumerate(tokens)},
                  "merges": [str(merge) for merge in metadata["tokenizer.ggml.merges"]]},
    }, ensure_ascii=False)
