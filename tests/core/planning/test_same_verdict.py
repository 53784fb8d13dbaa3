"""`srv plan` and `srv args translate` refuse what a launch refuses before it reads weights, and nothing else.

The command lines are real ones, for any hardware.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from every import every
from launch_steps import launch_codes
from published_models import write_models

from srv.args.command_line import read_translation
from srv.args.dialects import translate
from srv.args.statement import UserInput
from srv.errors import Refusal
from srv.planning.plan import make_plan
from srv.planning.target import find_target
from srv.planning.translated import bad_values, launch_verdict
from srv.platform.registry import find_platforms
from srv.testing.engine import user_input

ACCEPTED = ""
ENGINES = ("sglang", "vllm", "rtp-llm")
# (device, model, command line, the code of a launch's refusal). The words of another engine begin with its name.
LINES = [
    # defaults of every built-in platform, models of every size
    ("cpu:avx512", "smollm2-135m", "", ACCEPTED),
    ("cpu:avx2,memory=16GiB", "qwen2.5-0.5b", "--dtype float32", ACCEPTED),
    ("cpu:neon", "llama-3.2-1b", "--dtype bfloat16", ACCEPTED),
    ("cpu:amx", "qwen3-4b", "--torchao-config int8dq", ACCEPTED),
    ("cuda:sm80", "llama-3.1-8b", "", ACCEPTED),
    ("cuda:sm86", "llama-3.2-1b", "--disable-cuda-graph", ACCEPTED),
    ("cuda:sm89", "qwen3-4b", "", ACCEPTED),
    ("cuda:sm90", "llama-3.1-8b", "", ACCEPTED),
    ("cuda:sm100", "qwen3-32b", "", ACCEPTED),
    ("cuda:sm120", "mistral-7b", "--kv-cache-dtype int8", ACCEPTED),
    ("rocm:gfx942", "llama-3.1-70b", "", ACCEPTED),
    ("rocm:gfx950", "qwen3-32b", "--mem-fraction-static 0.85", ACCEPTED),
    ("rocm:gfx1100", "granite-3.3-8b", "--max-running-requests 16", ACCEPTED),
    ("npu:a2", "qwen3-4b", "", ACCEPTED),
    ("npu:a3", "llama-3.1-8b", "--attention-backend ascend", ACCEPTED),
    ("npu:a3", "gemma-3-4b", "", None),
    ("cuda:sm90", "gemma-3-4b", "", None),
    ("cuda:sm90", "smollm3-3b", "", None),
    # recipes of SGLang
    ("cuda:sm90,count=8", "llama-3.1-70b", "sglang --tp 8 --mem-fraction-static 0.85 --cuda-graph-max-bs 64", ACCEPTED),
    (
        "cuda:sm90,count=8",
        "llama-3.1-70b",
        "sglang --tp-size 4 --schedule-policy lpm --chunked-prefill-size 4096",
        None,
    ),
    ("cuda:sm90,count=8", "llama-3.1-405b", "sglang --tp 8", "pool_too_small"),
    ("cuda:sm90-141gb,count=8", "llama-3.1-405b", "sglang --tp 8 --quantization fp8", None),
    ("cuda:sm90,count=8", "qwen3-32b", "sglang --tp 2 --dp-size 4", ACCEPTED),
    ("cuda:sm90,count=8", "qwen3-32b", "sglang --tp 8 --enable-dp-attention --dp 8", ACCEPTED),
    ("cuda:sm90", "llama-3.1-8b", "sglang --speculative-algorithm EAGLE --speculative-num-steps 3", "planned"),
    ("cuda:sm90", "llama-3.1-8b", "sglang --speculative-algorithm NGRAM", None),
    ("cuda:sm90", "llama-3.1-8b", "sglang --enable-torch-compile --torch-compile-max-bs 8", None),
    ("cuda:sm90", "llama-3.1-8b", "sglang --disable-radix-cache --schedule-policy lpm", "inert"),
    ("cuda:sm90", "llama-3.1-8b", "sglang --chunked-prefill-size 8192 --max-prefill-tokens 32768", ACCEPTED),
    ("cuda:sm90", "llama-3.1-8b", "sglang --chunked-prefill-size -1 --max-prefill-tokens 32768", None),
    ("cuda:sm90", "llama-3.1-8b", "sglang --attention-backend flashinfer --page-size 16", None),
    ("cuda:sm90", "llama-3.1-8b", "sglang --attention-backend fa3", None),
    ("cuda:sm90,count=8", "deepseek-v3", "sglang --tp 8 --trust-remote-code", None),
    ("cuda:sm100,count=8", "kimi-k2", "sglang --tp 8 --kv-cache-dtype fp8_e4m3", None),
    ("rocm:gfx942,count=8", "deepseek-v3", "sglang --tp 8 --attention-backend aiter", None),
    ("npu:a3,count=16", "qwen3-32b", "sglang --tp 16 --attention-backend ascend --device npu", None),
    ("npu:a2,count=8", "llama-3.1-70b", "sglang --tp 8 --mem-fraction-static 0.8", None),
    ("cuda:sm90", "qwen3-32b-fp8", "sglang --mem-fraction-static 0.9", ACCEPTED),
    ("cuda:sm90", "qwen3-32b-fp8", "--quantization fp8", ACCEPTED),
    ("cpu:avx512", "llama-3.2-1b", "sglang --device cpu --torchao-config int8wo", None),
    # recipes of vLLM
    ("cuda:sm90", "llama-3.1-8b", "vllm serve {model} --max-model-len 32768 --gpu-memory-utilization 0.9", None),
    ("cuda:sm90,count=4", "llama-3.1-70b", "vllm serve {model} --tensor-parallel-size 4", None),
    ("cuda:sm90,count=8", "llama-3.1-405b", "vllm serve {model} -tp 8 --pipeline-parallel-size 2", "planned"),
    ("cuda:sm90", "llama-3.1-8b", "vllm serve {model} --enable-prefix-caching --max-num-seqs 128", None),
    ("cuda:sm90", "llama-3.1-8b", "vllm serve {model} --enforce-eager --dtype half", None),
    ("cuda:sm90", "llama-3.1-8b-awq", "vllm serve {model} --quantization awq", ACCEPTED),
    ("cuda:sm90", "llama-3.1-8b-gptq", "vllm serve {model}", ACCEPTED),
    ("cuda:sm90", "llama-3.1-8b-w8a8", "vllm serve {model} --max-num-batched-tokens 8192", None),
    ("npu:a2", "llama-3.1-8b-w8a8", "vllm serve {model}", None),
    ("rocm:gfx1100", "mistral-7b", "vllm serve {model} --kv-cache-dtype fp8", None),
    ("cpu:avx512", "llama-3.2-1b", "vllm serve {model} --dtype bfloat16 --max-model-len 4096", None),
    ("cpu:avx2", "llama-3.2-1b", "vllm serve {model} -tp 2", None),
    # recipes of RTP-LLM
    ("cuda:sm90", "llama-3.1-8b", "rtp-llm --checkpoint_path {model} --max_seq_len 8192 --reuse_cache 1", None),
    ("cuda:sm90,count=4", "qwen3-32b", "rtp-llm --checkpoint_path {model} --tp_size 4 --concurrency_limit 64", None),
    ("cuda:sm90,count=8", "qwen3-32b", "rtp-llm --checkpoint_path {model} --tp_size 8 --dp_size 2", "too_few_devices"),
    ("rocm:gfx942", "qwen3-4b", "rtp-llm --checkpoint_path {model} --seq_size_per_block 16", None),
    ("cuda:sm80", "llama-3.2-1b", "rtp-llm --checkpoint_path {model} --quantization INT8", None),
    # what is refused late in a launch
    ("cpu:avx512", "qwen3-32b-fp8", "", ACCEPTED),
    ("cpu:avx512", "llama-3.1-8b-awq", "", ACCEPTED),
    ("cpu:avx512", "llama-3.1-8b-gptq", "--tp-size 2", None),
    ("cpu:avx512", "llama-3.1-8b-w8a8", "", ACCEPTED),
    ("cpu:avx512", "llama-3.1-8b-w8a8", "--tp-size 2", None),
    ("cuda:sm90,count=8", "llama-3.1-8b", "--tp-size 3", "not_divisible"),
    ("cuda:sm90", "llama-3.1-8b", "--tp-size 2", "too_few_devices"),
    ("npu:a2", "qwen3-4b", "--dtype float32", None),
    ("npu:a2", "qwen3-4b", "--torchao-config int8wo", "capability_missing"),
    ("rocm:gfx942", "llama-3.1-8b", "--dequantize-weights", "inert"),
    ("cuda:sm90", "llama-3.1-8b", "--disable-hybrid-swa-memory", "inert"),
    ("cuda:sm90", "gemma-3-4b", "--swa-full-tokens-ratio 0.5", None),
    ("cuda:sm90", "qwen3-4b", "--model-impl transformers --torchao-config int8wo", "native_layers_only"),
    ("cuda:sm90", "qwen3-4b", "--model-impl transformers --quantization fp8", "native_layers_only"),
    ("cuda:sm90", "qwen3-4b", "--model-impl srv", ACCEPTED),
    ("cuda:sm90", "gemma-2-9b", "--model-impl srv", ACCEPTED),
    ("cuda:sm90,count=2", "mixtral-8x7b", "--tp-size 2", ACCEPTED),
    ("cuda:sm90", "mixtral-8x7b", "--torchao-config int8wo", "unsupported_quantization"),
    ("cpu:avx512", "gpt-oss-20b", "", None),
]
OF_TRANSFORMERS = [  # a plan asks for each of them in a process of its own
    ("cpu:avx512", "gemma-2-9b", "", ACCEPTED),
    ("npu:a3", "mixtral-8x7b", "", None),
    ("cuda:sm90", "qwen2-vl-7b", "", ACCEPTED),  # its text part
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


find = cache(find_target)


def given(models: Path, device: str, model: str, line: str) -> UserInput:
    """The user's input: a device and a model without weights, with the words of this or of another engine."""
    engine, _, rest = line.partition(" ")
    folder = models / model
    if engine not in ENGINES:
        return user_input(["--device", device, "--model-path", str(folder), "--load-format", "dummy", *line.split()])
    words = rest.replace("{model}", str(folder)).split()
    statements, rejections = read_translation(translate(engine, words, lambda text: find(device).device.memory_bytes))
    kept = tuple(statement for statement in statements if statement.argument not in ("device", "model_path"))
    ours = user_input(["--device", device, "--model-path", str(folder), "--load-format", "dummy"])
    return UserInput((*ours.statements, *kept), tuple(rejections))


def translated_codes(models: Path, device: str, model: str, line: str) -> set[str]:
    """The codes of what `srv args translate` refuses; it reads the model's path and the format from the words alone."""
    engine, _, rest = line.partition(" ")
    words = rest.replace("{model}", str(models / model)).split()
    if engine == "sglang":
        words += ["--model-path", str(models / model)]
    words += [] if engine == "rtp-llm" else ["--load-format", "dummy"]
    translation = translate(engine, words, lambda text: find(device).device.memory_bytes)
    refusals = (*translation.rejections, *bad_values(translation), *launch_verdict(translation, device).refusals)
    return {refusal.code for refusal in refusals} - ({"format_not_there"} if engine == "rtp-llm" else set())


def plan_codes(user: UserInput) -> set[str]:
    """The codes of a plan's refusals; one of the estimated memory is not known before weights are loaded."""
    try:
        plan = make_plan(user, find)
    except Refusal as refusal:
        return {rejection.code for rejection in refusal.rejections}
    return {planned_refusal.code for planned_refusal in plan.refusals}


def compare(models: Path, lines: Sequence[tuple[str, str, str, str | None]]) -> list[str]:
    wrong: list[str] = []
    for device, model, line, expected in lines:
        user = given(models, device, model, line)
        planned, launched = plan_codes(user), launch_codes(user, find(device))
        case = f"{device} {model} {line}"
        if line.startswith(ENGINES):
            translated = translated_codes(models, device, model, line)
            if not (launched <= translated) or bool(translated) != bool(launched):
                wrong.append(f"{case}: translate {sorted(translated)}, launch {sorted(launched)}")
        estimated = planned == {"pool_too_small"}  # a launch measures the memory once weights are loaded
        if not (launched <= planned) or (bool(planned) != bool(launched) and not estimated):
            wrong.append(f"{case}: plan {sorted(planned)}, launch {sorted(launched)}")
        if (expected is not None and (expected in planned) != bool(expected)) or (expected == ACCEPTED and planned):
            wrong.append(f"{case}: plan {sorted(planned)}, not {expected or 'accepted'}")
    return wrong


@pytest.mark.slow
def test_plan_translate_and_launch_have_one_verdict(models: Path) -> None:
    assert len(LINES) >= 60
    assert {name for name, platform in find_platforms().items() if platform.distribution == "srv"} - {"xpu"} <= {
        device.partition(":")[0] for device, _, _, _ in LINES
    }
    assert compare(models, LINES) == []


@pytest.mark.slow
def test_plan_and_launch_have_one_verdict_on_models_of_transformers(models: Path) -> None:
    assert compare(models, OF_TRANSFORMERS) == []


OF_BERT = {"model_type": "bert", "architectures": ["JinaBertForMaskedLM"]}
OF_BERT |= {"auto_map": {"AutoModelForMaskedLM": "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM"}}
OF_CODE = {"model_type": "acme", "auto_map": {"AutoModelForCausalLM": "modeling_acme.AcmeForCausalLM"}}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# (device, model, other fields of its configuration, code, a part of the reason, and of the remedy) of the last refusal.
REASONS: list[tuple[str, str, dict[str, Any], str, str, str]] = [
    (
        *("cpu:avx512", "llama-3.2-1b", {"hidden_act": "swishy"}, "unsupported_config"),
        *("hidden_act is 'swishy', which it does not know", "Compare config.json"),
    ),
    (
        *("cpu:avx512", "llama-3.2-1b", {"rope_scaling": {"rope_type": "bogus", "factor": 2.0}}, "unsupported_config"),
        *("rope_scaling.rope_type is 'bogus', which it does not know", "Compare config.json"),
    ),
    (
        *("cpu:avx512", "llama-3.2-1b", OF_BERT, "unsupported_architecture"),
        *("has no AutoModelForCausalLM but AutoModelForMaskedLM", "an encoder of a class that has them"),
    ),
    (
        *("cpu:avx512", "llama-3.2-1b", OF_CODE | {"architectures": ["AcmeForCausalLM"]}, "remote_code"),
        *("Python code that is not in its folder (modeling_acme.py)", "Download the Python files"),
    ),
    (
        *("npu:a3", "llama-3.2-1b", {"quantization_config": AWQ}, "op_missing"),
        *("no implementation that fits", "Set --dequantize-weights"),
    ),
    (
        *("cpu:avx512", "llama-3.2-1b", {"max_position_embeddings": 1}, "unsupported_config"),
        *("in config.json, max_position_embeddings is 1", "Correct the value"),
    ),
]


@pytest.mark.slow
@every(("device", "name", "fields", "code", "reason", "remedy"), REASONS)
def test_a_refusal_of_a_configuration_says_what_is_wrong_and_what_helps(
    device: str, name: str, fields: dict[str, Any], code: str, reason: str, remedy: str, models: Path, tmp_path: Path
) -> None:
    config = json.loads((models / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    user = user_input(["--device", device, "--model-path", str(tmp_path), "--load-format", "dummy"])
    try:
        refused = make_plan(user, find).refusals
    except Refusal as refusal:
        refused = refusal.rejections
    assert (refused[-1].code, reason in refused[-1].reason, remedy in refused[-1].remedy) == (code, True, True), refused
    assert len({rejection.code for rejection in refused}) == 1 or code == "op_missing", refused
    launched = launch_codes(user, find(device))
    assert launched
    assert launched <= {rejection.code for rejection in refused}
