"""Mixtures of experts, latent attention and recurrent layers behind real servers: tokens are those of transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseek_small
import pytest
from e2e_support import Server, served
from engine_small import OUTPUT, Small, greedy, make_small, prompted, saved_small
from letters_model import write_tokenizer
from models_small import SHARED_EXPERTS, SIZES
from mxfp4_weights import write_gpt_oss

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LENGTHS = (1, 5, 17, 33, 40)
ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "1024", "--chunked-prefill-size", "16")
WORDS = ["a", *(f"w{token}" for token in range(1, SIZES["vocab_size"]))]  # the first stands for unknown words
GREEDY = {"temperature": 0, "ignore_eos": True}
MODELS: dict[str, Callable[[Path], Small]] = {
    "Qwen3MoeForCausalLM": lambda folder: make_small("qwen3_moe", folder, head_dim=16),
    "DeepseekV3ForCausalLM": lambda folder: saved_small(deepseek_small.small("v3"), folder, LENGTHS),
    "Qwen3NextForCausalLM": lambda folder: make_small("qwen3_next", folder, **SHARED_EXPERTS),
    "GptOssForCausalLM": lambda folder: prompted(write_gpt_oss(folder), folder, LENGTHS),
}
# Native kernels for experts in MXFP4 round their inputs to 8 bits, after which tokens cannot be compared.
MORE = {"GptOssForCausalLM": ("--moe-runner-backend", "torch_native")}


async def posted(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """The responses to requests that are sent at once."""
    async with server.asynchronous() as client:
        responses = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
    assert {response.status_code for response in responses} == {200}, [response.text for response in responses]
    return [response.json() for response in responses]


def text(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize("name", MODELS)
def test_requests_at_once_and_further_turns_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    """Texts in chunks; then three further turns at once, which begin with a conversation that is cached."""
    small = MODELS[name](tmp_path)
    write_tokenizer(tmp_path, WORDS)
    conversation = small.prompts[-1] + small.tokens[-1]
    turns = [[*conversation, token, 5, 6, 7] for token in (90, 91, 92)]
    expected = [greedy(small.model, turn, OUTPUT) for turn in turns]
    first = [
        {"model": tmp_path.name, "prompt": text(prompt), "max_tokens": OUTPUT, **GREEDY} for prompt in small.prompts
    ]
    sampling = {"max_new_tokens": OUTPUT, **GREEDY}
    second = [{"input_ids": turn, "sampling_params": sampling} for turn in turns]
    with served(tmp_path / "log", "--model-path", str(tmp_path), *ARGUMENTS, *MORE.get(name, ())) as server:
        answers = asyncio.run(posted(server, "/v1/completions", first))
        assert [answer["choices"][0]["text"].split() for answer in answers] == [
            text(token).split() for token in small.tokens
        ]
        results = asyncio.run(posted(server, "/generate", second))
        assert [result["output_ids"] for result in results] == expected
        assert min(result["meta_info"]["cached_tokens"] for result in results) >= 32
