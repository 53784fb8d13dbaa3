"""Perplexity of one text, computed in the same way for every peer: from its own logits, in windows, as llama.cpp does.

The text is split into windows of 512 tokens, and each window is one prompt. Only the tokens after its middle token are
scored, so that each has at least 256 tokens of context (llama.cpp, tools/perplexity). Servers return the log
probabilities of a prompt (`echo` and `logprobs` of `/v1/completions`). llama.cpp's server does not, so its program
`llama-perplexity` is run on the same text.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TEXT = Path(__file__).with_name("perplexity.txt")
WINDOW = 512
ANSWER_S = 300.0
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+)")


def windows(ids: Sequence[int]) -> list[list[int]]:
    """All complete windows; the remaining tokens are ignored."""
    return [list(ids[start : start + WINDOW]) for start in range(0, len(ids) - WINDOW + 1, WINDOW)]


def scored(logprobs: Sequence[float | None]) -> list[float]:
    """The log probabilities that are scored, out of one per token of a window."""
    return [one for one in logprobs[WINDOW // 2 + 1 : WINDOW] if one is not None]


def perplexity(logprobs: Sequence[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def over_http(port: int, ids: Sequence[int], model: str | None) -> float:
    """The perplexity of the server on `port`. Raises RuntimeError if it returns no log probabilities."""
    logprobs: list[float] = []
    for window in windows(ids):
        fields = {"prompt": window, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        answer = _post(port, "/v1/completions", fields | ({"model": model} if model else {}))
        part = scored(answer["choices"][0]["logprobs"]["token_logprobs"])
        if len(part) != WINDOW // 2 - 1:
            raise RuntimeError(f"{len(part)} of a window's tokens were scored, not {WINDOW // 2 - 1}")
        logprobs += part
    return perplexity(logprobs)


def same_tokens(port: int, ids: Sequence[int]) -> bool:
    """Whether llama.cpp's server tokenizes the text in the same way."""
    answer = _post(port, "/tokenize", {"content": TEXT.read_text(), "add_special": True})
    return list(answer["tokens"]) == list(ids)


def by_llama(program: Path, model: Path, threads: int) -> float:
    """The perplexity by llama.cpp's own program. Raises RuntimeError if it fails."""
    command = [program, "--model", model, "--file", TEXT, "--ctx-size", WINDOW, "--threads", threads]
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    estimate = FINAL.search(process.stdout + process.stderr)
    if estimate is None:
        raise RuntimeError(
            f"llama-perplexity printed no estimate (status {process.returncode}): {process.stderr[-300:]}"
        )
    return float(estimate[1])


def _post(port: int, path: str, fields: dict[str, object]) -> Any:
    content = json.dumps(fields).encode()
    request = Request(f"http://127.0.0.1:{port}{path}", content, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=ANSWER_S) as answer:
            return json.load(answer)
    except HTTPError as error:
        raise RuntimeError(f"{path} answered {error.code}: {error.read()[:300].decode(errors='replace')}") from error
