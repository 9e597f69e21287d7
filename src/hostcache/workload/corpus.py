"""Real source code to talk about: files of Python's own standard library, named and digested. Knows no tokens.

Every Python carries them, so a fresh clone needs no download; the digests in the record say which text it was
(they differ between Python versions). A missing, unreadable or too short file is an error, never a smaller corpus.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hostcache.errors import ConfigError

FILES = (
    "_pydecimal.py", "_pyio.py", "argparse.py", "ast.py", "codecs.py", "configparser.py", "dataclasses.py",
    "difflib.py", "doctest.py", "enum.py", "functools.py", "imaplib.py", "inspect.py", "ipaddress.py", "locale.py",
    "mailbox.py", "optparse.py", "os.py", "pdb.py", "pickle.py", "pickletools.py", "platform.py", "pydoc.py",
    "random.py", "shutil.py", "smtplib.py", "socket.py", "ssl.py", "statistics.py", "subprocess.py", "tarfile.py",
    "threading.py", "traceback.py", "typing.py",
)
"""Present as single files of at least `MIN_BYTES` in Python 3.11, 3.12 and 3.13."""

MIN_BYTES = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    name: str
    text: str
    sha256: str


@dataclass(frozen=True, slots=True)
class CodeCorpus:
    """Files in a fixed order."""

    files: tuple[SourceFile, ...]

    @property
    def inputs(self) -> dict[str, str]:
        """Name → sha256 of the bytes."""
        return {file.name: file.sha256 for file in self.files}


def load_corpus(folder: Path | None = None, names: Iterable[str] = FILES, *, min_bytes: int = MIN_BYTES) -> CodeCorpus:
    """Read the files, by default from the running Python's standard library. Raises ConfigError."""
    root = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    return CodeCorpus(tuple(_read(root / name, min_bytes) for name in sorted(names)))


def _read(path: Path, min_bytes: int) -> SourceFile:
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"corpus file {path} cannot be read ({error}); "
                          "use a Python with its standard library") from error
    if len(data) < min_bytes:
        raise ConfigError(f"corpus file {path} has {len(data)} bytes, at least {min_bytes} are needed; "
                          "use a Python whose standard library is complete")
    return SourceFile(name=path.name, text=text, sha256=hashlib.sha256(data).hexdigest())
