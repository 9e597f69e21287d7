"""No byte is lost between text and tokens, and plain text cannot smuggle special tokens in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.tiny_models import CHAT_TEMPLATE, train_tokenizer
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from hostcache.engine.random_model import random_checkpoint
from hostcache.engine.tokenizer import ChatTemplate, ModelTokenizer
from hostcache.errors import ModelError, RequestRefused


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    template = ChatTemplate(CHAT_TEMPLATE, {"eos_token": "<|im_end|>"})
    return ModelTokenizer(train_tokenizer().to_str(), eos_ids=(2,), template=template)


@given(text=st.text())
@settings(deadline=None)
def test_any_text_comes_back(tokenizer: ModelTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text(alphabet="aé世👍🏽\n ", max_size=40), seed=st.integers(0, 99))
@settings(deadline=None)
def test_a_stream_in_any_pieces_gives_the_whole_text(tokenizer: ModelTokenizer, text: str, seed: int) -> None:
    rng, ids, stream, out = random.Random(seed), tokenizer.encode(text), tokenizer.stream(), ""
    while ids:
        count = rng.randint(1, 3)
        piece = stream.push(ids[:count])
        assert "\ufffd" not in piece
        out, ids = out + piece, ids[count:]
    assert out + stream.flush() == text


def test_half_a_character_is_held_back_and_shown_as_broken_only_at_the_end() -> None:
    tokenizer = random_checkpoint("tiny").tokenizer
    stream = tokenizer.stream()
    assert stream.push("世".encode()[:2]) == ""
    assert stream.push("世".encode()[2:]) == "世"
    assert stream.push([0xE4]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens_in_plain_text_stay_text(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b")
    assert not {0, 1, 2} & set(ids)
    assert tokenizer.decode(ids) == "a<|im_end|>b"


def test_a_conversation_uses_the_special_tokens_of_the_template(tokenizer: ModelTokenizer) -> None:
    ids = tokenizer.chat([{"role": "user", "content": "the page"}])
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == "user\nthe page\nassistant\n"


def test_special_tokens_are_not_shown(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.decode([1, *tokenizer.encode("hi"), 2]) == "hi"


def test_ids_beyond_the_vocabulary_are_silent(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 5]) == ""


def test_without_a_template_a_chat_is_refused_with_the_way_out() -> None:
    bare = ModelTokenizer(train_tokenizer().to_str(), eos_ids=(), template=None)
    with pytest.raises(RequestRefused, match="use /v1/completions"):
        bare.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("source", ["{{ raise_exception('roles must alternate') }}",
                                    "{{ messages[0].missing.deeper }}", "{{ messages[0] + 1 }}",
                                    "{{ ''.__class__.__mro__ }}"])
def test_a_template_that_fails_refuses_the_request(source: str) -> None:
    tokenizer = ModelTokenizer(train_tokenizer().to_str(), eos_ids=(), template=ChatTemplate(source, {}))
    with pytest.raises(RequestRefused, match="chat template refused") as refusal:
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert refusal.value.status == 400


def test_a_template_that_cannot_be_parsed_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {})


def test_a_broken_definition_is_refused() -> None:
    with pytest.raises(ModelError, match=r"fetch tokenizer\.json"):
        ModelTokenizer("{}", eos_ids=(), template=None)


def test_a_vocabulary_with_word_marks_streams_as_it_decodes() -> None:
    raw = RawTokenizer(models.BPE(vocab={"▁the": 0, "▁page": 1, "s": 2, "<0xE4>": 3, "<0xB8>": 4, "<0x96>": 5},
                                  merges=[], byte_fallback=True))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                     decoders.Strip(content=" ", left=1, right=0)])
    tokenizer = ModelTokenizer(raw.to_str(), eos_ids=(), template=None)
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in (0, 1, 2, 3, 4, 5, 1)]
    assert pieces == ["the", " page", "s", "", "", "世", " page"]
    assert stream.flush() == ""
    assert tokenizer.decode([0, 1, 3]) == "the page\ufffd"
