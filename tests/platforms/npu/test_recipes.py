"""The command lines that Ascend's vendor publishes, served scaled down on simulated devices.

Those that lack nothing but drafts and separate prefill and decode (docs/support/recipes-ascend.md), with models of
their architecture and the head sizes of the vendor. Each token has to be the best one of the float32 model, or so near
to it that int8 products and bfloat16 explain it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models_small import expected_logits, small_model
from quantized_cells import write_quantized
from scaled_recipes import ranks_of, scaled

from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams
from srv_matrix.recipes import Recipe, read_recipes, refused_by, without_later

PUBLISHED = Path(__file__).resolve().parents[3] / "support_matrix" / "published"
(ASCEND,) = read_recipes(PUBLISHED)
SERVED = [row for row in ASCEND.rows if not refused_by(ASCEND, row._replace(flags=without_later(row.flags)))]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
PROMPTS = ([3, 5, 7, 11, 13, 17, 19, 23], [2] * 3, list(range(20, 120)))
OUTPUT = 6
BEHIND = 0.12  # of the range of logits, that a token may be behind the best one


def kind_of(recipe: Recipe) -> str:
    """The model type of the architecture: those with experts are named by how much of them a token uses."""
    return "qwen3_moe" if re.search(r"-A\d+B$", recipe.model) else "qwen3"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    by_key: dict[tuple[str, str], tuple[Path, Any]] = {}

    def model_of(recipe: Recipe) -> tuple[Path, Any]:
        # One line that the table lists under BF16 is for quantized weights.
        key = kind_of(recipe), "W8A8" if "--quantization modelslim" in recipe.flags else recipe.weights
        if key not in by_key:
            folder = tmp_path_factory.mktemp("-".join(key))
            model = small_model(key[0], **SIZES, **(EXPERTS if key[0] == "qwen3_moe" else {}))
            if key[1] == "W8A8":
                model = write_quantized(folder, model, "modelslim")
            else:
                model.to(torch.bfloat16).save_pretrained(folder)
                model.float()
            by_key[key] = folder, model
        return by_key[key]

    return model_of


@pytest.mark.proof(minutes=1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", SERVED, ids=lambda recipe: recipe.name)
def test_a_published_line_is_served(recipe: Recipe, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = models(recipe)
    words = scaled(ASCEND, recipe)
    monkeypatch.setenv("SRV_NPU_SIMULATOR", recipe.variant)
    monkeypatch.setenv("SRV_NPU_SIMULATOR_COUNT", str(ASCEND.devices[recipe.variant]))
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    requests = [RequestSpec(id=str(i), tokens=tuple(prompt), params=params) for i, prompt in enumerate(PROMPTS)]
    with CheckedEngine.launch([*words, "--model-path", str(folder), "--max-total-tokens", "4096"]) as engine:
        results = engine.generate(requests)
        stats = engine.stats()
    assert min(ranks_of(recipe), 4) == int(words[words.index("--tp-size") + 1])
    assert stats.replayed_steps > 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.tokens) == OUTPUT
        logits = expected_logits(model, torch.tensor([*prompt, *result.tokens[:-1]]))[len(prompt) - 1 :]
        chosen = logits[range(OUTPUT), result.tokens]
        behind = (logits.amax(1) - chosen) / (logits.amax(1) - logits.amin(1))
        assert float(behind.max()) < BEHIND, (result.tokens, behind)


def test_lines_that_lack_only_drafts_are_served() -> None:
    assert len(SERVED) == 16
