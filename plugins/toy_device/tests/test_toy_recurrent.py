"""Recurrent states on the simulated device: steps in flight, captured steps, and prefixes that go on from snapshots."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams

PROMPT = tuple((place * 37 + 11) % 50 + 3 for place in range(21))
OUTPUT, PAGE = 6, 4


def save(folder: Path) -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        full_attention_interval=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    model = Qwen3NextForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def greedy(model: Qwen3NextForCausalLM, prompt: tuple[int, ...]) -> list[int]:
    output: list[int] = []
    for _ in range(OUTPUT):
        with torch.no_grad():
            best = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, -1].topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "a near tie in the reference: choose another seed"
        output.append(int(best.indices[0]))
    return output


def request(name: str, prompt: tuple[int, ...]) -> RequestSpec:
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    return RequestSpec(id=name, tokens=prompt, params=params)


def test_output_in_a_batch_and_after_a_prefix_hit_is_that_of_transformers(tmp_path: Path) -> None:
    model = save(tmp_path)
    prompts = [PROMPT, PROMPT[:9], (7, 8)]
    arguments = ["--device", "toy", "--model-path", str(tmp_path), "--dtype", "float32", "--page-size", str(PAGE)]
    arguments += ["--max-total-tokens", "256", "--chunked-prefill-size", "16", "--max-running-requests", "4"]
    with CheckedEngine.launch(arguments) as launched:
        results = launched.generate([request(str(number), prompt) for number, prompt in enumerate(prompts)])
        assert [result.tokens for result in results] == [greedy(model, prompt) for prompt in prompts]
        turn = (*PROMPT, *results[0].tokens, 5)
        (hit,) = launched.generate([request("hit", turn)])
        assert (hit.cached_tokens, hit.tokens) == (20, greedy(model, turn))
