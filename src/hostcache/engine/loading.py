"""From a model's name to a model that runs: says which reader a name belongs to, and puts the weights on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hostcache.engine.checkpoint import Checkpoint
from hostcache.engine.gguf_file import read_gguf
from hostcache.engine.hf import read_directory
from hostcache.engine.model import LlamaModel
from hostcache.engine.models import MODELS, default_cache_dir, get
from hostcache.engine.random_model import random_checkpoint
from hostcache.engine.tokenizer import ModelTokenizer
from hostcache.errors import ConfigError, ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(source: str, *, device: str = "auto", dtype: str = "auto", threads: int | None = None,
               cache_dir: Path | None = None,
               progress: Callable[[str], None] | None = None) -> tuple[LlamaModel, ModelTokenizer]:
    """`source` as for `read_checkpoint`. `dtype` auto is float32 on a CPU and bfloat16 on a GPU.

    `threads` sets torch's threads for the whole process. Raises ModelError or ConfigError, one line with the way out.
    """
    where = _device(device)
    kind = _dtype(dtype, where)
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; give 1 or more")
        torch.set_num_threads(threads)
    checkpoint = read_checkpoint(source, cache_dir=cache_dir, progress=progress)
    model = LlamaModel(checkpoint.spec, checkpoint.tensors, device=where, dtype=kind)
    return model, checkpoint.tokenizer


def read_checkpoint(source: str, *, cache_dir: Path | None = None,
                    progress: Callable[[str], None] | None = None) -> Checkpoint:
    """`source`: a Hugging Face directory, a `.gguf` file, `random:tiny`, or a short name such as `smollm2` (taken from
    the cache directory, fetched when it is not there)."""
    if source.startswith("random:"):
        return random_checkpoint(source.removeprefix("random:"))
    if source in MODELS:
        return read_gguf(get(source, cache_dir=cache_dir or default_cache_dir(), progress=progress), model_id=source)
    path = Path(source).expanduser()
    if path.is_dir():
        return read_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf(path)
    forms = f"a Hugging Face directory, a .gguf file, random:tiny or one of: {', '.join(MODELS)}"
    if path.is_file():
        raise ModelError(f"model {source} is a file of unknown kind; give {forms}")
    raise ModelError(f"model {source} does not exist; give {forms}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; give auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; give auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is asked for but torch sees no GPU here; give auto or cpu")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported; give auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
