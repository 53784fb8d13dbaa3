"""`srv plan --fit`: every answer is accepted by a plan of its own, and the next candidate is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG, user
from every import every
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sizes_published import CHECKPOINTS

import srv.planning.fit
from srv.args.statement import UserInput
from srv.cli.fit import fit_dict, fit_text
from srv.cli.main import main
from srv.errors import Refusal
from srv.planning.fit import fit
from srv.planning.plan import make_plan
from srv_matrix.checkpoints import read_checkpoints

CONTEXT = 100_000
MIB = 2**20
WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 512,
    "sliding_window_pattern": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with full attention, of one with windows as well, and of one with 200 layers."""
    path = tmp_path_factory.mktemp("models")
    deep = {"num_hidden_layers": 200, "num_key_value_heads": 8}
    for name, fields in (("full", {}), ("windows", WINDOWS), ("deep", deep)):
        (path / name).mkdir()
        config = {**CONFIG, "max_position_embeddings": CONTEXT, "num_attention_heads": 8, **fields}
        (path / name / "config.json").write_text(json.dumps(config))
    return path


def launch(model: Path, device: str, **values: Any) -> UserInput:
    return user(model_path=str(model), load_format="dummy", device=device, **values)


def holds(request: UserInput, tokens: int, requests: int) -> bool:
    """Whether a plan is accepted whose pool of full attention holds so many whole requests."""
    try:
        plan = make_plan(request)
    except Refusal:
        return False
    if plan.refusals:
        return False
    assert plan.budget is not None
    first = plan.budget.groups[0]
    return requests * -(-tokens // first.page_size) <= first.pages and tokens <= plan.budget.max_request_tokens


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(memory=st.integers(8, 60), page_size=st.sampled_from([1, 16, 64]), model=st.sampled_from(["full", "windows"]))
def test_the_largest_context_is_accepted_and_one_token_more_is_not(
    folder: Path, memory: int, page_size: int, model: str
) -> None:
    values = {"page_size": page_size, "chunked_prefill_size": 64, "max_running_requests": 4}
    device = f"cpu:avx2,memory={memory}MiB"
    answer = fit(launch(folder / model, device, **values), "context").answer
    assert answer is not None
    assert holds(launch(folder / model, device, context_length=answer, **values), answer, 1)
    assert not holds(launch(folder / model, device, context_length=answer + 1, **values), answer + 1, 1)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(memory=st.integers(20, 400), tokens=st.integers(100, 3000), model=st.sampled_from(["full", "windows"]))
def test_the_most_requests_are_accepted_and_one_more_is_not(folder: Path, memory: int, tokens: int, model: str) -> None:
    device, values = f"cpu:avx2,memory={memory}MiB", {"chunked_prefill_size": 64, "context_length": tokens}
    answer = fit(launch(folder / model, device, **values), "concurrency").answer
    assert answer is not None
    assert holds(launch(folder / model, device, max_running_requests=answer, **values), tokens, answer)
    assert not holds(launch(folder / model, device, max_running_requests=answer + 1, **values), tokens, answer + 1)


def test_the_fewest_devices_are_the_first_number_that_holds_a_whole_request(folder: Path) -> None:
    values = {"chunked_prefill_size": 256, "max_running_requests": 4}
    needed = {}
    for memory in (3, 4, 8):
        device = f"cuda:sm90,memory={memory}GiB"
        answer = fit(launch(folder / "deep", device, **values), "devices")
        accepted = [
            ranks
            for ranks in (1, 2, 4, 8)
            if holds(launch(folder / "deep", f"{device},count={ranks}", tp_size=ranks, **values), CONTEXT, 1)
        ]
        assert answer.answer == accepted[0]
        needed[memory] = answer.answer
    assert len(set(needed.values())) > 1, needed


# As GLM-4.6 is published in FP8, beside GLM-4.5 of the catalogue, which has its sizes.
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS = {**CHANNELS, "strategy": "token", "dynamic": True}
GLM_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": CHANNELS, "input_activations": TOKENS}},
    "ignore": ["lm_head"],
}


@every(
    ("name", "device", "devices", "fields"),
    [
        ("deepseek-ai/DeepSeek-V3", "cuda:h200", 8, {}),
        ("moonshotai/Kimi-K2-Instruct", "cuda:h200", 8, {}),
        ("zai-org/GLM-4.5", "cuda:h200", 4, {"quantization_config": GLM_FP8}),
        ("Qwen/Qwen2.5-72B-Instruct-AWQ", "cuda:rtx4090", 4, {}),
    ],
)
def test_published_models_that_no_single_card_holds(
    name: str, device: str, devices: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    """In FP8 blocks with latent attention, with scales of channels, and packed in groups."""
    (entry,) = (each for each in read_checkpoints(CHECKPOINTS) if each.id == name)
    (tmp_path / "config.json").write_text(json.dumps({**entry.config, **fields}))
    answer = fit(launch(tmp_path, device, context_length=8192), "devices")
    assert answer.answer == devices
    assert answer.refused is not None
    assert holds(launch(tmp_path, f"{device},count={devices}", tp_size=devices, context_length=8192), 8192, 1)


def test_devices_that_are_too_few_are_refused_with_the_reasons(folder: Path) -> None:
    with pytest.raises(Refusal, match="pool_too_small") as refusal:
        fit(launch(folder / "full", "cuda:sm90,memory=8MiB"), "devices")
    assert "not_divisible" not in str(refusal.value)


def test_cards_are_the_profiles_whose_plan_is_accepted(folder: Path) -> None:
    request = user(model_path=str(folder / "full"), load_format="dummy", context_length=2000)
    cards = fit(request, "card").cards
    assert {card.device.partition(":")[0] for card in cards} >= {"cpu", "cuda", "rocm", "npu", "xpu"}
    assert [card.served for card in cards] == sorted((card.served for card in cards), reverse=True)
    for card in cards[:2] + cards[-2:]:
        assert card.served == holds(launch(folder / "full", card.device, context_length=2000), 2000, 1), card
    only = fit(launch(folder / "full", "xpu", context_length=2000), "card").cards
    assert {card.device for card in only} == {card.device for card in cards if card.device.startswith("xpu")}


def test_what_every_card_is_refused_for_is_said_once(folder: Path) -> None:
    answer = fit(user(model_path=str(folder / "full")), "card")  # a folder without weights
    assert not answer.found
    assert fit_text(answer).count("[format_not_there]") == 1
    assert all("format_not_there" in str(card["lines"]) for card in fit_dict(answer)["cards"])


def test_the_answer_shows_its_arithmetic_and_the_next_candidate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = launch(folder / "full", "cpu:avx2,memory=300MiB", context_length=2000)
    answer = fit(request, "concurrency")
    text, values = fit_text(answer), fit_dict(answer)
    assert text.startswith(f"concurrency  {answer.answer} requests\n    {answer.answer} requests of 2000 tokens hold ")
    assert f"{answer.answer} x 125 = {(answer.answer or 0) * 125} pages of 16 tokens" in text
    assert f"{(answer.answer or 0) + 1} requests are refused:" in text
    assert (values["answer"], values["refused"]["value"]) == (answer.answer, (answer.answer or 0) + 1)

    arguments = ["plan", "--model-path", str(folder / "full"), "--load-format", "dummy", "--fit", "context", "--json"]
    assert main([*arguments, "--device", "cpu:avx2,memory=300MiB"]) == 0
    assert json.loads(capsys.readouterr().out)["fit"] == "context"
    assert main([*arguments, "--device", "cpu:avx2,memory=1MiB"]) == 2
    assert json.loads(capsys.readouterr().out)["accepted"] is False


@every("goal", ["context", "card"])
def test_the_model_is_found_once(goal: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a hub costs requests, and one without native layers a process."""
    calls: list[UserInput] = []
    real = srv.planning.fit.find_the_model
    monkeypatch.setattr(
        "srv.planning.fit.find_the_model", lambda user, needed: calls.append(user) or real(user, needed)
    )
    monkeypatch.setattr("srv.planning.resolution.find_the_model", None)
    device = "cpu:avx2,memory=64MiB" if goal == "context" else "cpu"
    assert fit(launch(folder / "full", device, context_length=2000), goal).found
    assert len(calls) == 1


def test_a_card_has_no_profile_of_its_own(folder: Path) -> None:
    with pytest.raises(Refusal, match="every profile of a platform is tried"):
        fit(launch(folder / "full", "cuda:h100,memory=1GiB"), "card")


def test_kernels_and_fit_are_one_or_the_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model-path", str(folder / "full"), "--fit", "card", "--kernels"]) == 2
    assert "--kernels" in capsys.readouterr().err
