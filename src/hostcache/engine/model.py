"""The forward pass of Llama-family models over a paged pool. Knows no files, no tokenizer and no scheduler.

Prefill chunks and decode rows go through the matrix products together and part only in the attention. Products run
through oneDNN with weights packed once (on a CPU, float32): 1.2 times the speed of the plain path in prefill and twice
it in decode. Where that is not there, `torch.nn.functional.linear` does the same.

Rounding depends on the shape of the step (how many tokens go through the products together, how long each context is),
never on the other rows' content nor on page ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from hostcache.engine import attention
from hostcache.engine.interfaces import ModelSpec, Row

_FEW_ROWS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Callable[[torch.Tensor], torch.Tensor]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    attention_out: Callable[[torch.Tensor], torch.Tensor]
    mlp_norm: torch.Tensor
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Where the tokens of one step stand and go: all that is the same in every layer."""

    tokens: torch.Tensor
    turns: torch.Tensor
    page_of_token: torch.Tensor
    slot_of_token: torch.Tensor
    prefills: tuple[attention.PrefillPlan, ...]
    decodes: attention.DecodePlan | None
    decode_first: int
    """Index of the first decode token; the decode rows come after all chunks."""
    last: torch.Tensor
    """Index of each row's last token, in the caller's order of rows."""


class LlamaModel:
    """Llama, Qwen2, Qwen3 and Mistral: one shape with switches (q/k norm, biases, tied embeddings, rope scaling)."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, torch.Tensor], *, device: torch.device,
                 dtype: torch.dtype) -> None:
        """`tensors` by their Hugging Face names; each is looked up once, so a lazy mapping need not hold them all."""
        self._spec = spec
        self._device = device
        self._dtype = dtype

        def take(name: str) -> torch.Tensor:
            tensor = tensors[name].to(device=device, dtype=dtype)
            turned = any(f".{part}." in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
            return pair_neighbours(tensor, spec.head_dim) if turned else tensor

        def linear(*names: str, keep_plain: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
            weight = torch.cat([take(f"{name}.weight") for name in names])
            biases = [f"{name}.bias" for name in names]
            present = [name for name in biases if name in tensors]
            bias = torch.cat([take(name) for name in biases]) if present else None
            return packed_linear(weight, bias, keep_plain=keep_plain)

        self._embedding = take("model.embed_tokens.weight").contiguous()
        self._layers: list[_Layer] = []
        for index in range(spec.layers):
            prefix = f"model.layers.{index}"
            q, k, v = (f"{prefix}.self_attn.{part}_proj" for part in "qkv")
            self._layers.append(_Layer(
                attention_norm=take(f"{prefix}.input_layernorm.weight"),
                qkv=linear(q, k, v),
                q_norm=take(f"{prefix}.self_attn.q_norm.weight") if spec.qk_norm else None,
                k_norm=take(f"{prefix}.self_attn.k_norm.weight") if spec.qk_norm else None,
                attention_out=linear(f"{prefix}.self_attn.o_proj"),
                mlp_norm=take(f"{prefix}.post_attention_layernorm.weight"),
                # The largest by far: worth its plain copy.
                gate_up=linear(f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj", keep_plain=True),
                down=linear(f"{prefix}.mlp.down_proj"),
            ))
        self._norm = take("model.norm.weight")
        head = self._embedding if spec.tie_embeddings else take("lm_head.weight")
        self._head = packed_linear(head, None, keep_plain=spec.tie_embeddings)
        self._turns = rope_turns(spec).to(device)
        self._scratch: attention.Scratch | None = None

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], pool: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """See `CausalModel.forward`. Raises ValueError for a row without tokens, with too few pages, or past the
        model's last position."""
        spec = self._spec
        if self._scratch is None or self._scratch.geometry.page_tokens != page_tokens:
            geometry = attention.Geometry(kv_heads=spec.kv_heads, group=spec.heads // spec.kv_heads,
                                          head_dim=spec.head_dim, page_tokens=page_tokens)
            self._scratch = attention.Scratch(geometry, self._dtype, self._device)
        step = self._plan(rows, pool, self._scratch)
        hidden = F.embedding(step.tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            mixed = self._attention(layer, hidden, pool[:, index], step)
            if index == spec.layers - 1:
                # Beyond here only the last token of each row is looked at.
                hidden, mixed = hidden.index_select(0, step.last), mixed.index_select(0, step.last)
            hidden = hidden + layer.attention_out(mixed)
            gate, up = layer.gate_up(self._rms(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate).mul_(up))
        return self._head(self._rms(hidden, self._norm)).float()

    def _attention(self, layer: _Layer, hidden: torch.Tensor, layer_pool: torch.Tensor,
                   step: _Step) -> torch.Tensor:
        spec = self._spec
        turned = spec.heads + spec.kv_heads
        heads = layer.qkv(self._rms(hidden, layer.attention_norm)).view(hidden.shape[0], -1, spec.head_dim)
        query_key, value = heads[:, :turned], heads[:, turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            query_key = torch.cat((self._rms(query_key[:, :spec.heads], layer.q_norm),
                                   self._rms(query_key[:, spec.heads:], layer.k_norm)), dim=1)
        query_key = rotate(query_key, step.turns)
        query = query_key[:, :spec.heads].unflatten(1, (spec.kv_heads, -1))
        key = query_key[:, spec.heads:]
        layer_pool.permute(0, 3, 1, 2, 4)[step.page_of_token, step.slot_of_token] = torch.stack((key, value), dim=1)
        outs = []
        for plan in step.prefills:
            outs.append(attention.prefill(query[plan.chunk], key[plan.chunk], value[plan.chunk], layer_pool, plan))
        if step.decodes is not None:
            outs.append(attention.decode(query[step.decode_first:], layer_pool, step.decodes))
        mixed = outs[0] if len(outs) == 1 else torch.cat(outs)
        return mixed.reshape(hidden.shape[0], spec.heads * spec.head_dim)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self._spec.norm_eps)

    def _plan(self, rows: Sequence[Row], pool: torch.Tensor, scratch: attention.Scratch) -> _Step:
        page_tokens = scratch.geometry.page_tokens
        for row in rows:
            end = row.start + len(row.tokens)
            if not row.tokens or len(row.pages) * page_tokens < end or end > self._spec.max_position:
                raise ValueError(
                    f"row of {len(row.tokens)} tokens from position {row.start} with {len(row.pages)} pages of "
                    f"{page_tokens} tokens does not fit; positions end at {self._spec.max_position}")
        chunks = [index for index, row in enumerate(rows) if len(row.tokens) > 1]
        singles = [index for index, row in enumerate(rows) if len(row.tokens) == 1]
        tokens: list[int] = []
        positions: list[int] = []
        page_of_token: list[int] = []
        fresh_tails: list[int] = []
        prefills: list[attention.PrefillPlan] = []
        last = [0] * len(rows)
        for index in chunks + singles:
            row = rows[index]
            end = row.start + len(row.tokens)
            if len(row.tokens) > 1:
                chunk = slice(len(tokens), len(tokens) + len(row.tokens))
                prefills.append(attention.plan_prefill(row.pages, chunk, row.start, scratch))
            tokens.extend(row.tokens)
            positions.extend(range(row.start, end))
            page_of_token.extend(row.pages[position // page_tokens] for position in range(row.start, end))
            tail = (end - 1) // page_tokens
            if row.start <= tail * page_tokens and end % page_tokens:
                fresh_tails.append(row.pages[tail])
            last[index] = len(tokens) - 1
        if fresh_tails:
            # A masked place still enters a product with weight zero, and zero times a stray NaN is NaN.
            pool[torch.tensor(fresh_tails, device=self._device)] = 0
        decodes = None
        if singles:
            decodes = attention.plan_decode([(rows[index].pages, rows[index].start + 1) for index in singles], scratch)
        places = torch.tensor(positions, device=self._device)
        return _Step(tokens=torch.tensor(tokens, device=self._device), turns=self._turns[places],
                     page_of_token=torch.tensor(page_of_token, device=self._device),
                     slot_of_token=places % page_tokens, prefills=tuple(prefills), decodes=decodes,
                     decode_first=len(tokens) - len(singles), last=torch.tensor(last, device=self._device))


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None, *,
                  keep_plain: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """x → x weightᵀ + bias for x [tokens, in], weight [out, in]; keeps its own packed copy of the weight.

    `keep_plain` keeps the weight itself too, for one and two tokens: MKL's product for two columns reads memory 1.4
    times as fast as any path there is for one, so a single token goes through it twice over.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not _has_packed_linear():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    plain = weight if keep_plain and bias is None else None

    def through_onednn(x: torch.Tensor) -> torch.Tensor:
        if plain is not None and x.shape[0] <= _FEW_ROWS:
            doubled = x if x.shape[0] == _FEW_ROWS else torch.cat((x, x))
            return torch.mm(plain, doubled.t()).t()[:x.shape[0]].contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    return through_onednn


def _has_packed_linear() -> bool:
    # Not every build of torch has them (no MKL-DNN: some ARM and minimal builds).
    return (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"))


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim] with neighbours as pairs: one complex product."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def rope_turns(spec: ModelSpec) -> torch.Tensor:
    """complex64 [max_position, 1, head_dim / 2]"""
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.float32)
    frequencies = scaled_frequencies(1.0 / (spec.rope_theta ** (half / spec.head_dim)), spec.rope_scaling)
    angles = torch.outer(torch.arange(spec.max_position, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def pair_neighbours(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of a q or k projection (or of its bias or norm) reordered within each head from Hugging Face's two halves
    to neighbouring pairs. Scores are sums over a head, so the same order in q and k leaves them as they are."""
    halves: torch.Tensor = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(rows.shape)


def scaled_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """Kinds are checked where a checkpoint is read: none, `llama3`, or `factors` (one divisor per frequency, as GGUF
    stores Llama 3's)."""
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "factors":
        return frequencies / torch.tensor(scaling["factors"], dtype=torch.float32)
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, between)
    return torch.where(wavelength < original / high, frequencies, slow)
