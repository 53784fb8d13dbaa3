"""`srv replay`: sends the requests of a crash dump to a server again, in their order and with the pauses between them.

Must not know how a dump is made (`srv.server.observe.crash_dump`).
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from srv.cli.text import printable

FAILED = 1  # exit status: a request had no answer, or one that says that the server failed
_MAX_THREADS = 512
_SHOWN = 300  # characters of an answer


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an answer like any other: following it would send the key to another server."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


class ReplayAnswer(NamedTuple):
    """status: 0 if there was none; then `text` says why."""

    status: int
    text: str
    seconds: float


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="send the requests of a crash dump again",
        description="Send the requests of a crash dump (--crash-dump-folder) to a server again, at the times at which"
        " they came. Exit status 1 if the server fails on one of them.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the dump")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    parser.add_argument("--api-key", help="key that the server requires")
    parser.add_argument("--speed", type=_speed, default=1.0, help="divides the pauses; 0 sends everything at once")
    parser.add_argument("--incomplete", action="store_true", help="only the requests that had no complete response")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a request may take")
    parser.add_argument("--show", action="store_true", help="print the beginning of every answer")
    parser.set_defaults(handler=run)


def _speed(text: str) -> float:
    speed = float(text)
    if not (math.isfinite(speed) and speed >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return speed


def run(namespace: argparse.Namespace) -> int:
    from srv.server.observe.crash_dump import read_dump

    header, requests = read_dump(namespace.file)
    if namespace.incomplete:
        requests = [entry for entry in requests if not entry.get("complete")]
    model, reason = (printable(str(header.get(name))) for name in ("model", "reason"))
    print(f"{len(requests)} requests of {model}, dumped because {reason}")
    answers = replay(requests, namespace.url, key=namespace.api_key, speed=namespace.speed, timeout=namespace.timeout)
    for number, (request, answer) in enumerate(zip(requests, answers, strict=True), 1):
        before = request.get("status") or "none"
        outcome = str(answer.status) if answer.status else f"no answer: {printable(answer.text)}"
        print(
            f"{number:>4}  {request['method']} {printable(request['path'])}  then {before}  now {outcome}"
            f"  {answer.seconds:.3f} s"
        )
        if namespace.show and answer.status:
            print(f"      {printable(answer.text[:_SHOWN])}")
    return FAILED if any(answer.status == 0 or answer.status >= 500 for answer in answers) else 0


def replay(
    requests: Sequence[Mapping[str, Any]],
    url: str,
    *,
    key: str | None = None,
    speed: float = 1.0,
    timeout: float = 600.0,
) -> list[ReplayAnswer]:
    """The answers, in the order of the requests. Requests that overlapped do so again, up to a limit of threads."""
    answers: dict[int, ReplayAnswer] = {}
    free, threads = threading.Semaphore(_MAX_THREADS), []

    def send(number: int, request: Mapping[str, Any]) -> None:
        try:
            answers[number] = _send(request, url.rstrip("/"), key, timeout)
        finally:
            free.release()

    began = time.monotonic()
    for number, request in enumerate(requests):
        if speed > 0:
            due = began + (float(request["at"]) - float(requests[0]["at"])) / speed
            time.sleep(min(max(0.0, due - time.monotonic()), threading.TIMEOUT_MAX))
        free.acquire()
        thread = threading.Thread(target=send, args=(number, request), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(requests))]


def _send(request: Mapping[str, Any], url: str, key: str | None, timeout: float) -> ReplayAnswer:
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    if request.get("content_encoding"):
        headers["content-encoding"] = str(request["content_encoding"])
    body = json.dumps(request["body"]).encode() if "body" in request else base64.b64decode(request.get("base64", ""))
    began = time.monotonic()
    try:
        # Quoted: a path such as "@host/" would otherwise name another server.
        target = url + urllib.parse.quote(request["path"])
        http_request = urllib.request.Request(target, body, headers, method=request["method"])
        try:
            with _OPENER.open(http_request, timeout=timeout) as response:
                return ReplayAnswer(response.status, response.read().decode(errors="replace"), time.monotonic() - began)
        except urllib.error.HTTPError as error:
            return ReplayAnswer(error.code, error.read().decode(errors="replace"), time.monotonic() - began)
    except (OSError, http.client.HTTPException, ValueError) as error:  # a server that dies cuts its answer off
        reason = str(getattr(error, "reason", error))
        return ReplayAnswer(0, reason, time.monotonic() - began)
