"""Run by `make serve`: start the server, wait until it is healthy, stream one chat answer, keep serving.

python ci/demo.py [--oneshot] [arguments for `srv launch` ...]
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

QUESTION = "In one sentence: why is the sky blue?"
START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


def free_port(preferred: int) -> int:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            probe.close()
            with socket.socket() as any_port:
                any_port.bind(("127.0.0.1", 0))
                return int(any_port.getsockname()[1])
        return preferred


def wait_healthy(base: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with status {server.returncode} before it was healthy")
        try:
            with urllib.request.urlopen(f"{base}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    sys.exit(f"the server was not healthy within {START_TIMEOUT_S} s")


def stream_answer(base: str) -> int:
    """Print a streamed chat answer; returns the number of its chunks."""
    with urllib.request.urlopen(f"{base}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "max_tokens": 96,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    print(f"\n> {QUESTION}\n", flush=True)
    chunks = 0
    with urllib.request.urlopen(request, timeout=120) as stream:
        for line in stream:
            text = line.decode().strip()
            if not text.startswith("data: ") or text == "data: [DONE]":
                continue
            choices = json.loads(text[6:])["choices"]
            chunk = choices[0]["delta"].get("content") if choices else None
            if chunk:
                chunks += 1
                print(chunk, end="", flush=True)
    print("\n", flush=True)
    return chunks


def main() -> int:
    oneshot = "--oneshot" in sys.argv
    extra = [argument for argument in sys.argv[1:] if argument != "--oneshot"]
    port = free_port(30000)
    base = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-P", "-m", "srv", "launch", "--port", str(port), *extra])
    chunks = 0
    try:
        wait_healthy(base, server)
        chunks = stream_answer(base)
        if not oneshot:
            print(f"serving on {base}; Ctrl-C ends it", flush=True)
            return server.wait()
        server.send_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print("\nstopping", flush=True)  # the terminal also sends SIGINT to the server
    except BaseException:
        server.kill()
        raise
    status = wait_for_exit(server)
    return status if chunks or not oneshot else 1


def wait_for_exit(server: subprocess.Popen[bytes]) -> int:
    """The server's exit status; a server that does not stop in time is killed."""
    try:
        return server.wait(timeout=STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        server.kill()
        return server.wait()


if __name__ == "__main__":
    sys.exit(main())
