"""Measures the model's forward pass against the same weights in `transformers` (sdpa, float32), and against itself.

Both run in this process, with the same threads, in turns (ours, theirs, ours, theirs, …), so that what else the machine
does meets both; a ratio is the median over the pairs of turns. No server, no tier, no scheduler: those are measured
elsewhere.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hostcache.clock import Clock, WallClock
from hostcache.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from hostcache.engine.model import LlamaModel

BARS = {
    "prefill_ratio": 1.0,
    "decode_ratio": 1.5,
    "streams_ratio_512": 3.0,
    "streams_ratio_4000": 1.8,
}
"""At least this; see `run` for what each is."""

_STREAMS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    prefill_tokens: tuple[int, ...]
    chunk_tokens: int
    contexts: tuple[int, ...]
    decode_steps: int
    pairs: int
    page_tokens: int


def run(*, model: str = "smollm2", cache_dir: Path | None = None, threads: int | None = None, pairs: int = 3,
        prefill_tokens: Sequence[int] = (512, 4000), chunk_tokens: int = 512, contexts: Sequence[int] = (512, 4000),
        decode_steps: int = 12, page_tokens: int = 32, clock: Clock | None = None,
        progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """A record for JSON: `prefill`, `decode` and `streams` are lists of rows, `figures` the ones with bars.

    prefill_ratio     tokens/s ours ÷ transformers, the least over `prefill_tokens`; ours in chunks, theirs in one pass
    decode_ratio      tokens/s ours ÷ transformers, one stream at the longest of `contexts`
    streams_ratio_N   tokens/s of 8 streams together ÷ one stream, ours, at N tokens of context

    Raises MissingDependency without `transformers`, ModelError for a model that cannot be had.
    """
    import torch

    from hostcache.engine.hf import write_directory
    from hostcache.engine.loading import load_model, read_checkpoint

    transformers = _transformers()
    tell = progress or _silent
    sizes = _Sizes(prefill_tokens=tuple(prefill_tokens), chunk_tokens=chunk_tokens, contexts=tuple(contexts),
                   decode_steps=decode_steps, pairs=pairs, page_tokens=page_tokens)
    with ExitStack() as stack:
        threads_before = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads_before)
        stack.enter_context(_without_progress_bars(transformers))
        tell("loading both implementations")
        ours_model, _ = load_model(model, device="cpu", dtype="float32", threads=threads, cache_dir=cache_dir)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_directory(read_checkpoint(model, cache_dir=cache_dir), directory)
        theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="sdpa", dtype=torch.float32).eval()
        stack.enter_context(torch.inference_mode())
        ours = _Ours(ours_model, sizes, clock or WallClock())
        theirs = _Theirs(theirs_model, sizes, clock or WallClock(), transformers)
        prefill = [_prefill_row(ours, theirs, tokens, sizes, tell) for tokens in sizes.prefill_tokens]
        decode, streams = [], []
        for context in sizes.contexts:
            row, several = _decode_rows(ours, theirs, context, sizes, tell)
            decode.append(row)
            streams.append(several)
        used_threads = torch.get_num_threads()
    figures = {
        "prefill_ratio": min(row["ratio"] for row in prefill),
        "decode_ratio": max(decode, key=lambda row: row["context_tokens"])["ratio"],
        **{f"streams_ratio_{row['context_tokens']}": row["ratio"] for row in streams},
    }
    return {
        "version": 1, "model": model, "model_revision": ours_model.spec.revision, "threads": used_threads,
        "pairs": pairs, "chunk_tokens": chunk_tokens, "page_tokens": page_tokens, "torch": torch.__version__,
        "transformers": transformers.__version__, "prefill": prefill, "decode": decode, "streams": streams,
        "figures": figures, "bars": {name: bar for name, bar in BARS.items() if name in figures},
        "missed": [name for name, bar in BARS.items() if name in figures and figures[name] < bar],
    }


def table(record: Mapping[str, Any]) -> str:
    """The record as plain text."""
    lines = [f"{record['model']}, float32, {record['threads']} threads, medians of {record['pairs']} pairs of turns "
             f"(torch {record['torch']}, transformers {record['transformers']})", "",
             f"{'':34}{'hostcache':>12}{'transformers':>14}{'ratio':>8}"]
    for row in record["prefill"]:
        lines.append(f"{'prefill of ' + format(row['tokens'], ',') + ' tokens, tokens/s':34}"
                     f"{row['ours_tokens_per_s']:>12.0f}{row['theirs_tokens_per_s']:>14.0f}{row['ratio']:>8.2f}")
    for row in record["decode"]:
        lines.append(f"{'decode at ' + format(row['context_tokens'], ',') + ' tokens, tokens/s':34}"
                     f"{row['ours_tokens_per_s']:>12.1f}{row['theirs_tokens_per_s']:>14.1f}{row['ratio']:>8.2f}")
    lines += ["", f"{'':34}{'one stream':>12}{str(_STREAMS) + ' streams':>14}{'ratio':>8}"]
    for row in record["streams"]:
        lines.append(f"{'decode at ' + format(row['context_tokens'], ',') + ' tokens, tokens/s':34}"
                     f"{row['one_tokens_per_s']:>12.1f}{row['together_tokens_per_s']:>14.1f}{row['ratio']:>8.2f}")
    lines.append("")
    for name, bar in record["bars"].items():
        verdict = "missed" if name in record["missed"] else "met"
        lines.append(f"{name} {record['figures'][name]:.2f}, bar {bar}: {verdict}")
    return "\n".join(lines)


class _Ours:
    def __init__(self, model: LlamaModel, sizes: _Sizes, clock: Clock) -> None:
        import torch

        self._model = model
        self._clock = clock
        self._sizes = sizes
        spec = model.spec
        longest = max(*sizes.prefill_tokens, *(context + sizes.decode_steps for context in sizes.contexts))
        self._pages_per_row = -(-longest // sizes.page_tokens)
        pages = _STREAMS * self._pages_per_row
        self._pool = torch.zeros(pages, spec.layers, 2, spec.kv_heads, sizes.page_tokens, spec.head_dim)
        # Scattered, as the pages of an engine that has served for a while are.
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
        self._rows = [order[row::_STREAMS] for row in range(_STREAMS)]

    def prefill(self, tokens: Sequence[int]) -> float:
        return self._timed(lambda: self._chunks(tokens))

    def fill(self, tokens: Sequence[int]) -> None:
        """The same context in every stream's own pages."""
        self._chunks(tokens)
        for pages in self._rows[1:]:
            self._pool[pages] = self._pool[self._rows[0]]

    def decode(self, context: int, streams: int) -> float:
        return self._timed(lambda: self._steps(context, streams))

    def _chunks(self, tokens: Sequence[int]) -> None:
        from hostcache.engine.interfaces import Row

        for start in range(0, len(tokens), self._sizes.chunk_tokens):
            chunk = tokens[start:start + self._sizes.chunk_tokens]
            self._model.forward([Row(tokens=chunk, start=start, pages=self._rows[0])], self._pool,
                                self._sizes.page_tokens)

    def _steps(self, context: int, streams: int) -> None:
        from hostcache.engine.interfaces import Row

        tokens = [0] * streams
        for step in range(self._sizes.decode_steps):
            rows = [Row(tokens=(token,), start=context + step, pages=pages)
                    for token, pages in zip(tokens, self._rows, strict=False)]
            tokens = self._model.forward(rows, self._pool, self._sizes.page_tokens).argmax(dim=-1).tolist()

    def _timed(self, work: Callable[[], None]) -> float:
        started_s = self._clock.now()
        work()
        return self._clock.now() - started_s


class _Theirs:
    def __init__(self, model: Any, sizes: _Sizes, clock: Clock, transformers: Any) -> None:
        self._model = model
        self._sizes = sizes
        self._clock = clock
        self._transformers = transformers
        self._cache: Any = None
        # Renamed in the course of version 5; the old name still works there, with a warning for every call.
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

    def prefill(self, tokens: Sequence[int]) -> float:
        import torch

        ids = torch.tensor([list(tokens)])
        started_s = self._clock.now()
        self._cache = self._transformers.DynamicCache()
        self._forward(ids)
        return self._clock.now() - started_s

    def decode(self) -> float:
        """Continues from the last prefill; leaves its cache as it was."""
        import torch

        started_s = self._clock.now()
        ids = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(self._sizes.decode_steps):
            ids = self._forward(ids).argmax(dim=-1)
        took_s = self._clock.now() - started_s
        self._cache.crop(-self._sizes.decode_steps)
        return took_s

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [1, 1, vocab] of the last token; the cache grows by all of them."""
        logits: torch.Tensor = self._model(ids, use_cache=True, logits_to_keep=1,
                                           **{self._cache_name: self._cache}).logits
        return logits


def _prefill_row(ours: _Ours, theirs: _Theirs, count: int, sizes: _Sizes,
                 tell: Callable[[str], None]) -> dict[str, Any]:
    tokens = _prompt(count)
    _warm_up(lambda: ours.prefill(tokens[:64]), lambda: theirs.prefill(tokens[:64]))
    taken = []
    for pair in range(sizes.pairs):
        tell(f"prefill of {count} tokens, pair {pair + 1} of {sizes.pairs}")
        taken.append((ours.prefill(tokens), theirs.prefill(tokens)))
    return {"tokens": count, "ours_tokens_per_s": count / statistics.median(pair[0] for pair in taken),
            "theirs_tokens_per_s": count / statistics.median(pair[1] for pair in taken),
            "ratio": statistics.median(theirs_s / ours_s for ours_s, theirs_s in taken)}


def _decode_rows(ours: _Ours, theirs: _Theirs, context: int, sizes: _Sizes,
                 tell: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, Any]]:
    tokens = _prompt(context)
    tell(f"decode at {context} tokens: filling the contexts")
    ours.fill(tokens)
    theirs.prefill(tokens)
    _warm_up(lambda: ours.decode(context, 1), theirs.decode, lambda: ours.decode(context, _STREAMS))
    taken = []
    for pair in range(sizes.pairs):
        tell(f"decode at {context} tokens, pair {pair + 1} of {sizes.pairs}")
        taken.append((ours.decode(context, 1), theirs.decode(), ours.decode(context, _STREAMS)))
    one_s, theirs_s, together_s = (statistics.median(turn[which] for turn in taken) for which in range(3))
    steps = sizes.decode_steps
    decode = {"context_tokens": context, "ours_tokens_per_s": steps / one_s, "theirs_tokens_per_s": steps / theirs_s,
              "ratio": statistics.median(theirs / one for one, theirs, _ in taken)}
    streams = {"context_tokens": context, "streams": _STREAMS, "one_tokens_per_s": steps / one_s,
               "together_tokens_per_s": _STREAMS * steps / together_s,
               "ratio": statistics.median(_STREAMS * one / together for one, _, together in taken)}
    return decode, streams


def _prompt(count: int) -> list[int]:
    """Token ids every vocabulary has; speed does not depend on which."""
    return [3 + (7 * index) % 251 for index in range(count)]


def _warm_up(*works: Callable[[], float]) -> None:
    for work in works:
        work()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency("the comparison needs the package transformers, which is not installed; "
                                "pip install transformers") from error
    return transformers


@contextmanager
def _without_progress_bars(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _silent(_line: str) -> None:
    return None
