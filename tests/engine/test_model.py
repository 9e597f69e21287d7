"""The forward pass gives the logits `transformers` gives, however it is cut, and never depends on where pages lie."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.tiny_models import FAMILIES, PAGE_TOKENS, PagedRun, make_directory, their_logits

from hostcache.engine.loading import load_model
from hostcache.engine.model import LlamaModel, packed_linear

TOKENS = [3 + (17 * index) % 289 for index in range(900)]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaModel, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    theirs = make_directory(request.param, directory)
    ours, _ = load_model(str(directory), device="cpu")
    return ours, theirs


@pytest.fixture(scope="module")
def tiny() -> LlamaModel:
    return load_model("random:tiny", device="cpu")[0]


def scattered(pages: int, seed: int) -> list[int]:
    order = list(range(pages))
    random.Random(seed).shuffle(order)
    return order


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_whole_prompt_gives_the_logits_of_transformers(pair: tuple[LlamaModel, Any]) -> None:
    ours, theirs = pair
    run = PagedRun(ours, 50)
    close(run.fill(TOKENS[:700], scattered(50, 1), chunk=700)[0], their_logits(theirs, TOKENS[:700])[-1])


def test_chunks_and_decode_steps_give_the_logits_of_transformers(pair: tuple[LlamaModel, Any]) -> None:
    ours, theirs = pair
    expected = their_logits(theirs, TOKENS)
    run, pages = PagedRun(ours, 50), scattered(50, 2)
    for start in range(0, 600, 100):
        close(run.step((TOKENS[start:start + 100], start, pages))[0], expected[start + 99])
    for position in range(600, 640):
        close(run.step((TOKENS[position:position + 1], position, pages))[0], expected[position])


def test_the_first_token_alone_is_a_context_of_one(pair: tuple[LlamaModel, Any]) -> None:
    ours, theirs = pair
    close(PagedRun(ours, 3).step((TOKENS[:1], 0, [2]))[0], their_logits(theirs, TOKENS[:1])[0])


def test_a_mixed_step_gives_every_row_its_own_logits_in_the_order_of_the_rows(pair: tuple[LlamaModel, Any]) -> None:
    ours, theirs = pair
    expected = their_logits(theirs, TOKENS)
    run, order = PagedRun(ours, 200), scattered(200, 3)
    short, long, cold, chunked = order[:4], order[4:50], order[50:60], order[60:110]
    run.fill(TOKENS[:33], short, chunk=33)
    run.fill(TOKENS[:600], long, chunk=256)
    run.fill(TOKENS[:300], chunked, chunk=300)
    logits = run.step((TOKENS[33:34], 33, short), (TOKENS[:150], 0, cold), (TOKENS[600:601], 600, long),
                      (TOKENS[300:377], 300, chunked))
    close(logits, torch.stack([expected[33], expected[149], expected[600], expected[376]]))


@settings(max_examples=30, deadline=None)
@given(context=st.integers(1, 600), chunk=st.integers(1, 140), seed=st.integers(0, 1000))
def test_where_pages_lie_never_moves_a_bit(tiny: LlamaModel, context: int, chunk: int, seed: int) -> None:
    tidy, torn = PagedRun(tiny, 64), PagedRun(tiny, 64)
    in_order, mixed = list(range(48)), scattered(64, seed)[:48]
    tokens = [token % 256 for token in TOKENS[:750]]
    tidy.fill(tokens[:context], in_order, chunk=300)
    # As a restore does: the same bytes under other page ids.
    torn.pool[mixed] = tidy.pool[in_order]
    following = tokens[context:context + chunk]
    assert torch.equal(tidy.step((following, context, in_order)), torn.step((following, context, mixed)))
    end = context + chunk
    step = (tokens[end:end + 1], end)
    assert torch.equal(tidy.step((*step, in_order)), torn.step((*step, mixed)))
    used = -(-(end + 1) // PAGE_TOKENS)
    assert torch.equal(tidy.pool[in_order[:used]].nan_to_num(), torn.pool[mixed[:used]].nan_to_num())


def test_a_decode_row_does_not_see_what_the_other_rows_hold(tiny: LlamaModel) -> None:
    answers = []
    for shift in (0, 40):
        run = PagedRun(tiny, 64)
        run.fill([token % 256 for token in TOKENS[:290]], list(range(20)), chunk=290)
        run.fill([(token + shift) % 256 for token in TOKENS[:500]], list(range(20, 60)), chunk=500)
        answers.append(run.step(([5], 290, list(range(20))), ([6 + shift], 500, list(range(20, 60))))[0])
    assert torch.equal(*answers)


def test_a_row_may_own_more_pages_than_it_fills(tiny: LlamaModel) -> None:
    lean, rich = PagedRun(tiny, 8), PagedRun(tiny, 8)
    assert torch.equal(lean.fill([1, 2, 3], [4], chunk=3), rich.fill([1, 2, 3], [4, 7, 0], chunk=3))


def test_a_page_is_cleared_of_what_its_last_owner_left_before_it_is_written(tiny: LlamaModel) -> None:
    run = PagedRun(tiny, 4)
    run.fill([1, 2, 3], [2], chunk=3)
    assert not run.pool[2, :, :, :, 3:].any()
    assert run.pool[3].isnan().all()


@pytest.mark.parametrize(("tokens", "start", "pages"), [([], 0, [0]), ([1] * 17, 0, [0]), ([1], 8192, [0] * 600)])
def test_a_row_that_does_not_fit_is_refused_with_its_numbers(tiny: LlamaModel, tokens: list[int], start: int,
                                                            pages: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"{len(tokens)} tokens from position {start} with {len(pages)} pages"):
        PagedRun(tiny, 4).step((tokens, start, pages))


def test_packed_products_equal_plain_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    for rows in (1, 2, 3, 70):
        x = torch.randn(rows, 24, generator=generator)
        torch.testing.assert_close(packed_linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias))
        torch.testing.assert_close(packed_linear(weight, None, keep_plain=True)(x), x @ weight.T)


def test_half_precision_takes_the_plain_path_to_nearby_logits(tiny: LlamaModel) -> None:
    """The path a GPU takes, as far as a CPU can walk it."""
    half, _ = load_model("random:tiny", device="cpu", dtype="bfloat16")
    tokens = [token % 256 for token in TOKENS[:400]]
    order = scattered(40, 4)
    exact, rough = (PagedRun(model, 40).fill(tokens, order, chunk=150) for model in (tiny, half))
    assert torch.nn.functional.cosine_similarity(exact, rough).item() > 0.99


@pytest.mark.gpu
def test_a_gpu_gives_the_logits_of_the_cpu(tiny: LlamaModel) -> None:
    on_gpu, _ = load_model("random:tiny", device="cuda", dtype="float32")
    tokens = [token % 256 for token in TOKENS[:750]]
    order = scattered(50, 5)
    here, there = PagedRun(tiny, 50), PagedRun(on_gpu, 50)
    torch.testing.assert_close(there.fill(tokens, order, chunk=300).cpu(), here.fill(tokens, order, chunk=300),
                               rtol=1e-3, atol=1e-3)
    step = ([9], len(tokens), order)
    torch.testing.assert_close(there.step(step).cpu(), here.step(step), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_real_model_says_something_sensible(tmp_path: Path) -> None:
    model, tokenizer = load_model("smollm2", device="cpu")
    prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    run, pages = PagedRun(model, 20), list(range(19, -1, -1))
    logits = run.fill(prompt, pages, chunk=512)
    answer: list[int] = []
    while not answer or answer[-1] not in tokenizer.eos_ids:
        answer.append(int(logits.argmax()))
        logits = run.step((answer[-1:], len(prompt) + len(answer) - 1, pages))
    assert tokenizer.decode(answer) == "The capital of France is Paris."
