"""Prose and code from real text: the same bytes for the same input, digested, refused where anything is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostcache.errors import ConfigError
from hostcache.workload.corpora import Corpus, build_corpus, pieces, read_corpus, write_corpus

DOCSTRING = "A module about nothing in particular, which says so at a length worth keeping, one hopes.\n\n    Indented."
CODE = f'"""{DOCSTRING}"""\n\nimport os\n\n\ndef short():\n    """Too short."""\n'
PROSE = "Es war einmal ein Baum – und noch einer.\r\nDie zweite Zeile.\r\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "b").mkdir(parents=True)
    (source / "b" / "one.py").write_text(CODE)
    (source / "a.py").write_text("x = 1\n")
    (source / "notes.md").write_bytes(PROSE.encode())
    (source / "picture.png").write_bytes(b"\x89PNG\xff")
    return source


def test_code_is_the_python_files_and_prose_the_documents_and_docstrings_by_name(folder: Path) -> None:
    corpus = build_corpus(folder, least_bytes=1)
    assert corpus.code == "x = 1\n\n" + CODE.strip("\n") + "\n\n"
    assert corpus.prose == DOCSTRING.replace("\n    I", "\nI") + "\n\n" + PROSE.replace("\r\n", "\n").strip() + "\n\n"
    assert [each.name for each in corpus.inputs] == ["a.py", "b/one.py", "notes.md"]
    assert corpus.inputs[2].sha256 == sha256(PROSE.encode()).hexdigest()
    assert sum(each.code_bytes for each in corpus.inputs) == len(corpus.code.encode())
    assert sum(each.prose_bytes for each in corpus.inputs) == len(corpus.prose.encode())
    assert corpus.origin == "source"


def test_times_and_the_order_of_the_disk_play_no_part(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "source"
    (other / "b").mkdir(parents=True)
    for name in ("notes.md", "b/one.py", "a.py"):  # made in another order
        (other / name).write_bytes((folder / name).read_bytes())
        os.utime(other / name, (1, 1))
    assert build_corpus(other, least_bytes=1) == build_corpus(folder, least_bytes=1)


def test_the_standard_library_gives_enough_of_both_and_the_same_in_another_process() -> None:
    corpus = build_corpus(most_bytes=300_000)
    assert len(corpus.prose.encode()) > 299_000
    assert len(corpus.code.encode()) > 299_000
    assert "standard library" in corpus.origin
    assert not any("/test/" in each.name or "site-packages" in each.name for each in corpus.inputs)
    program = "from hostcache.workload.corpora import build_corpus; print(build_corpus(most_bytes=300_000).digests)"
    said = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True,
                          env={**os.environ, "PYTHONHASHSEED": "7"})  # fmt: skip
    assert said.stdout.strip() == str(corpus.digests)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("bad.md", b"caf\xe9", "bad.md is not UTF-8"),
        ("bad.py", b"def (:\n", "bad.py is no Python"),
        ("bad.py", b"x = '\x00'\n", "bad.py is no Python"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused_not_left_out(folder: Path, name: str, data: bytes,
                                                                  message: str) -> None:
    (folder / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as refused:
        build_corpus(folder, least_bytes=1)
    assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    (folder / "gone.md").symlink_to(folder / "nowhere.md")
    with pytest.raises(ConfigError, match=r"gone\.md cannot be read"):
        build_corpus(folder, least_bytes=1)
    (folder / "gone.md").unlink()
    (folder / "shut.md").write_text("text")
    (folder / "shut.md").chmod(0)
    if os.access(folder / "shut.md", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(ConfigError, match=r"shut\.md cannot be read"):
        build_corpus(folder, least_bytes=1)


def test_too_little_text_and_no_folder_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="bytes of prose, at least 200000 are needed"):
        build_corpus(folder)
    with pytest.raises(ConfigError, match="bytes of code"):
        build_corpus(folder, least_bytes=1, code_globs=())
    with pytest.raises(ConfigError, match="is no folder"):
        build_corpus(folder / "a.py")
    with pytest.raises(ConfigError, match="is no pattern"):
        build_corpus(folder, code_globs=("/etc/*",))


def test_a_corpus_is_cut_to_its_size_without_breaking_a_character(folder: Path) -> None:
    whole = build_corpus(folder, least_bytes=1, code_globs=("b/*.py",))
    prose = whole.prose.encode()
    at = prose.index("–".encode())
    cut = build_corpus(folder, least_bytes=1, most_bytes=at + 1)
    assert cut.prose.encode() == prose[:at]
    assert len(cut.code.encode()) == at + 1


def test_a_written_corpus_reads_back_and_is_never_written_over(folder: Path, tmp_path: Path) -> None:
    corpus = build_corpus(folder, least_bytes=1)
    out = tmp_path / "out"
    write_corpus(corpus, out)
    assert sorted(path.name for path in out.iterdir()) == ["code.txt", "corpus.json", "prose.txt"]
    assert read_corpus(out) == corpus
    assert json.loads((out / "corpus.json").read_text())["outputs"] == corpus.digests
    with pytest.raises(ConfigError, match="exists; a corpus is never written over"):
        write_corpus(corpus, out)


@pytest.mark.parametrize("name", ["prose.txt", "code.txt"])
def test_a_text_that_was_changed_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    write_corpus(build_corpus(folder, least_bytes=1), out)
    (out / name).write_bytes((out / name).read_bytes() + b".")
    with pytest.raises(ConfigError, match=rf"{name} has sha256 .*corpus\.json says"):
        read_corpus(out)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not a corpus's record"), ("[]", "not a corpus's record"), ('{"version": 9}', "version 9; this reads 1"),
     ('{"version": 1}', "not a corpus's record")],
)  # fmt: skip
def test_a_folder_without_a_whole_record_is_refused(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="holds no whole corpus"):
        read_corpus(out)
    write_corpus(build_corpus(folder, least_bytes=1), out)
    (out / "corpus.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_corpus(out)


TEXT = "".join(f"{number:05d}" for number in range(2000))


@given(st.lists(st.text(max_size=8), unique=True, min_size=1, max_size=40), st.integers(1, 250), st.integers())
def test_pieces_never_overlap_and_further_names_change_no_earlier_piece(names: list[str], size: int, seed: int) -> None:
    cut = pieces(TEXT, names, characters=size, seed=seed)
    assert list(cut) == names
    starts = sorted(TEXT.index(piece) for piece in cut.values()) if size >= 10 else []
    assert all(after - before >= size for before, after in pairwise(starts))
    assert all(len(piece) == size for piece in cut.values())
    assert pieces(TEXT, [*names[:-1]], characters=size, seed=seed).items() <= cut.items()


def test_another_seed_cuts_elsewhere() -> None:
    assert pieces(TEXT, ["a", "b"], characters=50, seed=1) != pieces(TEXT, ["a", "b"], characters=50, seed=2)


def test_pieces_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="gives 2 pieces of 4000, 3 are needed"):
        pieces(TEXT, ["a", "b", "c"], characters=4000, seed=0)
    with pytest.raises(ConfigError, match="'a' is asked for twice"):
        pieces(TEXT, ["a", "a"], characters=4, seed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        pieces(TEXT, ["a"], characters=0, seed=0)


def test_a_text_is_asked_for_by_kind() -> None:
    corpus = Corpus(origin="o", prose="p", code="c", inputs=())
    assert (corpus.text("prose"), corpus.text("code")) == ("p", "c")
