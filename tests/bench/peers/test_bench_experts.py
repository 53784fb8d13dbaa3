"""The random mixture of experts that servers are compared on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import experts_file
import experts_race
from experts_file import MoESizes

from srv.models.locate import demo_model
from srv.models.read import read_facts

TINY = MoESizes(layers=2, hidden=64, intermediate=32, experts=4, top_k=2, heads=2, kv_heads=1, head_dim=32)


@pytest.mark.slow
def test_the_file_is_a_qwen3_moe_with_the_demo_models_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "experts.gguf"
    experts_file.write(file, demo_model(), TINY)
    facts, vocab = read_facts(file), read_facts(demo_model()).vocab_size
    attention, experts, norms = 64 * (2 * 64 + 2 * 32), 4 * (64 + 3 * 64 * 32), 2 * 64 + 2 * 32
    assert facts.architecture == "Qwen3MoeForCausalLM"
    assert (facts.vocab_size, facts.layers) == (vocab, 2)
    assert facts.parameters == 64 + vocab * 64 + 2 * (attention + experts + norms)


def test_servers_load_the_file(tmp_path: Path) -> None:
    file = tmp_path / "experts.gguf"
    ours, theirs = experts_race.servers(experts_race.ENGINES, file)
    assert (ours.engine, theirs.engine) == experts_race.ENGINES
    assert ours.arguments[-2:] == ("--model-path", str(file))
    assert theirs.arguments[theirs.arguments.index("--model") + 1] == str(file)
