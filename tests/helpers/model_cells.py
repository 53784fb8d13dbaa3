"""The path of a user who sets nothing but the model, and its errors in bfloat16 beside those of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_small import LENGTHS, message
from models_small import CONFIGS, SIZES, expected_logits, randomized, small_model
from reference_models import FAMILIES, reference
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from srv.models.layers.experts import ExpertWeights
from srv.planning.pools import kv_dtype
from srv.testing.engine import CheckedEngine, GenerationResult
from srv.types import RequestSpec

# Multiples of a GGUF block of 32; the head size is one that native attention takes. Ordinary models have small weights,
# and with these logits differ enough for a wrong layer to show.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "initializer_range": 0.1}
OUTPUT = 8
ATTENTION = ("prefill_attention_backend", "decode_attention_backend")
ROUTERS = (
    *("mlp.gate.weight", "mlp.router.weight", "mlp.gate.wg.weight", "mixer.gate.weight"),
    *("block_sparse_moe.router.weight", "block_sparse_moe.gate.weight", "feed_forward.router.weight"),
)
Combined = Callable[[Sequence[float]], float]  # one figure for the errors of all tokens


def root_mean_square(errors: Sequence[float]) -> float:
    """Of 40 tokens, which differs little between processors. The largest error is that of one token, whose rounding
    may be twice as bad on one processor as on another.
    """
    return math.hypot(*errors) / math.sqrt(len(errors))


def random_model(kind: str, **fields: Any) -> Any:
    """A small model of transformers in float32; `fields`: of its configuration."""
    torch.manual_seed(0)
    if kind in CONFIGS:
        return small_model(kind, **{**SHAPE, **fields})
    sizes = {**SIZES, **SHAPE, **fields}
    if kind in FAMILIES:
        return randomized(reference(kind, **sizes))
    if isinstance(getattr(CONFIG_MAPPING[kind], "head_dim", None), property):
        del sizes["head_dim"]
    config = made_config(kind, sizes)
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def made_config(kind: str, fields: dict[str, Any]) -> Any:
    """The configuration of a class in transformers. DBRX takes sizes by their names there, and lacks a field."""
    if kind != "dbrx":
        return AutoConfig.for_model(kind, **fields)
    names = CONFIG_MAPPING[kind].attribute_map
    config = AutoConfig.for_model(kind, **{names.get(name, name): value for name, value in fields.items()})
    config.attn_config.rope_theta = config.rope_parameters["rope_theta"]
    return config


def minimax_m2(**fields: Any) -> Any:
    """MiniMax-M2 with four experts and a part of each head rotated. Corrections change which experts are chosen."""
    defaults = {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0, "rotary_dim": 8}
    model = random_model("minimax_m2", **{**defaults, **fields})
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)))
    return model


def rounded(model: Any) -> Any:
    """The model with the values of a bfloat16 checkpoint, in float32."""
    return model.to(torch.bfloat16).float()


def save_bfloat16(model: Any, folder: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


def decided(kind: str, experts: int, **fields: Any) -> Any:
    """A mixture of `experts` whose routers read the first numbers of a token's embedding, so that rounding changes no
    choice of experts.
    """
    model = random_model(kind, **fields)
    config = model.config
    groups, generator = getattr(config, "n_group", None) or 1, torch.Generator().manual_seed(3)
    routers = 0
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight.mul_(10)
        for row in embeddings:
            members = torch.arange(experts).view(groups, -1)[torch.randperm(groups, generator=generator)]
            row[:experts] = -4.0
            row[members.flatten()[: config.num_experts_per_tok]] = 4.0
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTERS):
                parameter.mul_(0.2)[:, :experts] = torch.eye(experts)
                routers += 1
            if name.endswith(("post_attention_layernorm.weight", "pre_ff_layernorm.weight", "pre_moe_norm.weight")):
                parameter[:experts] = 1.0
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    assert routers >= 2
    return rounded(model)


@contextmanager
def served(path: Path, *arguments: str, device: str = "cpu") -> Iterator[CheckedEngine]:
    """The engine of a user who sets nothing. `arguments`: a smaller pool makes the checks of its pages faster."""
    threads = torch.get_num_threads()
    try:
        with CheckedEngine.launch([f"--device={device}", f"--model-path={path}", *arguments]) as engine:
            torch.set_num_threads(1)
            yield engine
    finally:
        torch.set_num_threads(threads)


def assert_fast_path(engine: CheckedEngine, attention: str = "NativeAttention") -> None:
    """bfloat16 throughout, and native attention and experts in every step."""
    resolved = engine.context.resolved
    assert (resolved.config.model.dtype, kv_dtype(resolved.config)) == ("bfloat16", "bfloat16")
    assert [resolved.backends[slot].spec.name for slot in ATTENTION] == ["native", "native"]
    worker = engine.executor.worker  # type: ignore[attr-defined]
    assert {type(backend).__name__ for backend in worker.runner.eager._attention} == {attention}
    experts = {module.implementation for module in worker.loaded.model.modules() if isinstance(module, ExpertWeights)}
    assert experts <= {"native"}


def prompts(lengths: Sequence[int] = LENGTHS, vocab_size: int = SIZES["vocab_size"]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [10 + number, *torch.randint(3, vocab_size, (length - 1,), generator=generator).tolist()]
        for number, length in enumerate(lengths)
    ]


def requests(
    lengths: Sequence[int] = LENGTHS, vocab_size: int = SIZES["vocab_size"], **params: Any
) -> list[RequestSpec]:
    return [
        message(f"{number} {params}", prompt, OUTPUT, logprobs=0, **params)
        for number, prompt in enumerate(prompts(lengths, vocab_size))
    ]


def logprobs(model: Any, tokens: list[int]) -> Tensor:
    return expected_logits(model, torch.tensor(tokens)).float().log_softmax(-1)


def errors(
    results: list[GenerationResult],
    exact: Any,
    coarse: Any,
    lengths: Sequence[int] = LENGTHS,
    vocab_size: int = SIZES["vocab_size"],
) -> tuple[list[float], list[float], list[float]]:
    """The errors of our log-probabilities, of those of `coarse`, and by which a token is not the best one."""
    ours, theirs, missed = list[float](), list[float](), list[float]()
    for prompt, result in zip(prompts(lengths, vocab_size), results, strict=True):
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
    return ours, theirs, missed


def assert_as_close_as_transformers(
    results: list[GenerationResult],
    exact: Any,
    allowed: float = 2.0,
    of: Combined = root_mean_square,
    lengths: Sequence[int] = LENGTHS,
    vocab_size: int = SIZES["vocab_size"],
) -> None:
    """allowed: our error as a multiple of that of transformers in bfloat16, which another rounding changes.

    of: the figure that is compared. lengths, vocab_size: of the prompts.
    """
    ours, theirs, missed = map(of, errors(results, exact, copy.deepcopy(exact).to(torch.bfloat16), lengths, vocab_size))
    assert ours <= allowed * theirs
    assert missed <= 2 * allowed * theirs  # both the token that was chosen and the best one are that far off
