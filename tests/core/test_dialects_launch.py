"""`--dialect` on the real command line: every value's story names the other engine's flag, every refusal its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from srv.cli.main import main

CPU = ("--device", "cpu:avx512,memory=16GiB")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a configuration and no weights."""
    monkeypatch.setenv("SRV_LOAD_FORMAT", "dummy")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `srv plan --json` prints; its exit status goes with what it says."""
    status = main(["plan", "--json", *words])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if told["accepted"] else 2)
    return told


@pytest.mark.parametrize(
    ("dialect", "words", "stories"),
    [
        (
            "rtp-llm",
            ("--checkpoint_path", "{}", "--max_seq_len", "4096", "--reuse_cache", "0", "--concurrency_limit=8"),
            {
                "context_length": (4096, "--max_seq_len 4096 (rtp-llm)"),
                "disable_radix_cache": (True, "--reuse_cache false (rtp-llm)"),
                "max_running_requests": (8, "--concurrency_limit 8 (rtp-llm)"),
            },
        ),
        (
            "vllm",
            (
                "{}",
                "--max-model-len",
                "4096",
                "--gpu-memory-utilization",
                "0.5",
                "--no-enable-prefix-caching",
            ),
            {
                "context_length": (4096, "--max-model-len 4096 (vllm)"),
                "mem_fraction_static": (0.5, "--gpu-memory-utilization 0.5 (vllm)"),
                "disable_radix_cache": (True, "--no-enable-prefix-caching (vllm)"),
            },
        ),
        (
            "sglang",
            ("--model", "{}", "--context-length", "4096", "--disable-radix-cache"),
            {
                "context_length": (4096, "--context-length 4096 (sglang)"),
                "disable_radix_cache": (True, "--disable-radix-cache true (sglang)"),
            },
        ),
    ],
)
def test_a_story_names_the_flag_that_was_written(
    dialect: str,
    words: tuple[str, ...],
    stories: dict[str, tuple[Any, str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = planned(capsys, *CPU, "--dialect", dialect, *(word.format(folder) for word in words))
    assert told["accepted"], told
    for argument, (value, source) in stories.items():
        story = told["arguments"][argument]
        assert (story["value"], story["layer"], story["owner"]) == (value, "user", source)
        assert story["because"] == f"set by {source}"


def test_refused_rows_come_together_with_everything_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max_seq_len", "9999", "--tp_size", "2", "--m-split", "4", "--tp_sizes", "3")
    told = planned(capsys, *CPU, "--dialect", "rtp-llm", "--checkpoint_path", str(folder), *words)
    refused = {each["what"]: (each["code"], each["who"]) for each in told["refusals"]}
    assert refused == {
        "--m-split": ("no_equivalent", "command line, as RTP-LLM"),
        "--tp_sizes": ("unknown_flag", "command line, as RTP-LLM"),
        "tp_size": ("planned", "--tp_size 2 (rtp-llm)"),
        "context_length": ("context_over_model", "--max_seq_len 9999 (rtp-llm)"),
    }
    assert all(each["reason"] and each["remedy"] for each in told["refusals"])


def test_a_launch_is_refused_in_words_and_ends_with_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--checkpoint_path", str(folder), "--m-split", "4", "--max_seq_len", "0")
    assert main(["launch", *CPU[:1], "cpu", "--dialect", "rtp-llm", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith(
        "srv: 2 refusals:\n"
        "  - --m-split = 4 (set by command line, as RTP-LLM): into how many parts a matrix product is cut is up to its"
        " kernel. Leave it out; to cut a batch in two that overlap say --enable-two-batch-overlap. [no_equivalent]\n"
        "  - context_length = 0 (set by --max_seq_len 0 (rtp-llm)): it must be at least "
    )
    assert told.endswith(" See `srv args explain context_length`. [bad_value]\n")


def test_a_foreign_flag_outranks_environment_and_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SRV_CONTEXT_LENGTH", "1024")
    words = ("--dialect", "vllm", "--model", str(folder), "--max-model-len", "2048")
    story = planned(capsys, *CPU, *words)["arguments"]["context_length"]
    assert (story["value"], story["owner"]) == (2048, "--max-model-len 2048 (vllm)")
    assert story["shadowed"][0]["owner"] == "environment SRV_CONTEXT_LENGTH"


def test_a_switch_that_is_off_is_a_wish_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No flag of ours says disable_radix_cache = false; a foreign switch does, and it is held against the platform."""
    words = ("--dialect", "rtp-llm", "--checkpoint_path", str(folder), "--reuse_cache", "1")
    story = planned(capsys, *CPU, *words)["arguments"]["disable_radix_cache"]
    assert (story["value"], story["owner"]) == (False, "--reuse_cache true (rtp-llm)")


def test_a_secret_is_in_no_story(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dialect", "vllm", "--model", str(folder), "--api-key", "hush-hush")
    told = planned(capsys, *CPU, *words)
    assert told["arguments"]["api_key"]["owner"] == "--api-key (hidden) (vllm)"
    assert "hush-hush" not in json.dumps(told)


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dialect", "vlm"]) == 2
    assert "There are: rtp-llm, vllm, sglang" in capsys.readouterr().err
