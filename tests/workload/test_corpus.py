"""The corpus: real files, digested, complete or not at all."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hostcache.errors import ConfigError
from hostcache.workload.corpus import FILES, MIN_BYTES, load_corpus


def test_the_standard_library_gives_every_file_with_its_digest() -> None:
    corpus = load_corpus()
    assert [file.name for file in corpus.files] == sorted(FILES)
    assert all(len(file.text.encode()) >= MIN_BYTES for file in corpus.files)
    assert len(set(corpus.inputs.values())) == len(FILES)


def test_a_digest_is_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("x = 'ü'\n".encode())
    corpus = load_corpus(tmp_path, ["a.py"], min_bytes=1)
    assert corpus.inputs == {"a.py": hashlib.sha256("x = 'ü'\n".encode()).hexdigest()}


def test_the_order_does_not_depend_on_how_files_are_named_in_the_call(tmp_path: Path) -> None:
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text("pass\n")
    assert load_corpus(tmp_path, ["b.py", "a.py"], min_bytes=1) == load_corpus(tmp_path, ["a.py", "b.py"], min_bytes=1)


@pytest.mark.parametrize("content", [None, b"short\n", b"\xff" * 100])
def test_a_missing_short_or_binary_file_is_an_error_and_never_a_smaller_corpus(
        tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.py").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.py"):
        load_corpus(tmp_path, ["a.py"], min_bytes=50)
