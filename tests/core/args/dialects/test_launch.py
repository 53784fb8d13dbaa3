"""`--dialect` on the command line: the provenance of a value names the other engine's flag, as do refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from args_world import CONFIG
from every import every

from srv.cli.main import main

CPU = ("--device", "cpu:avx512,memory=16GiB")
MODEL = {**CONFIG, "max_position_embeddings": 8192}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with a configuration and no weights."""
    monkeypatch.setenv("SRV_LOAD_FORMAT", "dummy")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The output of `srv plan --json`; checks the exit status."""
    status = main(["plan", "--json", *words])
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (0 if output["accepted"] else 2)
    return output


@every(
    ("dialect", "words", "sources"),
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
def test_provenance_names_the_flag_of_the_other_engine(
    dialect: str,
    words: tuple[str, ...],
    sources: dict[str, tuple[Any, str]],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = plan(capsys, *CPU, "--dialect", dialect, *(word.format(folder) for word in words))
    assert output["accepted"], output
    for argument, (value, source) in sources.items():
        provenance = output["arguments"][argument]
        assert (provenance["value"], provenance["layer"], provenance["owner"]) == (value, "user", source)
        assert provenance["because"] == f"set by {source}"


def test_refused_flags_are_reported_with_all_other_refusals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--max_seq_len", "9999", "--pp_size", "2", "--m-split", "4", "--tp_sizes", "3")
    output = plan(capsys, *CPU, "--dialect", "rtp-llm", "--checkpoint_path", str(folder), *words)
    refused = {refusal["what"]: (refusal["code"], refusal["who"]) for refusal in output["refusals"]}
    assert refused == {
        "--m-split": ("no_equivalent", "command line, as RTP-LLM"),
        "--tp_sizes": ("unknown_flag", "command line, as RTP-LLM"),
        "pp_size": ("planned", "--pp_size 2 (rtp-llm)"),
        "context_length": ("context_over_model", "--max_seq_len 9999 (rtp-llm)"),
    }
    assert all(refusal["reason"] and refusal["remedy"] for refusal in output["refusals"])


def test_refused_launch_ends_with_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--checkpoint_path", str(folder), "--m-split", "4", "--max_seq_len", "0")
    assert main(["launch", *CPU[:1], "cpu", "--dialect", "rtp-llm", *words]) == 2
    output = capsys.readouterr().err
    assert output.startswith(
        "srv: 2 refusals:\n"
        "  - --m-split = 4 (set by command line, as RTP-LLM): the kernel decides into how many parts a matrix"
        " product is split. Leave it out; --enable-two-batch-overlap overlaps the two halves of a batch."
        " [no_equivalent]\n"
        "  - context_length = 0 (set by --max_seq_len 0 (rtp-llm)): it must be at least "
    )
    assert output.endswith(" See `srv args explain context_length`. [bad_value]\n")


def test_translated_flag_overrides_environment_and_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SRV_CONTEXT_LENGTH", "1024")
    words = ("--dialect", "vllm", "--model", str(folder), "--max-model-len", "2048")
    provenance = plan(capsys, *CPU, *words)["arguments"]["context_length"]
    assert (provenance["value"], provenance["owner"]) == (2048, "--max-model-len 2048 (vllm)")
    assert provenance["shadowed"][0]["owner"] == "environment SRV_CONTEXT_LENGTH"


def test_switch_that_is_off_is_a_user_statement_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A translated switch can set disable_radix_cache = false, which no written flag of srv needs to do."""
    words = ("--dialect", "rtp-llm", "--checkpoint_path", str(folder), "--reuse_cache", "1")
    provenance = plan(capsys, *CPU, *words)["arguments"]["disable_radix_cache"]
    assert (provenance["value"], provenance["owner"]) == (False, "--reuse_cache true (rtp-llm)")


def test_secret_is_not_in_the_provenance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--dialect", "vllm", "--model", str(folder), "--api-key", "hush-hush")
    output = plan(capsys, *CPU, *words)
    assert output["arguments"]["api_key"]["owner"] == "--api-key (hidden) (vllm)"
    assert "hush-hush" not in json.dumps(output)


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dialect", "vlm"]) == 2
    assert "Available dialects: rtp-llm, vllm, sglang" in capsys.readouterr().err
