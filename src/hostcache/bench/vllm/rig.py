"""What every stage needs: servers, the model's facts, tokens of real code, progress. Runs no measurement itself."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hostcache.bench.progress import Progress
from hostcache.bench.vllm.servers import BLOCK_TOKENS, NAME, Arm, Launcher, Server, Shape
from hostcache.client.openai import Failure, Reply
from hostcache.clock import Clock
from hostcache.errors import ConfigError, MissingDependency, ServerError
from hostcache.workload.agents import stream
from hostcache.workload.corpus import CodeCorpus

Bar = tuple[str, str, float, bool]
"""what, bar, value, met"""

FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    directory: Path
    token_bytes: int
    """KV of one token over all layers, in float32"""
    max_context: int


def model_facts(directory: Path) -> ModelFacts:
    """From a Hugging Face directory's config.json. Raises ConfigError."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        return ModelFacts(directory=directory, max_context=int(config["max_position_embeddings"]),
                          token_bytes=2 * int(config["num_hidden_layers"]) * kv_heads * head_dim * FLOAT32_BYTES)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not describe a model ({type(error).__name__}: {error}); give --model a name or "
                          "a Hugging Face directory") from error


def model_directory(model: str, cache_dir: Path | None, progress: Progress) -> Path:
    """A directory that vLLM loads: `model` itself, or one written from the named model, once, beside its file."""
    from hostcache.engine.models import MODELS, default_cache_dir, export

    if model not in MODELS:
        return Path(model)
    target = (cache_dir or default_cache_dir()) / f"{model}-hf-float32"
    if target.is_dir():
        return target
    draft = target.with_name(f".{target.name}-{os.getpid()}")
    try:
        try:
            export(model, draft, cache_dir=cache_dir, progress=progress.note)
        except ImportError as error:
            raise MissingDependency(f"{error.name} is not installed, which writing {model} for vLLM takes: install it, "
                                    "or give --model a Hugging Face directory") from error
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


@dataclass(slots=True, kw_only=True)
class Rig:
    """`arms`: off and on, then whatever else is measured beside them."""

    launcher: Launcher
    clock: Clock
    corpus: CodeCorpus
    progress: Progress
    model: ModelFacts
    arms: tuple[Arm, ...]
    seed: int
    _sources: list[list[int]] = field(default_factory=list)

    def shape(self, *, pool_blocks: int, max_num_seqs: int = 16, longest_tokens: int | None = None) -> Shape:
        """vLLM refuses a context that its pool could not hold once."""
        fits = min(self.model.max_context, pool_blocks * BLOCK_TOKENS)
        if longest_tokens is not None and longest_tokens > fits:
            raise ConfigError(f"a request of {longest_tokens} tokens does not fit a pool of {pool_blocks} blocks and a "
                              f"context of {self.model.max_context}; use shorter prompts or another --model")
        return Shape(model_dir=self.model.directory, token_bytes=self.model.token_bytes, pool_blocks=pool_blocks,
                     max_model_len=fits, max_num_seqs=max_num_seqs)

    @asynccontextmanager
    async def server(self, stage: str, shape: Shape, arm: Arm, *, host_bytes: int, name: str) -> AsyncIterator[Server]:
        self.progress.stage(stage)
        async with self.launcher.running(shape, arm, host_bytes=host_bytes, name=name) as server:
            yield server
            self.progress.show("stopping the server")

    async def sources(self, server: Server) -> list[list[int]]:
        """Tokens of each file of the corpus as the servers' own tokenizer cuts them: asked once, it is the same."""
        if not self._sources:
            for file in self.corpus.files:
                self._sources.append(await server.client.tokenize(file.text))
        return self._sources

    async def ask(self, server: Server, prompt: Sequence[int], *, tokens: int, name: str) -> Reply:
        """Raises ServerError for an answer that is none."""
        outcome = await server.client.complete(prompt, model=NAME, max_tokens=tokens, rng=stream(self.seed, name))
        if isinstance(outcome, Failure):
            raise ServerError(f"the {server.arm.name} arm failed a request of {len(prompt)} tokens: {outcome.error}; "
                              f"see {server.log}")
        return outcome


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median with the least and the most, and every value."""
    return {"median": median(values), "min": min(values), "max": max(values), "values": list(values)}


def lines(rows: Sequence[Sequence[str]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) if at == 0 else cell.rjust(width)
                               for at, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
                     for row in rows)
