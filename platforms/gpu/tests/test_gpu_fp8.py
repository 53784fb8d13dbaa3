"""Checkpoints in FP8 on a simulated GPU: with activations in FP8 where the GPU multiplies these, otherwise exact ones.

Triton's kernels are interpreted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_small import Small, engine, message
from fp8_weights import FORMS, PROJECTION, write_fp8
from torch import Tensor, nn

from srv_gpu.facts import triton_target
from srv_gpu.op_specs import TRITON_FP8
from srv_gpu.platform import GpuPlatform
from srv_kernels.triton import fp8_products
from srv_kernels.triton.targets import FLOAT8_DOTS

LENGTH = 40  # of a prompt


def quantize_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """The inputs of a layer rounded to FP8, with a scale per row and block of 32."""
    parts = []
    for part in inputs[0].split(32, -1):
        scale = part.abs().amax(-1, keepdim=True) / 448
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return (torch.cat(parts, -1),)


def logprobs(model: Any, prompt: list[int]) -> Tensor:
    """Of each token of a prompt after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().mean())


def test_prompts_have_activations_in_fp8(
    platform: GpuPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint that states them, if the user sets nothing.

    Fewer rows than usual stay exact, since the interpreter takes minutes for a prompt of so many tokens.
    """
    monkeypatch.setattr(fp8_products, "EXACT_ROWS", LENGTH - 1)
    quantizes = triton_target(platform._context.device.variant) in FLOAT8_DOTS
    launches, operator = platform._accelerator.module.launches, "linear_fp8_quantized"
    with torch.inference_mode(False):
        model = write_fp8(tmp_path, FORMS["fp8, blocks"], num_hidden_layers=1, max_position_embeddings=64)
        prompt = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
        small, before = Small(tmp_path, model, [prompt], []), launches[operator]
        flags = {"device": platform.name, "dtype": "bfloat16", "disable_graphs": True}
        with engine(small, page=16, pool=128, **flags) as served:
            (result,) = served.generate([message("a", prompt, 1, prompt_logprobs=1)])
            running = {name for key, name in served.ready.kernels.items() if key.startswith("linear_fp8 ")}
            assert served.context.kernels.differences(served.ready.kernels) == {}
        assert running == {TRITON_FP8 if quantizes else "triton"}
        assert (launches[operator] > before) == quantizes
        exact = logprobs(model, prompt)
        for name, module in model.named_modules():
            if PROJECTION.search(f"{name}.weight"):
                module.register_forward_pre_hook(quantize_inputs)
        usual = distance(logprobs(model, prompt), exact)
    error = distance(torch.tensor([entry.logprob for entry in result.prompt_logprobs]), exact)
    # Activations of bfloat16 round to other neighbours than those of float32, so that sizes of errors are compared.
    assert 0.5 * usual < error < 2 * usual if quantizes else error < 0.5 * usual
