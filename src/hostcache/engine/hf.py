"""Reads and writes a Hugging Face model directory: config.json, safetensors, tokenizer.json, chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hostcache.engine.checkpoint import Checkpoint, check_tensors, spec_from_config
from hostcache.engine.tokenizer import ChatTemplate, ModelTokenizer
from hostcache.errors import ModelError

_HASH_CHUNK_BYTES = 1 << 22


def read_directory(directory: Path, *, model_id: str | None = None) -> Checkpoint:
    """Raises ModelError for what is missing, broken or not supported."""
    config = _read_json(directory / "config.json")
    generation = _read_json(directory / "generation_config.json", missing_ok=True)
    tokenizer_config = _read_json(directory / "tokenizer_config.json", missing_ok=True)
    definition = _read_text(directory / "tokenizer.json")
    specials = _special_tokens(tokenizer_config)
    template_source = _template_source(directory, tokenizer_config)
    template = ChatTemplate(template_source, specials) if template_source else None
    eos_ids = _eos_ids(config, generation, specials, definition)
    tokenizer = ModelTokenizer(definition, eos_ids=eos_ids, template=template)
    # Before the weights are read: a model that is not supported is refused at once.
    spec_from_config(config, model_id="", revision="", eos_ids=eos_ids, source=str(directory))
    files = _weight_files(directory)
    spec = spec_from_config(config, model_id=model_id or directory.resolve().name,
                            revision=_digest([directory / "config.json", *files]), eos_ids=eos_ids,
                            source=str(directory))
    tensors = _LazyTensors(files)
    check_tensors(spec, tensors.shapes, str(directory))
    return Checkpoint(spec=spec, config=config, tensors=tensors, tokenizer=tokenizer)


def write_directory(checkpoint: Checkpoint, directory: Path) -> None:
    """Writes what `transformers` and vLLM load. Weights go out as bfloat16 where that loses nothing, else float32."""
    if (checkpoint.spec.rope_scaling or {}).get("rope_type") == "factors":
        raise ModelError("rope factors of this GGUF file have no form in config.json; export the original model")
    directory.mkdir(parents=True, exist_ok=True)
    names = [name for name in checkpoint.tensors if name != "lm_head.weight" or not checkpoint.spec.tie_embeddings]
    tensors = {name: checkpoint.tensors[name] for name in names}
    exact = all(torch.equal(tensor.to(torch.bfloat16).to(tensor.dtype), tensor) for tensor in tensors.values())
    dtype = torch.bfloat16 if exact else torch.float32
    weights = directory / "model.safetensors"
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, weights,
              metadata={"format": "pt"})
    weights.chmod(0o644)  # like the files beside it; save_file keeps it to its owner
    eos_ids = list(checkpoint.spec.eos_ids)
    eos: dict[str, Any] = {"eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids} if eos_ids else {}
    config = {**checkpoint.config, **eos, "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(directory / "config.json", config)
    begin = {"bos_token_id": config["bos_token_id"]} if "bos_token_id" in config else {}
    _write_json(directory / "generation_config.json", {**begin, **eos})
    tokenizer = checkpoint.tokenizer
    (directory / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
    tokenizer_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast",
                                        "model_max_length": checkpoint.spec.max_position,
                                        "clean_up_tokenization_spaces": False}
    if tokenizer.template is not None:
        tokenizer_config |= {**tokenizer.template.special_tokens, "chat_template": tokenizer.template.source}
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


class _LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of one or several safetensors files, read when looked up."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  (not a mapping)
                        self._file_of[name] = path
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({error}); fetch it again") from error

    def __getitem__(self, name: str) -> torch.Tensor:
        path = self._file_of[name]
        with safe_open(path, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name} of {path} is {tensor.dtype}; quantized weights are not supported, take "
                             "the unquantized ones or a GGUF file")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{index} has no weight_map; fetch it again")
        files = [directory / str(name) for name in sorted(set(weight_map.values()))]
    else:
        files = [directory / "model.safetensors"]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} does not exist; hostcache reads safetensors (other formats are not supported)")
    return files


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb") as opened:
            while chunk := opened.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], specials: Mapping[str, str],
             definition: str) -> tuple[int, ...]:
    """generation_config.json decides; config.json and the tokenizer's eos_token are its stand-ins."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    eos = specials.get("eos_token")
    if eos is not None:
        return tuple(entry["id"] for entry in json.loads(definition).get("added_tokens", ())
                     if entry.get("content") == eos)
    return ()


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = tokenizer_config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    beside = directory / "chat_template.jinja"
    if beside.exists():
        return _read_text(beside)
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{path} does not exist; give a Hugging Face directory with config.json, safetensors and "
                         "tokenizer.json, a .gguf file, smollm2 or random:tiny") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch it again") from error


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    if missing_ok and not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not an object; fetch it again")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
