"""A bridge's alphabet from whoever has the tokenizer: a running server, a tokenizer.json, or a model's source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostcache.client.openai import OpenAIClient
from hostcache.clock import Clock
from hostcache.errors import ConfigError, MissingDependency
from hostcache.workload.bridge import Alphabet, Tokenize, alphabet_of, candidate_words
from hostcache.workload.corpus import load_corpus


@contextmanager
def tokenizer_of(source: str, *, clock: Clock, api_key: str | None = None) -> Iterator[Tokenize]:
    """`source`: a server's address (its /tokenize is asked), a tokenizer.json or a folder with one, or what
    `hostcache serve` takes for a model. Not to be called from within an event loop."""
    if source.startswith(("http://", "https://")):
        with asyncio.Runner() as runner:
            client = OpenAIClient(source, clock=clock, api_key=api_key)
            try:
                yield lambda text: runner.run(client.tokenize(text))
            finally:
                runner.run(client.__aexit__(None, None, None))
        return
    try:
        from hostcache.engine.loading import read_checkpoint
        from hostcache.engine.tokenizer import ModelTokenizer
    except ImportError as error:
        raise MissingDependency(f"reading a tokenizer needs {error.name}; pip install 'hostcache[engine]', or give the "
                                "address of a running server") from None
    path = Path(source).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.name == "tokenizer.json":
        try:
            definition = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--tokenizer {source} cannot be read: {error.strerror}") from None
        yield ModelTokenizer(definition, eos_ids=(), template=None).encode
    else:
        yield read_checkpoint(source).tokenizer.encode


def alphabet(tokenize: Tokenize, words: int) -> Alphabet:
    """Words of Python's standard library that are one token each. Raises BridgeRefused where there are too few."""
    return alphabet_of(tokenize, candidate_words(file.text for file in load_corpus().files), size=words)
