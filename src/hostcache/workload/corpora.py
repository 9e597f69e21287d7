"""Prose and code from real text on the machine, the same bytes for the same input: built, written, checked, cut.

By default from the running Python's own standard library: its sources are the code, their docstrings and its
documentation topics the prose. From another folder: what the globs find, and the docstrings of its Python files. Files
go by name; no time, size or order of a disk plays a part. Whatever cannot be read, decoded or parsed is an error,
never a smaller corpus. Knows no tokens.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from hostcache.errors import ConfigError

VERSION = 1
CODE_GLOBS = ("**/*.py",)
PROSE_GLOBS = ("**/*.md", "**/*.rst", "**/*.txt")
LEAST_BYTES = 200_000
"""Of each corpus by default: less would repeat itself within a few sessions."""

SKIPPED = frozenset({"__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"})
"""Folders of the standard library that are not it, differ between distributions, or hold files broken on purpose."""

_TOPICS = "pydoc_data/topics.py"
_LEAST_DOCSTRING = 80

Kind = Literal["prose", "code"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusInput:
    """A file that went in: its name under the source, the digest of its bytes, its part in each corpus."""

    name: str
    sha256: str
    bytes: int
    prose_bytes: int
    code_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Two texts, and what they are made of. `origin` names the source without its place on this machine."""

    origin: str
    prose: str
    code: str
    inputs: tuple[CorpusInput, ...]

    def text(self, kind: Kind) -> str:
        return self.prose if kind == "prose" else self.code

    @property
    def digests(self) -> dict[str, str]:
        """Name → sha256, of the outputs: for records."""
        return {"prose.txt": _sha256(self.prose.encode()), "code.txt": _sha256(self.code.encode())}


def build_corpus(
    source: Path | None = None,
    *,
    code_globs: Sequence[str] = CODE_GLOBS,
    prose_globs: Sequence[str] = PROSE_GLOBS,
    least_bytes: int = LEAST_BYTES,
    most_bytes: int | None = None,
) -> Corpus:
    """Read everything and join it, by name. `source` None: the standard library.

    `least_bytes` of each corpus there must be; files stop being taken into a corpus that has `most_bytes`, which is
    then cut to them. Raises ConfigError for anything unreadable, not UTF-8 or not Python (.py), or too little text.
    """
    root = source if source is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ConfigError(f"{root} is no folder; give one with text or code in it")
    code_names = _found(root, code_globs, SKIPPED if source is None else frozenset({"__pycache__"}))
    prose_names = [] if source is None else _found(root, prose_globs, frozenset())
    prose, code = _Pile(most_bytes), _Pile(most_bytes)
    inputs = []
    for name in sorted({*code_names, *prose_names}):
        if prose.full and code.full:
            break
        data, text = _read(root, name)
        code_bytes = code.add(text) if name in code_names else 0
        prose_bytes = prose.add(text) if name in prose_names else 0
        if name.endswith(".py") and name in code_names and not prose.full:
            prose_bytes += sum(prose.add(each) for each in _said(name, text))
        if code_bytes or prose_bytes:
            inputs.append(CorpusInput(name=name, sha256=_sha256(data), bytes=len(data), prose_bytes=prose_bytes,
                                      code_bytes=code_bytes))
    for kind, pile in (("prose", prose), ("code", code)):
        if pile.bytes < least_bytes:
            where = "Python's standard library" if source is None else str(source)
            raise ConfigError(f"{where} gives {pile.bytes} bytes of {kind}, at least {least_bytes} are needed; give a "
                              "folder with more, or other globs")
    origin = f"Python {sysconfig.get_python_version()} standard library" if source is None else root.resolve().name
    return Corpus(origin=origin, prose=prose.text, code=code.text, inputs=tuple(inputs))


class _Pile:
    """Pieces of text with an empty line between, cut to a size."""

    def __init__(self, most_bytes: int | None) -> None:
        self._most = most_bytes
        self._pieces: list[str] = []
        self.bytes = 0

    @property
    def full(self) -> bool:
        return self._most is not None and self.bytes >= self._most

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> int:
        """The bytes taken of it."""
        if self.full or not text.strip():
            return 0
        data = (text.replace("\r\n", "\n").strip("\n") + "\n\n").encode()
        if self._most is not None:
            data = data[: self._most - self.bytes]
        piece = data.decode(errors="ignore")  # a cut may fall inside of a character
        self._pieces.append(piece)
        self.bytes += len(data)
        return len(data)


def _found(root: Path, globs: Sequence[str], skipped: frozenset[str]) -> set[str]:
    """Names under the root, with /."""
    names = set()
    for glob in globs:
        try:
            for path in root.glob(glob):
                parts = path.relative_to(root).parts
                a_file = path.is_file() or (path.is_symlink() and not path.is_dir())  # a link to nothing is refused
                if a_file and not skipped & set(parts[:-1]):
                    names.add("/".join(parts))
        except (ValueError, NotImplementedError) as why:
            raise ConfigError(f"{glob!r} is no pattern of files under a folder ({why}); give one like **/*.md") from why
        except OSError as why:
            raise ConfigError(f"{root} cannot be searched ({why.strerror}); give a folder that can") from why
    return names


def _read(root: Path, name: str) -> tuple[bytes, str]:
    try:
        data = (root / name).read_bytes()
        return data, data.decode("utf-8-sig")
    except OSError as why:
        raise ConfigError(f"corpus file {name} cannot be read ({why.strerror}); make it readable or leave it out by "
                          "the globs") from why
    except UnicodeDecodeError as why:
        raise ConfigError(f"corpus file {name} is not UTF-8 (byte {why.start}); convert it or leave it out by the "
                          "globs") from why


def _said(name: str, text: str) -> Iterator[str]:
    """The docstrings of a Python file, by line; for the topics of pydoc, their texts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes and comparisons that a newer Python would write otherwise
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as why:
        raise ConfigError(f"corpus file {name} is no Python that this Python reads ({why}); leave it out by the "
                          "globs") from why
    found: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if name == _TOPICS and isinstance(node, ast.Dict):
            texts: list[Any] = list(node.values)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            texts = [first.value] if isinstance(first, ast.Expr) else []
        else:
            continue
        found += [(each.lineno, each.col_offset, each.value) for each in texts
                  if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    for _, _, said in sorted(found):
        if len(said) >= _LEAST_DOCSTRING:
            yield _dedented(said)


def _dedented(text: str) -> str:
    """Without the indentation of the code around it. Python's own cleaning differs between its versions."""
    first, *rest = text.expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.strip(), *(line[margin:].rstrip() for line in rest)]).strip("\n")


# Folders ------------------------------------------------------------------------------------------------------------


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """`prose.txt`, `code.txt` and, last of all, `corpus.json` with every digest, into a new folder.

    Raises ConfigError where the folder exists, empty or not, or cannot be written.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; a corpus is never written over, give a new folder") from None
    except OSError as why:
        raise ConfigError(f"cannot make {folder}: {why.strerror}") from why
    document = {
        "version": VERSION, "origin": corpus.origin, "outputs": corpus.digests,
        "inputs": [{"name": each.name, "sha256": each.sha256, "bytes": each.bytes, "prose_bytes": each.prose_bytes,
                    "code_bytes": each.code_bytes} for each in corpus.inputs],
    }  # fmt: skip
    try:
        (folder / "prose.txt").write_bytes(corpus.prose.encode())
        (folder / "code.txt").write_bytes(corpus.code.encode())
        (folder / "corpus.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as why:
        raise ConfigError(f"cannot write into {folder}: {why.strerror}; remove it and try again") from why


def read_corpus(folder: Path) -> Corpus:
    """What `write_corpus` wrote. Raises ConfigError where a text is not the one whose digest is in `corpus.json`."""
    try:
        document = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        texts = {name: (folder / name).read_bytes() for name in ("prose.txt", "code.txt")}
    except OSError as why:
        raise ConfigError(f"{folder} holds no whole corpus ({why.filename}: {why.strerror}); build one") from why
    except ValueError as why:
        raise ConfigError(f"{folder / 'corpus.json'} is not a corpus's record ({why}); build the corpus again") from why
    try:
        if document["version"] != VERSION:
            raise ConfigError(f"{folder} is a corpus of version {document['version']!r}; this reads {VERSION}: build "
                              "it again")
        for name, data in texts.items():
            if (found := _sha256(data)) != document["outputs"][name]:
                raise ConfigError(f"{folder / name} has sha256 {found[:16]}…, corpus.json says "
                                  f"{str(document['outputs'][name])[:16]}…; build the corpus again")
        return Corpus(origin=document["origin"], prose=texts["prose.txt"].decode(), code=texts["code.txt"].decode(),
                      inputs=tuple(CorpusInput(**each) for each in document["inputs"]))
    except (KeyError, TypeError) as why:
        raise ConfigError(f"{folder / 'corpus.json'} is not a corpus's record ({why}); build the corpus again") from why


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Pieces -------------------------------------------------------------------------------------------------------------


def pieces(text: str, names: Sequence[str], *, characters: int, seed: int) -> dict[str, str]:
    """A piece of `characters` for every name, no two of which overlap.

    Where a name's piece lies is drawn from (seed, name) among the places that the names before it left, so that further
    names change no earlier piece. Raises ConfigError for a text that is too short or a name that comes twice.
    """
    if characters < 1:
        raise ConfigError(f"pieces of {characters} characters; give at least 1")
    places = len(text) // characters
    if len(set(names)) < len(names):
        raise ConfigError(f"{next(name for name in names if names.count(name) > 1)!r} is asked for twice; names differ")
    if places < len(names):
        raise ConfigError(f"a text of {len(text)} characters gives {places} pieces of {characters}, {len(names)} are "
                          "needed; use a larger corpus, smaller sessions or fewer")
    taken: set[int] = set()
    cut = {}
    for name in names:
        at = Random(f"{seed}/piece/{name}").randrange(places)
        while at in taken:
            at = (at + 1) % places
        taken.add(at)
        cut[name] = text[at * characters : (at + 1) * characters]
    return cut
