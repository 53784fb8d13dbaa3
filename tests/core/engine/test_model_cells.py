"""What the support matrix shows as verified of models, on the path of a user who sets nothing but the model.

The checkpoints are in bfloat16, with head sizes that the CPU's native attention takes, as those of users are, and each
test asserts that this path ran. bfloat16 leaves no tokens to compare: the log-probabilities must be as close to those
of transformers in float32 as transformers itself is in bfloat16. Exact comparisons in float32 are in
`test_small_model.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import FIELDS, LENGTHS, message
from gguf import GGMLQuantizationType
from models_small import GRANITE, SIZES, expected_logits, randomized, small_model, write_gguf
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from srv.planning.pools import kv_dtype
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import RequestSpec
from srv_kernels.cpu.library import load
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.skipif(load().library is None, reason="the native CPU kernels do not load")

CELLS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "vaultgemma": "any other decoder",  # without native layers: through transformers
}
SLOW = dict.fromkeys(CELLS.keys() - {"llama"}, (pytest.mark.slow,))
GGUF = ("llama", "qwen2", "qwen3", "granite", "smollm3", "gemma3")
# Multiples of a GGUF block of 32; the head size is one that native attention takes. Ordinary models have small weights,
# and with these logits differ enough for a wrong layer to show.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "initializer_range": 0.1}
OF_KIND: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen3_5_moe": {"moe_intermediate_size": 32},  # transformers' product of experts needs rows of whole 16 bytes
    "vaultgemma": {"query_pre_attn_scalar": 16},
}
OUTPUT = 8
ATTENTION = ("prefill_attention_backend", "decode_attention_backend")


def rounded(kind: str, fields: dict[str, Any]) -> Any:
    """A small model whose weights are those of a bfloat16 checkpoint, in float32."""
    torch.manual_seed(0)
    fields = {**fields, **SHAPE, **OF_KIND.get(kind, {})}
    if kind != "vaultgemma":
        model = small_model(kind, **fields)
    else:
        config = AutoConfig.for_model(kind, **{**SIZES, **fields})
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model = randomized(made)
    return model.to(torch.bfloat16).float()


@contextmanager
def served(path: Path) -> Iterator[CheckedEngine]:
    """The engine of a user who sets nothing; a smaller pool makes the checks of its pages faster."""
    threads = torch.get_num_threads()
    try:
        with CheckedEngine.launch(["--device=cpu", f"--model-path={path}", "--max-total-tokens=2048"]) as engine:
            torch.set_num_threads(1)
            yield engine
    finally:
        torch.set_num_threads(threads)


def assert_fast_path(engine: CheckedEngine) -> None:
    """bfloat16 throughout, and native attention for every step."""
    resolved = engine.context.resolved
    assert (resolved.config.model.dtype, kv_dtype(resolved.config)) == ("bfloat16", "bfloat16")
    assert [resolved.backends[slot].spec.name for slot in ATTENTION] == ["native", "native"]
    runner = engine.executor.worker.runner  # type: ignore[attr-defined]
    assert {type(backend).__name__ for backend in runner._attention} == {"NativeAttention"}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [10 + number, *torch.randint(3, 97, (length - 1,), generator=generator).tolist()]
        for number, length in enumerate(LENGTHS)
    ]


def requests(**params: Any) -> list[RequestSpec]:
    return [
        message(f"{number} {params}", prompt, OUTPUT, logprobs=0, **params) for number, prompt in enumerate(prompts())
    ]


def logprobs(model: Any, tokens: list[int]) -> Tensor:
    return expected_logits(model, torch.tensor(tokens)).float().log_softmax(-1)


def errors(results: list[GenerationResult], exact: Any, coarse: Any) -> tuple[float, float, float]:
    """The largest errors of our log-probabilities, of those of `coarse`, and by which a token is not the best one."""
    ours, theirs, missed = [0.0], [0.0], [0.0]
    for prompt, result in zip(prompts(), results, strict=True):
        assert result.error is None
        tokens = [*prompt, *result.tokens]
        right, near = logprobs(exact, tokens), logprobs(coarse, tokens)
        entries = [*result.prompt_logprobs, *result.logprobs]
        first = len(tokens) - len(entries)
        for position, entry in enumerate(entries, first):
            assert entry.token == tokens[position]
            before, token = position - 1, entry.token
            ours.append(abs(entry.logprob - float(right[before, token])))
            theirs.append(abs(float(near[before, token] - right[before, token])))
        output = range(len(prompt), len(tokens))
        missed += [float(right[place - 1].max() - right[place - 1, tokens[place]]) for place in output]
    return max(ours), max(theirs), max(missed)


def assert_as_close_as_transformers(results: list[GenerationResult], exact: Any, allowed: float = 2.0) -> None:
    """allowed: our largest error as a multiple of that of transformers in bfloat16, which another rounding changes."""
    ours, theirs, missed = errors(results, exact, copy.deepcopy(exact).to(torch.bfloat16))
    assert ours <= allowed * theirs
    assert missed <= 2 * allowed * theirs  # both the token that was chosen and the best one are that far off


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[covers(f"model:{cell}/safetensors", platform="cpu"), *SLOW.get(kind, ())])
        for kind, cell in CELLS.items()
    ],
)
def test_a_bfloat16_checkpoint(kind: str, tmp_path: Path) -> None:
    """The second time, prompts begin with cached pages, and steps of up to 16 rows are replayed."""
    model = rounded(kind, FIELDS[kind])
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    with served(tmp_path) as engine:
        assert_fast_path(engine)
        computed = engine.generate(requests(prompt_logprobs=0))
        cached = engine.generate(requests())
        assert engine.stats().replayed_steps > 0
    assert cached[-1].cached_tokens == 32
    assert_as_close_as_transformers(computed, model)
    assert_as_close_as_transformers(cached, model)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=[
                covers(f"model:{CELLS[kind]}/gguf", platform="cpu"),
                *([] if kind == "llama" else [pytest.mark.slow]),
            ],
        )
        for kind in GGUF
    ],
)
def test_a_gguf_file_of_blocks(kind: str, tmp_path: Path) -> None:
    """Native kernels multiply its blocks of 8 bits (Q8_0) by inputs that they round to 8 bits as well."""
    fields = {"granite": GRANITE, "smollm3": {"num_hidden_layers": 4}, "gemma3": {"num_hidden_layers": 7}}
    model = rounded(kind, fields.get(kind, {}))
    write_gguf(tmp_path / "small.gguf", model, kind, GGMLQuantizationType.Q8_0)
    with served(tmp_path / "small.gguf") as engine:
        assert_fast_path(engine)
        assert not engine.context.resolved.config.weights.dequantize_weights
        results = engine.generate(requests(prompt_logprobs=0))
    assert_as_close_as_transformers(results, model, 6.0)
