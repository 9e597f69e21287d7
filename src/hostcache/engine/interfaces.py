"""What a model and a tokenizer must offer to be run by the engine. No torch at import time, no model here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a Llama-family model. Sizes in elements; `rope_scaling` as Hugging Face writes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    attention_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    model_id: str = "model"
    revision: str = ""
    """A digest of the weights' source (sha256 of the file, or of the seed for random weights)."""
    eos_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request's share of a step: `tokens` go to positions start, start+1, ...; `pages` are the device pages of
    positions 0 … start+len(tokens)-1 in order (page i holds positions i*page_tokens …). Positions below `start` are
    already written in those pages. One token with start > 0 is a decode step, several are a prefill chunk."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class CausalModel(Protocol):
    """Runs rows and writes their K and V into the pool.

    The pool is ONE tensor [pages, layers, 2 (K, V), kv_heads, page_tokens, head_dim], so a page is one contiguous
    extent and a run of neighbouring pages is one copy.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, rows: Sequence[Row], pool: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """float32 logits [len(rows), vocab] of the last token of each row. The result of a row may depend on the shape
        of the batch (rounding), never on the other rows' content nor on which page ids hold the context."""
        ...


class StreamDecoder(Protocol):
    """Turns one request's tokens into text piece by piece; holds back half characters."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens in the text are NOT interpreted and none are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation under the model's chat template, with the generation prompt appended."""
        ...

    def stream(self) -> StreamDecoder: ...
