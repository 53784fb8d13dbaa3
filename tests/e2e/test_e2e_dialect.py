"""A server can be launched with another engine's flags, and reports which flag set each argument."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import greedy, launch, served

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CASES = {
    "rtp-llm": (
        # --load-format is a flag of srv, for which RTP-LLM has none
        (
            *("--checkpoint_path={}", "--max_seq_len", "4096", "--reuse_cache", "0", "--concurrency_limit=2"),
            *("--load-format", "dummy"),
        ),
        {
            "context_length": (4096, "--max_seq_len 4096 (rtp-llm)"),
            "disable_radix_cache": (True, "--reuse_cache false (rtp-llm)"),
            "max_running_requests": (2, "--concurrency_limit 2 (rtp-llm)"),
        },
    ),
    "vllm": (
        ("{}", "--max-model-len", "4096", "--no-enable-prefix-caching", "--max-num-seqs=2", "--load-format", "dummy"),
        {
            "context_length": (4096, "--max-model-len 4096 (vllm)"),
            "disable_radix_cache": (True, "--no-enable-prefix-caching (vllm)"),
            "load_format": ("dummy", "--load-format dummy (vllm)"),
        },
    ),
}


@pytest.mark.parametrize("dialect", CASES)
def test_another_engines_command_line_is_served(dialect: str, letters_model: Path, tmp_path: Path) -> None:
    flags, expected = CASES[dialect]
    foreign = [flag.format(letters_model) for flag in flags]
    pool = ("--max-total-tokens", "16384")  # a flag of srv, because the other engines have none for it
    with served(tmp_path / "log", "--dialect", dialect, "--device", "cpu", *pool, *foreign) as server:
        answer = server.generate(**greedy("a b c", 4))
        assert answer["meta_info"]["completion_tokens"] == 4
        info = server.get("/get_server_info").json()
        for argument, (value, source) in expected.items():
            provenance = info["arguments"][argument]
            assert (provenance["value"], provenance["owner"]) == (value, source)


def test_a_flag_without_an_equivalent_is_refused_before_weights_are_read(letters_model: Path) -> None:
    foreign = ("--checkpoint_path", str(letters_model), "--m-split", "4")
    status, text, _ = launch("--device", "cpu", "--dialect", "rtp-llm", *foreign)
    assert status == 2
    assert "--m-split = 4 (set by command line, as RTP-LLM): " in text
    assert "[no_equivalent]" in text
    assert "loaded" not in text
