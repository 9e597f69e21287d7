"""Every way to name a model loads the same weights, and every broken one is refused in one line with the way out."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.tiny_models import FAMILIES, PagedRun, make_directory, their_logits, train_tokenizer, write_gguf

from hostcache.engine import models
from hostcache.engine.checkpoint import Checkpoint
from hostcache.engine.hf import write_directory
from hostcache.engine.loading import load_model, read_checkpoint
from hostcache.errors import ConfigError, ModelError

STRINGS = ["", "the page", "  two  spaces\n\n\ttab ", "x = 12345 + 6.78e-9", "héllo wörld — “quotes”", "世界 👍🏽",
           "<|im_start|>user", "don't we'll I'M", "a\r\nb\u00a0c\u200bd", "\ufeff\u0000\u0007"]
TOKENS = list(range(3, 203))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_directory("llama", directory)


@pytest.fixture(scope="module")
def gguf_path(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(llama[1], path)
    return path


@pytest.fixture
def copy_of(llama: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of the directory that a test may break."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in llama[0].iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def change_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def one_line(error: pytest.ExceptionInfo[ModelError] | pytest.ExceptionInfo[ConfigError]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_a_sharded_directory_gives_the_same_weights(tmp_path: Path, llama: tuple[Path, Any]) -> None:
    make_directory("llama", tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    whole, sharded = read_checkpoint(str(llama[0])), read_checkpoint(str(tmp_path))
    assert all(torch.equal(whole.tensors[name], sharded.tensors[name]) for name in whole.tensors)


def test_a_gguf_file_gives_the_logits_of_the_directory_it_was_made_from(llama: tuple[Path, Any],
                                                                        gguf_path: Path) -> None:
    model, tokenizer = load_model(str(gguf_path), device="cpu")
    assert model.spec.eos_ids == tokenizer.eos_ids == (2,)
    assert model.spec.norm_eps == 1e-5
    torch.testing.assert_close(PagedRun(model, 20).fill(TOKENS, list(range(20)), chunk=90)[0],
                               their_logits(llama[1], TOKENS)[-1], rtol=1e-4, atol=1e-4)


def test_a_quantized_gguf_file_exports_to_a_directory_with_equal_logits(llama: tuple[Path, Any],
                                                                        tmp_path: Path) -> None:
    import transformers

    write_gguf(llama[1], tmp_path / "tiny.gguf", quantized=True)
    checkpoint = read_checkpoint(str(tmp_path / "tiny.gguf"))
    write_directory(checkpoint, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    for source in (tmp_path / "tiny.gguf", tmp_path / "hf"):
        model, _ = load_model(str(source), device="cpu")
        torch.testing.assert_close(PagedRun(model, 20).fill(TOKENS, list(range(20)), chunk=90)[0],
                                   their_logits(theirs, TOKENS)[-1], rtol=1e-4, atol=1e-4)
    check_same_tokens(checkpoint, tmp_path / "hf")


def check_same_tokens(checkpoint: Checkpoint, directory: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = checkpoint.tokenizer
    for text in STRINGS:
        if "<|" not in text:
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == text
    messages = [{"role": "user", "content": text} for text in STRINGS]
    assert ours.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(ours.eos_ids) == [theirs.eos_token_id]


def test_a_rebuilt_tokenizer_cuts_text_as_the_original(gguf_path: Path) -> None:
    original, rebuilt = train_tokenizer(), read_checkpoint(str(gguf_path)).tokenizer
    for text in STRINGS:
        if "<|" not in text:
            assert rebuilt.encode(text) == original.encode(text).ids


def test_exported_weights_are_bfloat16_only_where_that_loses_nothing(tmp_path: Path) -> None:
    checkpoint = read_checkpoint("random:tiny")
    write_directory(checkpoint, tmp_path / "exact")
    rounded = {name: checkpoint.tensors[name].bfloat16().float() for name in checkpoint.tensors}
    write_directory(Checkpoint(spec=checkpoint.spec, config=checkpoint.config, tensors=rounded,
                               tokenizer=checkpoint.tokenizer), tmp_path / "rounded")
    for kind, directory, tensors in ((torch.float32, "exact", checkpoint.tensors),
                                     (torch.bfloat16, "rounded", rounded)):
        again = read_checkpoint(str(tmp_path / directory))
        assert {again.tensors[name].dtype for name in again.tensors} == {kind}
        assert all(torch.equal(again.tensors[name].float(), tensors[name]) for name in tensors)


def test_random_weights_are_the_same_every_time_and_other_names_have_others() -> None:
    first, again, other = (read_checkpoint(f"random:{name}") for name in ("tiny", "tiny", "tiny-qwen2"))
    assert first.spec == again.spec
    assert all(torch.equal(first.tensors[name], again.tensors[name]) for name in first.tensors)
    assert first.spec.revision != other.spec.revision
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first.tensors[name], other.tensors[name])


@pytest.mark.parametrize("name", ["tiny", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_every_random_model_runs(name: str) -> None:
    model, tokenizer = load_model(f"random:{name}", device="cpu")
    assert model.spec.vocab_size == tokenizer.vocab_size
    assert PagedRun(model, 2).fill(tokenizer.encode("hello"), [1], chunk=8).isfinite().all()


def test_the_revision_follows_the_bytes_of_the_weights_and_of_the_configuration(llama: tuple[Path, Any],
                                                                                copy_of: Path) -> None:
    revision = read_checkpoint(str(llama[0])).spec.revision
    assert read_checkpoint(str(copy_of)).spec.revision == revision
    change_json(copy_of / "config.json", lambda config: config.update(rms_norm_eps=1e-4))
    changed = read_checkpoint(str(copy_of)).spec.revision
    assert changed != revision
    weights = bytearray((copy_of / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (copy_of / "model.safetensors").write_bytes(weights)
    assert read_checkpoint(str(copy_of)).spec.revision not in (revision, changed)


def test_end_tokens_come_from_the_generation_config_first(copy_of: Path) -> None:
    (copy_of / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert read_checkpoint(str(copy_of)).spec.eos_ids == (2, 0)
    (copy_of / "generation_config.json").unlink()
    assert read_checkpoint(str(copy_of)).spec.eos_ids == (7,)
    change_json(copy_of / "config.json", lambda config: config.pop("eos_token_id"))
    assert read_checkpoint(str(copy_of)).spec.eos_ids == (2,)


def test_a_template_beside_the_configuration_wins(copy_of: Path) -> None:
    (copy_of / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = read_checkpoint(str(copy_of)).tokenizer
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}])) == "hi!"


@pytest.mark.parametrize(("source", "words"), [
    ("/no/such/model", ["/no/such/model", "does not exist", "smollm2"]),
    ("random:huge", ["random:huge", "random:tiny"]),
])
def test_a_name_that_leads_nowhere_is_refused(source: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        load_model(source)
    assert all(word in one_line(error) for word in words)


def test_a_file_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="unknown kind"):
        load_model(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(("changes", "words"), [
    ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3"]),
    ({"architectures": None, "model_type": "gemma"}, ["gemma", "Llama"]),
    ({"architectures": None, "model_type": None}, ["names no architecture"]),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, ["MistralForCausalLM", "512"]),
    ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "use_sliding_window": True}, ["Qwen2", "512"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["yarn", "llama3"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["linear", "llama3"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
    ({"hidden_act": "gelu"}, ["gelu", "silu"]),
    ({"quantization_config": {"quant_method": "awq"}}, ["awq", "GGUF"]),
    ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
    ({"hidden_size": 128}, ["model.embed_tokens.weight", "[300, 96]", "[300, 128]"]),
    ({"num_hidden_layers": 4}, ["model.layers.3.input_layernorm.weight", "missing"]),
])
def test_a_configuration_that_would_run_wrongly_is_refused(copy_of: Path, changes: dict[str, Any],
                                                           words: list[str]) -> None:
    change_json(copy_of / "config.json", lambda config: config.update(changes))
    with pytest.raises(ModelError) as error:
        load_model(str(copy_of))
    message = one_line(error)
    assert all(word in message for word in words), message


def test_a_window_as_long_as_the_context_never_bites(copy_of: Path) -> None:
    change_json(copy_of / "config.json",
                lambda config: config.update(architectures=["MistralForCausalLM"], sliding_window=2048))
    assert read_checkpoint(str(copy_of)).spec.architecture == "MistralForCausalLM"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_or_broken_file_is_named(copy_of: Path, name: str) -> None:
    path = copy_of / name
    content = path.read_bytes()
    for broken in (None, b"", content[:len(content) // 2]):
        path.unlink(missing_ok=True)
        if broken is not None:
            path.write_bytes(broken)
        with pytest.raises(ModelError) as error:
            load_model(str(copy_of))
        assert name in one_line(error)


def test_a_cut_off_gguf_file_is_refused(gguf_path: Path, tmp_path: Path) -> None:
    content = gguf_path.read_bytes()
    path = tmp_path / "cut.gguf"
    for kept in (0, 3, 20, 5_000, len(content) // 2, len(content) - 100):
        path.write_bytes(content[:kept])
        with pytest.raises(ModelError) as error:
            load_model(str(path))
        assert str(path) in one_line(error)


def test_a_gguf_file_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"architecture gemma2 .* supported: Llama"):
        load_model(str(path))


@pytest.mark.parametrize(("metadata", "words"), [({"pre": "deepseek-llm"}, "deepseek-llm"),
                                                 ({"model": "llama"}, "'llama'")])
def test_a_gguf_tokenizer_of_unknown_kind_is_refused_by_name(llama: tuple[Path, Any], tmp_path: Path,
                                                             metadata: dict[str, str], words: str) -> None:
    write_gguf(llama[1], tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("options", "words"), [({"device": "tpu"}, "tpu"), ({"device": "meta"}, "meta"),
                                                ({"dtype": "int4"}, "int4"), ({"threads": 0}, "threads is 0")])
def test_an_impossible_way_to_run_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_model("random:tiny", **options)
    assert words in one_line(error)


def test_every_family_of_the_tests_is_one_that_is_supported() -> None:
    from hostcache.engine.checkpoint import ARCHITECTURES

    assert {name for name, _ in FAMILIES.values()} == set(ARCHITECTURES)


def test_safetensors_with_integer_weights_are_refused(copy_of: Path) -> None:
    path = copy_of / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = content[8:8 + size].replace(b'"F32"', b'"I32"')
    path.write_bytes(content[:8] + header + content[8 + size:])
    with pytest.raises(ModelError, match="quantized weights are not supported"):
        load_model(str(copy_of))


def test_a_short_name_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt5 .* known: smollm2"):
        models.get("gpt5", cache_dir=tmp_path)


@pytest.mark.slow
def test_the_real_model_is_fetched_exported_and_equal_to_transformers(tmp_path: Path) -> None:
    import transformers

    models.export("smollm2", tmp_path / "hf")
    checkpoint = read_checkpoint("smollm2")
    assert checkpoint.spec.revision == models.MODELS["smollm2"].sha256
    check_same_tokens(checkpoint, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    model, tokenizer = load_model("smollm2", device="cpu")
    tokens = tokenizer.encode(Path(__file__).read_text(encoding="utf-8"))[:900]
    torch.testing.assert_close(PagedRun(model, 60).fill(tokens, list(range(60)), chunk=256)[0],
                               their_logits(theirs, tokens)[-1], rtol=1e-3, atol=1e-3)
