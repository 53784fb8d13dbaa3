"""With --enable-deterministic-inference a request gets the same bits alone and in any batch, however it is divided.

Compared are the tokens, the log probabilities of the twenty best tokens at each position, and the hidden states of all
positions, from which the logits follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import Small, engine, make_small, message
from gguf import GGMLQuantizationType
from models_small import small_model, write_gguf

from srv.errors import Refusal
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import RequestSpec
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

FIELDS = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "max_position_embeddings": 2048,
}
OUTPUT = 10
BATCHES = (1, 2, 5, 16)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("llama"), **FIELDS)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(file, small_model("llama", **FIELDS), "llama", GGMLQuantizationType.Q8_0)
    return file


@contextmanager
def served_with(small: Small, chunk: int, deterministic: bool = True, **flags: Any) -> Iterator[CheckedEngine]:
    flags = {"enable_return_hidden_states": True, **flags}
    flags |= {"enable_deterministic_inference": True} if deterministic else {}
    with engine(small, 16, chunk, pool=8192, **flags) as served:
        yield served


def prompt(first: int, length: int, seed: int) -> list[int]:
    drawn = torch.randint(3, 97, (length - 1,), generator=torch.Generator().manual_seed(seed))
    return [first, *drawn.tolist()]


PREFIX = prompt(9, 80, seed=1)  # longer than the 64 keys that rows share when they have the same pages
OBSERVED = (
    message("whole", prompt(10, 75, seed=2), OUTPUT, logprobs=20, hidden_states=True),
    message("prefix", [*PREFIX, 5, 6, 7], OUTPUT, logprobs=20),
)


def others(count: int) -> list[RequestSpec]:
    """Requests of many lengths; the first ones have the prefix of an observed one."""
    prompts = [[*PREFIX, 20 + number] for number in range(min(count, 3))]
    prompts += [prompt(30 + number, 1 + 7 * number, seed=number) for number in range(count - len(prompts))]
    return [message(f"other {number}", tokens, OUTPUT + number % 3) for number, tokens in enumerate(prompts)]


def bits(result: GenerationResult) -> tuple[object, ...]:
    assert result.error is None
    return result.tokens, result.logprobs, result.vectors


@pytest.mark.parametrize("weights", ["plain", "gguf"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_gets_the_same_bits_in_any_batch(small: Small, gguf: Path, dtype: str, weights: str) -> None:
    flags = {"dtype": dtype, **({"model_path": gguf} if weights == "gguf" else {})}
    found = []
    for chunk in (-1, 48):
        with served_with(small, chunk, **flags) as served:
            for batch in BATCHES:
                served.flush()
                observed = OBSERVED[:1] if batch == 1 else OBSERVED
                results = served.generate([*observed, *others(batch - len(observed))])
                found.append([bits(result) for result in results[: len(observed)]])
            served.flush()
            found.append([found[-1][0], bits(served.generate(OBSERVED[1:])[0])])
    for each in found:
        assert each[0] == found[0][0]
        assert each[1:] in ([], found[1][1:])


@covers("enable_deterministic_inference=true", "enable_deterministic_inference=false", platform="cpu")
def test_a_long_prompt_gets_the_same_bits_whatever_its_last_chunk_is(small: Small) -> None:
    """The attention of a row with one query of many keys is divided otherwise, and that of longer chunks is not."""
    long = message("long", prompt(11, 1300, seed=3), 4, logprobs=20, hidden_states=True)
    whole, divided = [], []
    for deterministic in (True, False):
        with served_with(small, -1, deterministic) as served:
            whole.append(bits(served.generate([long])[0]))
        with served_with(small, 1299, deterministic) as served:
            divided.append(bits(served.generate([long])[0]))
    assert whole[0] == divided[0]
    assert whole[1] != divided[1]


def refusals(small: Small, **flags: Any) -> list[tuple[str, str]]:
    with pytest.raises(Refusal) as refused, served_with(small, -1, **flags):
        pass
    return [(each.code, each.reason) for each in refused.value.rejections]


def test_what_is_not_known_to_be_independent_of_the_batch_is_refused(small: Small) -> None:
    """Attention with torch's operators, even if only it fits; layers of transformers; several ranks."""
    ((code, reason),) = refusals(small, attention_backend="torch_native")
    assert code == "backend_unfit"
    assert "it is not batch invariant" in reason
    ((code, reason),) = refusals(small, dtype="float16")
    assert code == "no_backend_fits"
    ((code, reason),) = refusals(small, model_impl="transformers")
    assert code == "not_invariant"
    assert "by the number of rows (model_impl is transformers)" in reason
    assert ("not_invariant", "sums over 2 ranks (tp_size) are not known to be independent of the number of rows") in (
        refusals(small, tp_size=2)
    )
