"""A model on its way in or out: configuration and tensors under their Hugging Face names, whatever file they come from.

Decides which models are supported. Knows neither file formats nor the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hostcache.engine.interfaces import ModelSpec
from hostcache.errors import ModelError

if TYPE_CHECKING:
    import torch

    from hostcache.engine.tokenizer import ModelTokenizer

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
SUPPORTED = "Llama, SmolLM2, Mistral without a sliding window, Qwen2, Qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    spec: ModelSpec
    config: Mapping[str, Any]
    """As in a Hugging Face `config.json`."""
    tensors: Mapping[str, torch.Tensor]
    """By Hugging Face name; may be lazy, reading a tensor each time it is looked up."""
    tokenizer: ModelTokenizer


def spec_from_config(config: Mapping[str, Any], *, model_id: str, revision: str, eos_ids: tuple[int, ...],
                     source: str) -> ModelSpec:
    """Raises ModelError, naming `source`, for what would not run or would run wrongly."""
    architecture = _architecture(config, source)
    if architecture not in ARCHITECTURES:
        raise ModelError(f"architecture {architecture} of {source} is not supported; supported: {SUPPORTED}")
    hidden_size = _whole(config, "hidden_size", source)
    heads = _whole(config, "num_attention_heads", source)
    max_position = _whole(config, "max_position_embeddings", source)
    layers = _whole(config, "num_hidden_layers", source)
    head_dim = config.get("head_dim") or hidden_size // heads
    _refuse_unsupported_parts(config, architecture, max_position, source)
    theta, scaling = _rope(config, source)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size", source),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        intermediate_size=_whole(config, "intermediate_size", source),
        rope_theta=theta,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position=max_position,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)) or architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope_scaling=scaling,
        model_id=model_id,
        revision=revision,
        eos_ids=eos_ids,
    )


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that must be there (biases beside)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden),
                                          "model.norm.weight": (hidden,)}
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.layers):
        prefix = f"model.layers.{index}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if spec.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (spec.head_dim,)
        if spec.attention_bias:
            shapes[f"{prefix}.self_attn.q_proj.bias"] = (query,)
            shapes[f"{prefix}.self_attn.k_proj.bias"] = (key,)
            shapes[f"{prefix}.self_attn.v_proj.bias"] = (key,)
    return shapes


def check_tensors(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises ModelError when a tensor is missing or has another shape than the configuration says."""
    for name, shape in expected_tensors(spec).items():
        found = shapes.get(name)
        if found is None:
            raise ModelError(f"tensor {name} is missing in {source}; fetch the model's files again")
        if tuple(found) != shape:
            raise ModelError(f"tensor {name} of {source} has shape {list(found)} where the configuration says "
                             f"{list(shape)}; its files do not belong together, fetch them again")


def _architecture(config: Mapping[str, Any], source: str) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    by_type = {"llama": ARCHITECTURES[0], "mistral": ARCHITECTURES[1], "qwen2": ARCHITECTURES[2],
               "qwen3": ARCHITECTURES[3]}
    model_type = config.get("model_type")
    if model_type is None:
        raise ModelError(f"the configuration of {source} names no architecture; it is not a language model's "
                         f"config.json (supported: {SUPPORTED})")
    return by_type.get(str(model_type), str(model_type))


def _whole(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{key} is {value!r} in the configuration of {source}, not a positive whole number; "
                         "fetch config.json again")
    return value


def _refuse_unsupported_parts(config: Mapping[str, Any], architecture: str, max_position: int, source: str) -> None:
    window = config.get("sliding_window")
    # Qwen files carry a window that is switched off; elsewhere a window as long as the context never bites.
    used = bool(config.get("use_sliding_window", False)) if architecture.startswith("Qwen") else window is not None
    sliding_layers = "sliding_attention" in (config.get("layer_types") or ())
    if sliding_layers or (used and window is not None and window < max_position):
        raise ModelError(f"{architecture} of {source} uses a sliding window of {window} tokens, which is not "
                         f"supported; supported: {SUPPORTED}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act {activation!r} of {source} is not supported; supported: silu")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ModelError(f"quantization {method!r} of {source} is not supported; take the unquantized weights or "
                         "a GGUF file")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"partial_rotary_factor {config['partial_rotary_factor']} of {source} is not supported; "
                         f"supported: {SUPPORTED}")


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, Mapping[str, Any] | None]:
    """Newer files keep theta and scaling together in `rope_parameters`, older ones apart."""
    together = config.get("rope_parameters") or {}
    theta = float(together.get("rope_theta", config.get("rope_theta", 10000.0)))
    scaling = config.get("rope_scaling") or together
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    needed = {"llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
              "factors": ("factors",)}
    if kind not in needed:
        raise ModelError(f"rope scaling {kind!r} of {source} is not supported; supported: none, llama3")
    missing = [key for key in needed[kind] if key not in scaling]
    if missing:
        raise ModelError(f"rope scaling {kind!r} of {source} lacks {', '.join(missing)}; fetch config.json again")
    return theta, {"rope_type": kind, **{key: scaling[key] for key in needed[kind]}}
