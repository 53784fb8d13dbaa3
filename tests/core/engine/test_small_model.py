"""Small random models in the whole engine: their tokens equal those of transformers with any scheduling.

They run in float32, so that tokens can be compared. The support matrix shows models by `test_model_cells.py`.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from engine_small import FIELDS, OUTPUT, SmallModels, engine, greedy, message, messages
from models_small import GRANITE, small_model, write_gguf

# Model, page size, chunk size, overlap: all combinations for one model, each value once for the others.
SETUPS = [
    *(("llama", *setup) for setup in product((1, 16), (1, 16, -1), (True, False))),
    *((kind, *setup) for kind in FIELDS if kind != "llama" for setup in ((1, 16, True), (16, 1, False))),
]


@pytest.mark.parametrize(
    ("kind", "page", "chunk", "overlap"),
    SETUPS,
)
def test_greedy_tokens_are_those_of_transformers(
    small_models: SmallModels, kind: str, page: int, chunk: int, overlap: bool
) -> None:
    one = small_models(kind)
    with engine(one, page, chunk, overlap) as served:
        missed = served.generate(messages(one.prompts))
        hits = served.generate(messages(one.prompts))
        served.flush()
        (alone,) = served.generate(messages(one.prompts[-1:]))
    assert [result.tokens for result in missed] == one.tokens
    assert [result.tokens for result in hits] == one.tokens
    assert alone.tokens == one.tokens[-1]
    assert [result.cached_tokens for result in [*missed, alone]] == [0] * (len(one.prompts) + 1)
    assert [result.cached_tokens for result in hits] == [(len(prompt) - 1) // page * page for prompt in one.prompts]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "granite", "smollm3", "gemma3"])
def test_a_gguf_file_gives_the_same_tokens(small_models: SmallModels, kind: str, tmp_path: Path) -> None:
    """Only files of Gemma 3 have a sliding window. The fourth layer of SmolLM3 has no RoPE."""
    torch.manual_seed(0)
    fields = {"granite": GRANITE, "smollm3": {"num_hidden_layers": 4}, "gemma3": {"num_hidden_layers": 7}}
    model, one = small_model(kind, **fields.get(kind, {})), small_models("llama")
    write_gguf(tmp_path / "small.gguf", model, kind)
    with engine(one, 16, 16, model_path=tmp_path / "small.gguf") as served:
        results = served.generate(messages(one.prompts, 6))
    assert [result.tokens for result in results] == [greedy(model, prompt, 6) for prompt in one.prompts]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_native_model_is_the_same_through_transformers(small_models: SmallModels, overlap: bool) -> None:
    one = small_models("llama")
    with engine(one, 4, 7, overlap, model_impl="transformers") as served:
        assert [result.tokens for result in served.generate(messages(one.prompts))] == one.tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_without_a_prefix_cache_nothing_is_hit(small_models: SmallModels, overlap: bool) -> None:
    one = small_models("llama")
    with engine(one, 4, 16, overlap, disable_radix_cache=True) as served:
        for _ in range(2):
            results = served.generate(messages(one.prompts))
            assert [result.tokens for result in results] == one.tokens
            assert [result.cached_tokens for result in results] == [0] * len(results)
            assert served.stats().pages_cached == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_prefixes_of_one_another_share_pages_under_every_policy(small_models: SmallModels, policy: str) -> None:
    """With few slots, later requests hit the prefixes of earlier requests, which still run or have finished."""
    one = small_models("llama")
    text = one.prompts[-1] + one.tokens[-1]
    prompts = [text[:length] for length in (45, 33, 47, 13, 45, 41)]
    with engine(one, 4, 16, schedule_policy=policy, max_running_requests=2) as served:
        results = served.generate(messages(prompts, 4))
    assert [result.tokens for result in results] == [greedy(one.model, prompt, 4) for prompt in prompts]
    assert results[4].cached_tokens == 44
    assert all(result.cached_tokens % 4 == 0 for result in results)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("flags", [{}, {"disable_radix_cache": True}], ids=["cached", "uncached"])
def test_retracted_requests_resume_where_they_were(
    small_models: SmallModels, overlap: bool, flags: dict[str, object]
) -> None:
    """The pool is large enough for each single request, but not for all of them together."""
    one = small_models("qwen3")
    with engine(one, 4, 32, overlap, pool=112, schedule_conservativeness=0.01, **flags) as served:
        results = served.generate(messages(one.prompts))
        assert served.stats().retractions > 0
    assert [result.tokens for result in results] == one.tokens


@pytest.mark.parametrize("overlap", [True, False])
def test_retraction_changes_no_sampled_token_and_no_logprob(small_models: SmallModels, overlap: bool) -> None:
    one = small_models("llama")
    params = {
        "temperature": 0.9,
        "seed": 11,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_tokens": 9,
        "stop_token_ids": (one.tokens[3][4],),
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    with engine(one, 4, 32, overlap) as roomy:
        calm = roomy.generate(messages(one.prompts, **params))
        assert roomy.stats().retractions == 0
    with engine(one, 4, 32, overlap, pool=112, schedule_conservativeness=0.01) as tight:
        pressed = tight.generate(messages(one.prompts, **params))
        assert tight.stats().retractions > 0
    for before, after in zip(calm, pressed, strict=True):
        assert (after.tokens, after.finish) == (before.tokens, before.finish)
        assert [entry.logprob for entry in after.logprobs] == pytest.approx(
            [entry.logprob for entry in before.logprobs], abs=1e-3
        )
        assert [entry.token for entry in after.prompt_logprobs] == [entry.token for entry in before.prompt_logprobs]


@pytest.mark.parametrize("overlap", [True, False])
def test_requests_of_every_kind_do_not_affect_each_other_in_a_batch(small_models: SmallModels, overlap: bool) -> None:
    one = small_models("llama")
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.05, "seed": 4},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": ((5, 4.0), (6, -100.0))},
        {"logprobs": 4, "temperature": 1.3, "seed": 5},
        {"prompt_logprobs": 2},
        {"min_tokens": 6, "stop_token_ids": tuple(range(3, 40))},
    ]
    sent = [
        message(f"mixed {number}", prompt, OUTPUT - number, **params)
        for number, (prompt, params) in enumerate(zip(one.prompts, kinds, strict=True))
    ]
    with engine(one, 4, 16, overlap) as served:
        together = served.generate(sent)
        served.flush()
        alone = []
        for each in sent:
            alone += served.generate([each])
            served.flush()
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.finish for result in together] == [result.finish for result in alone]
    assert together[0].tokens == one.tokens[0]
    assert together[6].tokens == one.tokens[6][: OUTPUT - 6]
