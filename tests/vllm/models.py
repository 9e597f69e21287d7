"""Small models as Hugging Face directories, written when they are first asked for.

The tiny ones have random weights with a standard deviation of 0.2. At the usual 0.02 greedy output repeats one token
whatever stands before it, so that "the same output" would hold for any KV, zeros included.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECIPE = "1"
"""Part of the directory's name: a change of a recipe below must not meet models of an older one."""
TINY = ("tiny-llama", "tiny-qwen2", "tiny-gemma2")
EXPORTED = ("smollm2",)
VOCABULARY = 259
"""Token ids below it mean something to the byte tokenizer: three specials, then the 256 bytes."""

_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "tie_word_embeddings": False, "initializer_range": 0.2,
}
_CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
         "{% if add_generation_prompt %}<assistant>{% endif %}")


def model(name: str, directory: Path) -> Path:
    """The model's folder in `directory`; whole or not there, also when two runs ask at once.

    `tiny-llama` and `tiny-qwen2`: one group of full attention, 1,024 bytes of KV a token in float32, heads for tensor
    parallel 2. `tiny-gemma2`: sliding and full attention, two groups (its output repeats: embeddings are tied).
    `smollm2`: the real SmolLM2-135M-Instruct, float32, 515 MiB.
    """
    target = directory / f"{name}-{RECIPE}"
    if target.is_dir():
        return target
    make: Callable[[Path], object] = _export if name in EXPORTED else _tiny(name)
    draft = directory / f".{name}-{os.getpid()}"
    try:
        make(draft)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _export(directory: Path) -> None:
    from hostcache.engine.models import export

    export("smollm2", directory)


def _tiny(name: str) -> Callable[[Path], None]:
    import torch
    import transformers

    config: Any
    if name == "tiny-llama":
        config, kind = transformers.LlamaConfig(**_SHAPE, head_dim=32), transformers.LlamaForCausalLM
    elif name == "tiny-qwen2":
        config, kind = transformers.Qwen2Config(**_SHAPE), transformers.Qwen2ForCausalLM
    elif name == "tiny-gemma2":
        # vLLM's Gemma 2 has no output matrix of its own.
        shape = {**_SHAPE, "tie_word_embeddings": True}
        config, kind = (transformers.Gemma2Config(**shape, head_dim=32, sliding_window=256),
                        transformers.Gemma2ForCausalLM)
    else:
        raise ValueError(f"{name!r} is not one of {', '.join((*TINY, *EXPORTED))}")

    def make(directory: Path) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            made: Any = kind(config)
        made.float().save_pretrained(directory)
        _byte_tokenizer().save_pretrained(directory)

    return make


def _byte_tokenizer() -> Any:
    """One token a byte, so that any text has tokens and their number is known."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<unk>", "<s>", "</s>", *alphabet])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    outer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    outer.chat_template = _CHAT
    return outer
