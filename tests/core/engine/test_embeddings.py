"""Embeddings and hidden states of small models in the whole engine: they equal those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_small import OUTPUT, Small, SmallModels, engine, make_small, message, messages
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize

from srv.errors import Refusal
from srv.testing.engine import CheckedEngine, GenerationResult, LocalEngine
from srv.testing.pooled import pooled_reference
from srv.types import FinishReason, Pooling, PoolingParams, RequestSpec

PAGE, CHUNK = 4, 7


# Native layers with and without overlap, and a model that runs through transformers.
SETUPS = [("qwen3", CHUNK, True), ("llama", -1, False), ("vaultgemma", CHUNK, True)]


@pytest.fixture(scope="module", params=SETUPS, ids=["native", "native, no overlap", "transformers"])
def served(small_models: SmallModels, request: pytest.FixtureRequest) -> Iterator[tuple[Small, CheckedEngine]]:
    kind, chunk, overlap = request.param
    with engine(small_models(kind), PAGE, chunk, overlap) as made:
        yield small_models(kind), made


def embedding(name: str, prompt: list[int], pooling: Pooling, **params: Any) -> RequestSpec:
    return RequestSpec(id=name, tokens=tuple(prompt), params=PoolingParams(pooling=pooling, **params))


def hidden_states(model: Any, tokens: list[int]) -> Tensor:
    """transformers' hidden states after the last norm, float32 [tokens, hidden]."""
    with torch.no_grad():
        output = model.base_model(input_ids=torch.tensor([tokens]), use_cache=False)
    states: Tensor = output.last_hidden_state[0]
    return states


def expected(small: Small, prompt: list[int], pooling: Pooling, dimensions: int | None = None) -> Tensor:
    states = hidden_states(small.model, prompt)
    return normalize(pooled_reference(states, pooling)[:dimensions], dim=0)


def vector(result: GenerationResult) -> Tensor:
    return torch.from_numpy(np.frombuffer(result.vectors, dtype="<f4").copy())


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("pooling", list(Pooling))
def test_embeddings_are_those_of_transformers_alone_and_among_generating_requests(
    served: tuple[Small, CheckedEngine], pooling: Pooling
) -> None:
    one, running = served
    running.flush()
    alone = [running.generate([embedding("alone", prompt, pooling)])[0] for prompt in one.prompts]
    running.flush()
    embeddings = [embedding(f"embedding {index}", prompt, pooling) for index, prompt in enumerate(one.prompts)]
    mixed = running.generate([each for pair in zip(embeddings, messages(one.prompts), strict=True) for each in pair])
    hits = running.generate(embeddings)
    for index, prompt in enumerate(one.prompts):
        wanted = expected(one, prompt, pooling)
        for result in (alone[index], mixed[2 * index], hits[index]):
            assert (result.finish, result.tokens, result.error) == (FinishReason.STOP, [], None)
            close(vector(result), wanted)
        assert mixed[2 * index + 1].tokens == one.tokens[index], "generation is not disturbed"
        most_cached = (len(prompt) - 1) // PAGE * PAGE
        assert hits[index].cached_tokens == (most_cached if pooling is Pooling.LAST else 0)


def test_dimensions_are_cut_before_the_vector_is_normalised(served: tuple[Small, CheckedEngine]) -> None:
    one, running = served
    prompt = one.prompts[5]
    cut, raw = running.generate(
        [
            embedding("cut", prompt, Pooling.LAST, dimensions=5),
            embedding("raw", prompt, Pooling.MEAN, normalize=False),
        ]
    )
    close(vector(cut), expected(one, prompt, Pooling.LAST, 5))
    assert vector(cut).norm().item() == pytest.approx(1.0, abs=1e-5)
    close(vector(raw), hidden_states(one.model, prompt).mean(0))


def test_hidden_states_are_those_of_every_computed_position(served: tuple[Small, CheckedEngine]) -> None:
    one, running = served
    running.flush()
    plain = messages(one.prompts[:4])
    asked = [message(f"asked {index}", prompt, hidden_states=True) for index, prompt in enumerate(one.prompts[3:])]
    # The second time, the prompts are cached.
    for _ in range(2):
        results = running.generate([*plain, *asked])
        for result, prompt, tokens in zip(results[4:], one.prompts[3:], one.tokens[3:], strict=True):
            assert result.tokens == tokens
            wanted = hidden_states(one.model, prompt + tokens[:-1])
            close(vector(result).reshape(len(prompt) + OUTPUT - 1, -1), wanted)
        assert [result.vectors for result in results[:4]] == [b""] * 4


def test_a_request_whose_hidden_states_are_not_finite_fails_alone(small_models: SmallModels, tmp_path: Path) -> None:
    one = small_models("llama")
    shutil.copytree(one.folder, tmp_path / "broken")
    weights = load_file(one.folder / "model.safetensors")
    weights["model.embed_tokens.weight"][96] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with engine(one, PAGE, CHUNK, model_path=tmp_path / "broken") as running:
        broken, fine = running.generate(
            [embedding("broken", [5, 96, 7], Pooling.MEAN), embedding("fine", one.prompts[2], Pooling.MEAN)]
        )
    assert broken.finish is FinishReason.ERROR
    assert broken.error is not None
    assert broken.error[0] == "non_finite_hidden_states"
    close(vector(fine), expected(one, one.prompts[2], Pooling.MEAN))


@pytest.mark.parametrize("kind", ["llama", "vaultgemma"], ids=["native", "transformers"])
def test_a_checkpoint_without_output_layer_is_loaded(small_models: SmallModels, tmp_path: Path, kind: str) -> None:
    """transformers' `AutoModel` saves the decoder alone, as embedding models are often published."""
    one = small_models(kind)
    one.model.base_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [type(one.model).__name__]}))
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    with engine(one, PAGE, CHUNK, model_path=tmp_path) as running:
        (result,) = running.generate([embedding("a", one.prompts[4], Pooling.LAST)])
    close(vector(result), expected(one, one.prompts[4], Pooling.LAST))


def test_a_retracted_embedding_starts_over(small_models: SmallModels) -> None:
    """A pool for less than all requests: some embeddings are retracted halfway through their prompts."""
    one = small_models("llama")
    prompts = [prompt * 3 for prompt in one.prompts[-3:]]
    with engine(one, 1, 4, pool=130, schedule_conservativeness=0.01) as running:
        results = running.generate(
            [
                *messages(one.prompts[-2:], 60),
                *(embedding(f"mean {index}", prompt, Pooling.MEAN) for index, prompt in enumerate(prompts)),
            ]
        )
        assert running.stats().retractions > 0
    for result, prompt in zip(results[2:], prompts, strict=True):
        close(vector(result), expected(one, prompt, Pooling.MEAN))


def test_pooling_of_a_sentence_transformers_folder_is_the_default(tmp_path: Path) -> None:
    make_small("llama", tmp_path)
    with pytest.raises(Refusal, match=r"asks for cls\+max pooling, which is not implemented"):
        _pooling_of(tmp_path, pooling_mode_cls_token=True, pooling_mode_max_tokens=True, include_prompt=True)
    assert _pooling_of(tmp_path, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False) == "cls"
    assert _pooling_of(tmp_path, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True) == "mean"
    assert _pooling_of(tmp_path, pooling_mode_lasttoken=True, word_embedding_dimension=48) == "last"


def _pooling_of(folder: Path, **fields: object) -> str:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    arguments = ["--device", "cpu", "--model-path", str(folder), "--is-embedding", "--max-total-tokens", "64"]
    with LocalEngine.launch(arguments) as made:
        return str(made.context.resolved.config.model.pooling)
