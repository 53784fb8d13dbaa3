"""Whether SmolLM2 generates on a device what it generates on the CPU: greedy, in float32, over HTTP.

    python tokens.py --device cuda [--prompts 8] [--tokens 64]

Both servers load the same GGUF file with dequantized weights. Ends with status 3 and the reason if the demo model is
not installed, and with 1 if a token differs. The last line on standard output is the summary.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from limits import stop
from outcomes import STATUS_PASSED_OVER

from srv.errors import SrvError
from srv.models.locate import demo_model

START_S = 120.0
ANSWER_S = 300.0
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "1, 2, 3, 4, 5,",
    "The three laws of thermodynamics say that",
    "Dear Sir or Madam,",
    "A recipe for bread needs flour, water, salt and",
)


@contextmanager
def server(device: str, *flags: str) -> Iterator[str]:
    """The address of `srv launch` on a free loopback port, once it is healthy. It is stopped in any case.

    Raises RuntimeError if the server ends, or is not healthy in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--device", device, "--port", str(port), "--dtype", "float32", "--dequantize-weights"]
    limits = ["--max-running-requests", str(len(PROMPTS)), "--max-total-tokens", "4096"]
    command = [sys.executable, "-P", "-m", "srv", "launch", *arguments, *limits, *flags]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_healthy(process, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def _wait_healthy(process: subprocess.Popen[bytes], health: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"a server ended with status {process.returncode} before it was healthy")
        try:
            with urllib.request.urlopen(health, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise RuntimeError(f"a server was not healthy within {START_S:g} s")


def generate(base: str, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt, of exactly `tokens` tokens. All are sent together."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"text": list(prompts), "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"{base}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        return [reply["output_ids"] for reply in json.load(answer)]


def differences(expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]) -> list[str]:
    """One sentence for each prompt whose tokens differ: where they first do."""
    lines = []
    for number, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if list(want) != list(got):
            pairs = enumerate(zip(want, got, strict=False))
            first = next((index for index, (one, other) in pairs if one != other), min(len(want), len(got)))
            lines.append(f"prompt {number}: token {first} of {len(want)} is the first that differs")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--eager", action="store_true", help="capture no graphs, which takes minutes on a simulator")
    options = parser.parse_args(arguments)
    try:
        demo_model()
    except SrvError as error:
        print(" ".join(str(error).split()))
        return STATUS_PASSED_OVER
    prompts = PROMPTS[: options.prompts]
    answers = []
    for device, flags in (("cpu", ()), (options.device, ("--disable-graphs",) if options.eager else ())):
        with server(device, *flags) as base:
            answers.append(generate(base, prompts, options.tokens))
    expected, actual = answers
    wrong = differences(expected, actual)
    print("\n".join(wrong))
    print(f"{len(prompts) - len(wrong)} of {len(prompts)} prompts equal to the CPU, {options.tokens} tokens each")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
