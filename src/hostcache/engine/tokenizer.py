"""Text to tokens and back for one model, and its chat template. Knows no weights and no engine.

A thin cover over the `tokenizers` package: plain text goes through a copy without special tokens, so that a document
that quotes `<|im_end|>` cannot end a turn; a rendered conversation goes through the full one.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hostcache.engine.interfaces import StreamDecoder
from hostcache.errors import ModelError, RequestRefused


class ChatTemplate:
    """A model's own template in a sandbox, with what Hugging Face offers to templates (not the clock)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token and the like, as the template may name them."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _raise_from_template
        environment.filters["tojson"] = _to_json
        self.source = source
        self.special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read ({error}); "
                             "correct it in the model's files") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(messages=[dict(message) for message in messages],
                                         add_generation_prompt=True, **self.special_tokens)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestRefused(f"the model's chat template refused the messages: {error}",
                                 param="messages") from error


class ModelTokenizer:
    """Implements `interfaces.Tokenizer`."""

    def __init__(self, definition: str, *, eos_ids: Sequence[int], template: ChatTemplate | None) -> None:
        """`definition`: the text of a `tokenizer.json`."""
        try:
            parsed = json.loads(definition)
            self._full = tokenizers.Tokenizer.from_str(definition)
            parsed["added_tokens"] = []
            parsed["post_processor"] = None
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"the tokenizer cannot be read ({error}); "
                             "fetch tokenizer.json of this model again") from error
        for tokenizer in (self._full, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._eos_ids = tuple(eos_ids)
        self._template = template
        self._vocab_size = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        added = self._full.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {
            token_id: b"" if token.special else token.content.encode() for token_id, token in added.items()}
        self._byte_level = _is_byte_level(parsed.get("decoder"))
        self.definition = definition

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def template(self) -> ChatTemplate | None:
        return self._template

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        stream = self.stream()
        return stream.push(token_ids) + stream.flush()

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """As `transformers`: special tokens written inside a message count as such, the template is trusted to quote.

        Raises RequestRefused when there is no template or it refuses the messages.
        """
        if self._template is None:
            raise RequestRefused("this model has no chat template; use /v1/completions with a prompt of your own",
                                 param="messages")
        ids: list[int] = self._full.encode(self._template.render(messages), add_special_tokens=False).ids
        return ids

    def stream(self) -> StreamDecoder:
        if self._byte_level:
            return _ByteStream(self._bytes_of)
        return _TextStream(self._full)

    def _bytes_of(self, token_id: int) -> bytes:
        known = self._added.get(token_id)
        if known is not None:
            return known
        token = self._full.id_to_token(token_id)
        if token is None:  # padding of the embedding beyond the vocabulary
            return b""
        return bytes(_BYTE_OF_CHAR[char] for char in token) if _BYTE_CHARS.issuperset(token) else token.encode()


class _ByteStream:
    """For byte-level vocabularies: every token is a known run of bytes."""

    def __init__(self, bytes_of: Any) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _TextStream:
    """For other vocabularies: decodes a window of tokens and gives out what a longer window did not change."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = ""
        """Text of the window that is already out."""
        self._settled = 0
        """Tokens of the window whose text is out."""

    def push(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        return self._give(text)

    def flush(self) -> str:
        if self._settled == len(self._window):
            return ""
        return self._give(self._tokenizer.decode(self._window, skip_special_tokens=True))

    def _give(self, text: str) -> str:
        new = text[len(self._given):]
        # The tokens given out last stay as the left neighbours of what comes, since a first token may lose its space.
        self._window = self._window[self._settled:]
        self._settled = len(self._window)
        self._given = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return new


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", ()))
    return decoder.get("type") == "ByteLevel"


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_characters())}
_BYTE_CHARS = frozenset(_BYTE_OF_CHAR)


def _raise_from_template(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
