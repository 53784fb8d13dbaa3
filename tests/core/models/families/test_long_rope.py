"""LongRoPE: one list of factors for all tokens, by the served context length.

transformers chooses by the length of each pass, so that its logits are compared on either side of the length of
pre-training.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from args_world import resolved, user
from engine_small import Small, engine, messages, saved_small
from every import every
from models_small import SIZES, built, expected_logits, our_logits, randomized, tokens_of
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig

from srv.cli.main import main
from srv.errors import Refusal
from srv.models.layers.rope_config import rope_config
from srv.models.read import read_facts
from srv.models.transformers.hf_rope import fix_long_rope
from srv.models.unsupported import UnsupportedConfig
from srv.server.protocols.openai.fingerprint import system_fingerprint

ORIGINAL, DECLARED = 16, SIZES["max_position_embeddings"]
FACTORS = {"short_factor": [1.0, 1.4], "long_factor": [2.0, 8.0]}
ROPE = {"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": ORIGINAL}


def made(kind: type[Any], **fields: Any) -> Any:
    config = kind(**{**SIZES, "pad_token_id": 0, **fields})
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32))


def phi4(**fields: Any) -> Any:
    """In the proportions of Phi-4-mini: a part of each head is rotated, and the output layer is the embedding."""
    rope = {**ROPE, **FACTORS, "partial_rotary_factor": 0.5}
    return made(
        Phi3Config,
        **{
            "rope_parameters": rope,
            "original_max_position_embeddings": ORIGINAL,
            "tie_word_embeddings": True,
            **fields,
        },
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi4")
    phi4().save_pretrained(path)
    return path


@every("impl", ["srv", "transformers"])
def test_logits_equal_transformers_on_both_sides_of_the_length_of_pre_training(impl: str, tmp_path: Path) -> None:
    model = phi4()
    model.save_pretrained(tmp_path)
    assert read_facts(tmp_path).context_length == DECLARED
    longer, shorter = tokens_of(model, 40), tokens_of(model, ORIGINAL)
    for ours, tokens, other in (
        (built(tmp_path, impl=impl), longer, shorter),
        (built(tmp_path, impl=impl, context_length=ORIGINAL + 1), longer[: ORIGINAL + 1], shorter),
        (built(tmp_path, impl=impl, context_length=ORIGINAL), shorter, None),
    ):
        torch.testing.assert_close(our_logits(ours, tokens), expected_logits(model, tokens), atol=2e-4, rtol=1e-3)
        if other is not None:  # the price of one list: short sequences are computed otherwise than by transformers
            assert (our_logits(ours, other) - expected_logits(model, other)).abs().max() > 1e-2


@every(("context", "kept"), [(ORIGINAL + 1, "long"), (ORIGINAL, "short")])
def test_a_class_that_also_chooses_between_two_scales_gets_one(context: int, kept: str) -> None:
    """As that of PhiMoE, which applies long factors to no sequence otherwise (transformers 5.23)."""
    rope = {**ROPE, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "short_mscale": 1.1, "long_mscale": 1.4}
    stated = dict(rope)
    config = PhimoeConfig(**SIZES, rope_parameters=rope)
    fix_long_rope(config, context)
    for scale in ("factor", "mscale"):
        fixed = [config.rope_parameters[f"{which}_{scale}"] for which in ("short", "long")]
        assert fixed == [stated[f"{kept}_{scale}"]] * 2


@every(("context", "lengths"), [(DECLARED, (17, 20, 33)), (64, (5, 17, 33))])
def test_greedy_tokens_are_those_of_transformers(context: int, lengths: tuple[int, ...], tmp_path: Path) -> None:
    """In chunks, and from cached prefixes. 64 is the length of pre-training of the second model."""
    original = ORIGINAL if context == DECLARED else context
    rope = {**ROPE, **FACTORS, "partial_rotary_factor": 0.25, "original_max_position_embeddings": original}
    fields = {"hidden_size": 96, "original_max_position_embeddings": original}
    small: Small = saved_small(phi4(rope_parameters=rope, **fields), tmp_path, lengths)
    with engine(small, 16, 16, model_impl="srv", context_length=context) as served:
        missed, hits = (served.generate(messages(small.prompts)) for _ in range(2))
    assert [each.tokens for each in missed] == [each.tokens for each in hits] == small.tokens
    assert max(each.cached_tokens for each in hits) > 0


@every(
    ("asked", "said"),
    [
        ((), f"uses the long factors of LongRoPE for all tokens, because its context of {DECLARED} tokens exceeds"),
        (("--context-length", "17"), "--context-length 16 or less uses the short ones"),
        (("--context-length", "16"), "uses the short factors of LongRoPE, because its context of 16 tokens"),
    ],
)
def test_a_plan_says_which_factors_are_used(
    asked: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--json", "--device", "cpu", "--model-path", str(folder), *asked]) == 0
    plan = json.loads(capsys.readouterr().out)
    (note,) = [note for note in plan["notes"] if "LongRoPE" in note]
    assert said in note
    assert plan["arguments"]["context_length"]["value"] == int(asked[1] if asked else DECLARED)


def test_equal_factors_need_no_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = phi4().config.to_dict()
    config["rope_parameters"]["long_factor"] = config["rope_parameters"]["short_factor"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Phi3ForCausalLM"]}))
    assert main(["plan", "--json", "--device", "cpu", "--model-path", str(tmp_path), "--load-format", "dummy"]) == 0
    assert not [note for note in json.loads(capsys.readouterr().out)["notes"] if "LongRoPE" in note]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@every(
    ("rope", "context", "reason"),
    [
        ({**ROPE, **FACTORS}, DECLARED, f"LongRoPE extends the {ORIGINAL} of pre-training to no more than these"),
        (YARN, 512, "YaRN extends the 128 of pre-training to no more than these"),
        ({"rope_type": "dynamic", "factor": 2.0}, DECLARED, "its dynamic RoPE scaling would change the frequencies"),
        ({"rope_type": "default"}, DECLARED, f"a context length of {DECLARED} tokens"),
    ],
)
def test_a_context_that_is_too_long_is_refused_with_what_limits_it(
    rope: dict[str, Any], context: int, reason: str, tmp_path: Path
) -> None:
    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_facts(tmp_path)
    with pytest.raises(Refusal) as caught:
        resolved(user(context_length=context + 1, load_format="dummy"), model=facts)
    (refused,) = (each for each in caught.value.rejections if each.code == "context_over_model")
    assert reason in refused.reason
    assert f"a context length of {context} tokens" in refused.reason


def test_the_fingerprint_of_a_server_changes_with_its_factors(folder: Path) -> None:
    facts = read_facts(folder)
    asked = [{}, {"context_length": 17}, {"context_length": 16}, {"context_length": 15}]
    whole, long, short, shorter = (system_fingerprint(facts, resolved(user(**values), model=facts)) for values in asked)
    assert whole == long != short == shorter


@every(
    ("parameters", "named"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 4},
            "1 factors (short_factor) for 4",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 5},
            "has 5 factors (long_factor) for 4",
        ),
        ({"rope_type": "freq_factors", "freq_factors": []}, "has 0 factors (freq_factors) for 4"),
    ],
)
def test_a_factor_for_each_frequency(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedConfig, match=re.escape(named)):
        rope_config({"rope_parameters": parameters, "max_position_embeddings": 64}, 8)
