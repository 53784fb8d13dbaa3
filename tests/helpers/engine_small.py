"""Small random models in a real engine, and the reference outputs of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from models_small import GRANITE, SIZES, expected_logits, randomized, small_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from srv.planning.target import Target, make_target, this_machine
from srv.platform.registry import find_platforms
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams

# Sliding windows are shorter than the prompts, so that they have an effect; "vaultgemma" has no native layers.
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {},
    "granite": GRANITE,
    "smollm3": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    "gemma3": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "tie_word_embeddings": False,
    },
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_5": {"num_hidden_layers": 4},
    "qwen3_5_moe": {},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {},
    "granitemoehybrid": {**GRANITE, "position_embedding_type": "rope"},
    "bamba": {},
    "falcon_h1": {},
    "nemotron_h": {"hybrid_override_pattern": "M*-ME"},
    "minimax": {},
    "lfm3": {},
    "recurrent_gemma": {},
    "olmo_hybrid": {},
    "mixtral": {},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen3_moe": {"norm_topk_prob": True},
    "vaultgemma": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "pad_token_id": 0},
}
LENGTHS = (1, 2, 5, 9, 16, 17, 20, 33)
OUTPUT = 14
# Every comparison is exact, so the two best logits of the reference must not be nearly equal anywhere.
MIN_GAP = 1e-4


@dataclass(frozen=True)
class Small:
    """A model on disk and in transformers, with prompts and their greedy continuations."""

    folder: Path
    model: Any
    prompts: list[list[int]]
    tokens: list[list[int]]

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """log_softmax of transformers' logits at every position, float32 [tokens, vocab]."""
        return expected_logits(self.model, torch.tensor(tokens)).log_softmax(-1)


def make_small(kind: str, folder: Path, **fields: Any) -> Small:
    """Each prompt begins with a different token, so that none hits the prefix that another one has cached.

    `fields`: changes to the model's configuration.
    """
    return saved_small(_model(kind, fields), folder)


def saved_small(model: Any, folder: Path, lengths: Sequence[int] = LENGTHS) -> Small:
    """A model of transformers, saved to `folder`, with prompts as those of `make_small`."""
    model.save_pretrained(folder)
    return prompted(model, folder, lengths)


def prompted(model: Any, folder: Path, lengths: Sequence[int] = LENGTHS) -> Small:
    """The model that is saved in `folder`, with prompts as those of `make_small`."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        [10 + number, *torch.randint(3, 97, (length - 1,), generator=generator).tolist()]
        for number, length in enumerate(lengths)
    ]
    return Small(folder, model, prompts, [greedy(model, prompt, OUTPUT) for prompt in prompts])


class SmallModels:
    """Small models by their kind, each made at its first use in a folder of its own."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._made: dict[str, Small] = {}

    def __call__(self, kind: str) -> Small:
        if kind not in self._made:
            self._made[kind] = make_small(kind, self._make_folder(kind))
        return self._made[kind]


def _model(kind: str, fields: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    if kind != "vaultgemma":
        return small_model(kind, **{**FIELDS.get(kind, {}), **fields})
    config = AutoConfig.for_model(kind, **{**SIZES, **FIELDS[kind], **fields})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def greedy(
    model: Any, prompt: list[int], count: int, change: Callable[[Tensor, list[int]], Tensor] | None = None
) -> list[int]:
    """Greedy tokens, each from a pass over the whole sequence. `change(logits, output)` returns the logits to use."""
    output: list[int] = []
    for _ in range(count):
        logits = expected_logits(model, torch.tensor(prompt + output))[-1]
        best = (logits if change is None else change(logits, output)).topk(2)
        assert best.values[0] - best.values[1] > MIN_GAP, "a near tie in the reference: choose other prompts"
        output.append(int(best.indices[0]))
    return output


@cache
def _probed(text: str | None, source: str) -> Target:
    return this_machine(text, source)


def probed_once(text: str | None, source: str) -> Target:
    """As `this_machine`, with one probe per process; plugins that a test has installed since then are found."""
    target = _probed(text, source)
    manifest = find_platforms()[target.manifest.name].loaded
    return make_target(manifest, target.device, target.reason, target.notes)


@contextmanager
def engine(
    small: Small,
    page: int = 4,
    chunk: int = 64,
    overlap: bool = True,
    pool: int = 1024,
    kind: type[CheckedEngine] = CheckedEngine,
    **flags: object,
) -> Iterator[CheckedEngine]:
    """An engine for `small` in float32. A flag whose value is True is passed without a value."""
    threads = torch.get_num_threads()
    options = {
        "device": "cpu",
        "model_path": small.folder,
        "dtype": "float32",
        "page_size": page,
        "chunked_prefill_size": chunk,
        "max_total_tokens": pool,
        "max_running_requests": 16,
        **({} if overlap else {"disable_overlap_schedule": True}),
        **flags,
    }
    arguments: list[str] = []
    for name, value in options.items():
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    try:
        with kind.launch(arguments, probed_once) as launched:
            torch.set_num_threads(1)  # the platform uses all cores, which is slow for products of a microsecond
            yield launched
    finally:
        torch.set_num_threads(threads)


def message(request: str, prompt: list[int], count: int = OUTPUT, namespace: str = "", **params: Any) -> RequestSpec:
    """A greedy request that ends only by its length, unless `params` change that."""
    sampling = SamplingParams(max_tokens=count, **{"temperature": 0.0, "ignore_eos": True, **params})
    return RequestSpec(id=request, tokens=tuple(prompt), params=sampling, namespace=namespace)


def messages(prompts: Sequence[list[int]], count: int = OUTPUT, **params: Any) -> list[RequestSpec]:
    return [message(f"request {number}", prompt, count, **params) for number, prompt in enumerate(prompts)]
