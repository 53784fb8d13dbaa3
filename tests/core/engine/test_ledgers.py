"""The memory ledger of engines on the CPU against measurement: SmolLM2, and models of 0.5 to 3 B parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_small import small_model
from sparse_weights import write_shard

from srv.executor.in_process import InProcessExecutor
from srv.executor.protocol import Executor, Launched
from srv.executor.spec import EngineSpec
from srv.planning.ledger import CAPTURED_INPUTS, CAPTURED_LOGITS, EXACT, POOL, PREPARED, WEIGHTS
from srv.sched.plan import Plan, Result
from srv.testing.engine import LocalEngine
from srv.types import RequestSpec, SamplingParams
from srv.worker.rank import RankWorker

MIB = 2**20
CHUNK = 128
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
# hidden, intermediate, layers, heads, KV heads, as in Qwen2.5-0.5B, Llama-3.2-1B and Qwen2.5-3B; embeddings are tied
SIZES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "0.5B": (QWEN, (896, 4864, 24, 14, 2)),
    "1.2B": (LLAMA, (2048, 8192, 16, 32, 8)),
    "3B": (QWEN, (2048, 11008, 36, 16, 2)),
}
PARAMETERS = {"0.5B": 494_032_768, "1.2B": 1_235_814_400, "3B": 3_085_938_688}  # as published


class _Measured:
    """The future of a step that has been launched already."""

    def __init__(self, launched: Launched | None) -> None:
        self._launched = launched

    def result(self) -> Result:
        assert self._launched is not None
        return self._launched.collect()


class _AllocatorExecutor(InProcessExecutor):
    """Launches each step on the caller's thread and follows torch's allocator in it: `peaks`, (tokens, bytes)."""

    def __init__(self, worker: RankWorker) -> None:
        super().__init__(worker)
        self.peaks: list[tuple[int, int]] = []

    def submit(self, plan: Plan) -> _Measured:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            launched = self.worker.launch(plan)
        assert profile.profiler is not None
        events = profile.profiler.kineto_results.events()
        held = peak = 0
        for _, amount in sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"):
            held += amount
            peak = max(peak, held)
        self.peaks.append((sum(row.scheduled for row in plan.rows), peak))
        return _Measured(launched)


class _AllocatorEngine(LocalEngine):
    executor: _AllocatorExecutor

    def make_executor(self, spec: EngineSpec) -> Executor:
        self.executor = _AllocatorExecutor(RankWorker(spec))
        return self.executor


def differences(served: LocalEngine) -> dict[str, float]:
    """By what share each line of exact sizes is off."""
    found = {line.name: line.excess for line in served.ready.memory[0] if line.name in EXACT}
    assert None not in found.values(), served.ready.memory[0]
    return {name: round(excess, 3) for name, excess in found.items() if excess is not None}


def test_the_ledger_of_the_demo_model_is_what_its_engine_takes() -> None:
    """The largest step needs no more than predicted for activations and sampling, and not much less."""
    arguments = ["--device", "cpu", "--max-total-tokens", "2048", "--max-running-requests", "2"]
    with _AllocatorEngine.launch([*arguments, "--chunked-prefill-size", str(CHUNK)]) as served:
        off = differences(served)
        assert off.keys() == {WEIGHTS, POOL, CAPTURED_LOGITS, CAPTURED_INPUTS}
        assert all(abs(each) <= 0.05 for each in off.values()), off
        params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=1)
        served.generate([RequestSpec(id="a", tokens=tuple(range(5, 5 + CHUNK)), params=params)])
        lines = {line.name: line for line in served.ready.memory[0]}
        tokens, peak = max(served.executor.peaks)
        predicted = lines["activations"].predicted
        assert tokens == CHUNK
        assert predicted is not None
        assert predicted / 4 <= peak <= predicted, (predicted, served.executor.peaks)
        assert lines["activations"].measured is None
        assert "no figure" in lines["activations"].note
        weights = next(phase for phase in served.ready.phases["engine"] if phase.name == "weights")
        assert weights.predicted is not None
        assert "MiB/s" in weights.basis


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "full_attention_interval": 2,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "head_dim": 32,
}


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_experts_and_recurrent_layers_take_no_more_than_is_reserved(kind: str, tmp_path: Path) -> None:
    """With torch's operators, whose memory the profiler sees. Reserved for a dense model, it would not be enough."""
    fields = EXPERTS if kind == "qwen3_moe" else DELTA
    small_model(kind, **{**SMALL, **fields}).to(torch.bfloat16).save_pretrained(tmp_path)
    arguments = [f"--model-path={tmp_path}", "--device=cpu", "--max-total-tokens=2048", "--max-running-requests=4"]
    arguments += [f"--chunked-prefill-size={CHUNK}", "--disable-graphs"]
    if kind == "qwen3_moe":
        arguments.append("--moe-runner-backend=torch_native")
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [tuple((5 * number + place) % 90 + 3 for place in range(CHUNK)) for number in range(4)]
    with _AllocatorEngine.launch(arguments) as served:
        served.generate(
            [RequestSpec(id=str(number), tokens=each, params=params) for number, each in enumerate(prompts)]
        )
        (predicted,) = (line.predicted for line in served.ready.memory[0] if line.name == "activations")
        peak = max(amount for _, amount in served.executor.peaks)
    dense = 2 * (CHUNK + 4) * (8 * 64 + 3 * 64)
    assert predicted is not None
    assert dense < peak <= predicted, served.executor.peaks


def sparse_checkpoint(folder: Path, size: str) -> Path:
    """A model of this size whose weights are all zero, in a file that takes no space on the disk."""
    family, (hidden, intermediate, layers, heads, kv_heads) = SIZES[size]
    config = {
        **family,
        "torch_dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    head, kv = hidden // heads, kv_heads * (hidden // heads)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (family["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        for projection, rows in (("q", heads * head), ("k", kv), ("v", kv)):
            shapes[f"{name}self_attn.{projection}_proj.weight"] = (rows, hidden)
            if family is QWEN:
                shapes[f"{name}self_attn.{projection}_proj.bias"] = (rows,)
        shapes[f"{name}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"{name}mlp.{each}_proj.weight": (intermediate, hidden) for each in ("gate", "up")}
        shapes[f"{name}mlp.down_proj.weight"] = (hidden, intermediate)
    write_shard(folder / "model.safetensors", shapes)
    return folder


@pytest.mark.proof(minutes=1)
@pytest.mark.parametrize("size", SIZES)
def test_the_ledger_of_larger_models_is_what_their_engines_take(tmp_path: Path, size: str) -> None:
    folder = sparse_checkpoint(tmp_path / size, size)
    arguments = ["--device", "cpu", "--model-path", str(folder), "--dtype", "bfloat16", "--max-total-tokens", "16384"]
    with LocalEngine.launch([*arguments, "--max-running-requests", "2", "--graph-max-batch-size", "1"]) as served:
        lines = {line.name: line for line in served.ready.memory[0]}
        assert lines[WEIGHTS].measured == 2 * PARAMETERS[size]
        off = differences(served)
        assert off.keys() == {WEIGHTS, POOL, CAPTURED_LOGITS, CAPTURED_INPUTS}
        assert all(abs(each) <= 0.05 for each in off.values()), off
        assert lines[PREPARED].measured is not None
