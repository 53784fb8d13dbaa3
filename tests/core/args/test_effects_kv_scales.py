"""Pools of 8-bit floats and their scales have an effect: of the file, of the checkpoint, and of none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_small import Small, engine, make_small, message, messages
from safetensors.torch import load_file, save_file

from srv.errors import Refusal
from srv.models.read import read_facts
from srv_matrix.pytest_plugin import covers

pytestmark = pytest.mark.slow  # each test starts engines

SCALES = (0.015625, 0.03125, 0.0625)  # of each layer: its keys and values are below 7.1, that is 448 times the first


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return make_small("llama", tmp_path_factory.mktemp("small"), head_dim=16)


def logprobs(small: Small, page: int = 16, chunk: int = 5, **flags: object) -> list[float]:
    """Of the last prompt's tokens, which is computed in chunks, so that it reads the pool."""
    with engine(small, page=page, chunk=chunk, **flags) as served:
        (result,) = served.generate([message("a", small.prompts[-1], 1, prompt_logprobs=1)])
    return [entry.logprob for entry in result.prompt_logprobs]


def scale_file(folder: Path, *factors: float) -> Path:
    path = folder / "scales.json"
    by_layer = {str(layer): factor for layer, factor in enumerate(factors)}
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": by_layer}}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return path


@covers("kv_cache_dtype=fp8_e4m3", "kv_cache_dtype=fp8_e5m2", platform="cpu")
def test_kv_cache_dtype_of_8_bit_floats(small: Small) -> None:
    """Four and three bits of precision: both are less exact than float32, and e5m2 less than e4m3."""
    exact = logprobs(small)
    four, three = (logprobs(small, kv_cache_dtype=dtype) for dtype in ("fp8_e4m3", "fp8_e5m2"))
    worst = [max(abs(a - b) for a, b in zip(scores, exact, strict=True)) for scores in (four, three)]
    assert 1e-3 < worst[0] < worst[1] < 1.5
    assert logprobs(small, page=4, kv_cache_dtype="fp8_e4m3") == pytest.approx(four, abs=1e-3)  # by torch's operators


def test_graphs_and_shared_prefixes_with_a_pool_of_8_bit_floats(small: Small, tmp_path: Path) -> None:
    """The output is the same whether steps are replayed or not, and whether the prompt is cached or not."""
    file, outputs = scale_file(tmp_path, *SCALES), []
    for flags in ({}, {"disable_graphs": True}):
        with engine(small, page=16, kv_cache_dtype="fp8_e4m3", quantization_param_path=file, **flags) as served:
            cold = served.generate(messages(small.prompts, logprobs=1))
            warm = served.generate(messages(small.prompts, logprobs=1))
        assert [result.tokens for result in warm] == [result.tokens for result in cold]
        outputs.append([result.tokens for result in cold])
    assert outputs[0] == outputs[1]


@covers("quantization_param_path", platform="cpu")
def test_quantization_param_path(small: Small, tmp_path: Path) -> None:
    """Scales that are too small limit keys and values; those of a checkpoint do what the same ones of a file do."""
    fp8 = {"kv_cache_dtype": "fp8_e4m3"}
    exact, unscaled = logprobs(small), logprobs(small, **fp8)
    scaled = logprobs(small, **fp8, quantization_param_path=scale_file(tmp_path, *SCALES))
    limited = logprobs(small, **fp8, quantization_param_path=scale_file(tmp_path, 1e-6, 1e-6, 1e-6))
    assert scaled != unscaled
    assert scaled == pytest.approx(exact, abs=1.0)
    assert max(abs(a - b) for a, b in zip(limited, exact, strict=True)) > 1.5
    stored = load_file(small.folder / "model.safetensors")
    for layer, scale in enumerate(SCALES):
        stored[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(scale, dtype=torch.bfloat16)
        stored[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor([scale])
    with_scales = tmp_path / "checkpoint"
    with_scales.mkdir()
    (with_scales / "config.json").write_text((small.folder / "config.json").read_text())
    save_file(stored, with_scales / "model.safetensors")
    plain, facts = read_facts(small.folder), read_facts(with_scales)
    assert (facts.parameters, facts.weight_bytes) == (plain.parameters, plain.weight_bytes)  # they are no weights
    assert logprobs(small, model_path=with_scales, **fp8) == scaled
    assert logprobs(small, model_path=with_scales) == exact
    with pytest.raises(Refusal, match="lacks layer 1; it has 1 of 3 layers"):
        logprobs(small, **fp8, quantization_param_path=scale_file(tmp_path, 0.5))


@covers("calculate_kv_scales=true", "calculate_kv_scales=false", platform="cpu")
def test_calculate_kv_scales(small: Small, tmp_path: Path) -> None:
    """Values that are out of the range of the format are not limited, unlike unscaled ones.

    Scales are the same at each start, whatever the size of chunks.
    """
    large = enlarged(small, tmp_path / "large")
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "model_path": large}
    exact, unscaled = logprobs(small, model_path=large), logprobs(small, **fp8)
    calculated = [logprobs(small, chunk=chunk, **fp8, calculate_kv_scales=True) for chunk in (5, 9)]
    worst = [max(abs(a - b) for a, b in zip(scores, exact, strict=True)) for scores in (unscaled, *calculated)]
    assert worst[0] > 1.5
    assert max(worst[1:]) < 1.0
    assert calculated[1] == pytest.approx(calculated[0], abs=1e-3)


def enlarged(small: Small, folder: Path) -> Path:
    """The model with values 1000 times as large, and output projections that make up for it."""
    stored = load_file(small.folder / "model.safetensors")
    for name in stored:
        if "v_proj" in name:
            stored[name] *= 1000
        elif "o_proj" in name:
            stored[name] /= 1000
    folder.mkdir()
    (folder / "config.json").write_text((small.folder / "config.json").read_text())
    save_file(stored, folder / "model.safetensors")
    return folder


def test_calculated_scales_with_graphs_and_shared_prefixes(small: Small) -> None:
    """Pages that requests share were written with the scales by which all others read them."""
    with engine(small, page=16, kv_cache_dtype="fp8_e5m2", calculate_kv_scales=True) as served:
        cold = served.generate(messages(small.prompts, logprobs=1))
        warm = served.generate(messages(small.prompts, logprobs=1))
    assert [result.tokens for result in warm] == [result.tokens for result in cold]
