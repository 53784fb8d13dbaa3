"""A real server serves a short request beside one that asks for a thousand long outputs.

Counted in steps of the engine, whose plugin of hooks notes each step, and holds the engine between two steps while the
short request arrives; so nothing here depends on the speed of a machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from e2e_support import Server, greedy, served, wait_until
from hook_plugins_small import write_hooks

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SLOTS = 8
OUTPUT = 4  # tokens of the short request
PROMPT = 200  # tokens of its prompt, which fits into one step; no other row computes as many
GATE = """
import os
import time
from pathlib import Path
from srv.hooks import hookimpl

FOLDER = Path(os.environ["GATE_FOLDER"])


class Gate:
    @hookimpl
    def srv_request_started(self, event):
        with (FOLDER / "started").open("a") as file:
            file.write(f"{event.prompt_tokens}\\n")

    @hookimpl
    def srv_step(self, event):
        with (FOLDER / "steps").open("a") as file:
            file.write(f"{event.rows} {event.tokens}\\n")
        if (FOLDER / "hold").exists():
            (FOLDER / "held").touch()
            while (FOLDER / "hold").exists():
                time.sleep(0.01)
"""


@dataclass(frozen=True)
class Gated:
    """A server whose steps are noted. `folder`: the files of `GATE`."""

    server: Server
    folder: Path

    def steps(self) -> list[tuple[int, int]]:
        """Rows and computed positions of every step so far."""
        lines = (self.folder / "steps").read_text().splitlines() if (self.folder / "steps").exists() else []
        return [(int(rows), int(tokens)) for rows, tokens in map(str.split, lines)]

    def started(self, prompt_tokens: int) -> int:
        """How many sequences with a prompt of this length the API process has sent to the engine."""
        seen = self.folder / "started"
        return seen.read_text().splitlines().count(str(prompt_tokens)) if seen.exists() else 0

    def while_held(self, send: Callable[[], None]) -> int:
        """Send a request between two steps; returns the number of steps before it."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").touch()
        wait_until((self.folder / "held").exists, 60, "the engine is held")
        before = len(self.steps())
        send()
        (self.folder / "hold").unlink()
        return before


@pytest.fixture(scope="module")
def gated(letters_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gated]:
    folder = tmp_path_factory.mktemp("gated")
    (folder / "site").mkdir()
    write_hooks(folder / "site", GATE, name="gate", attribute="Gate")
    path = os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])
    model = ("--model-path", str(letters_model), "--load-format", "dummy", "--device", "cpu")
    limits = ("--max-running-requests", str(SLOTS), "--max-total-tokens", "32768")
    with served(
        folder / "log", *model, *limits, environment={"PYTHONPATH": path, "GATE_FOLDER": str(folder)}
    ) as server:
        yield Gated(server, folder)


def short_request(letter: str) -> dict[str, object]:
    """Its prompt is in no cache, because it begins with a letter of its own."""
    return greedy(" ".join([letter, *("abcdefghij"[place % 10] for place in range(PROMPT - 1))]), OUTPUT)


@pytest.mark.parametrize(
    ("key", "letter"), [("", "x"), ("of somebody else", "y")], ids=["the same client", "another key"]
)
def test_a_short_request_starts_beside_a_thousand_long_outputs(gated: Gated, key: str, letter: str) -> None:
    server = gated.server
    begin = len(gated.steps())
    assert server.generate(**short_request(letter))["meta_info"]["completion_tokens"] == OUTPUT
    alone = len(gated.steps()) - begin
    server.flush()

    large = {"prompt": ["a b c"] * 8, "n": 128, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

    def ask_for_much() -> None:
        with suppress(httpx.HTTPError):
            server.post("/v1/completions", **large)

    def ask_for_little() -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(base_url=server.base, headers=headers, timeout=60) as client:
            answers.append(client.post("/generate", json=short_request(letter)).json())

    def send() -> None:
        sent = gated.started(PROMPT)
        little.start()
        wait_until(lambda: gated.started(PROMPT) == sent + 1, 60, "the short request is on its way to the engine")
        assert server.get("/version").status_code == 200  # the message has left the API process by now

    answers: list[dict[str, dict[str, object]]] = []
    much, little = (threading.Thread(target=ask, daemon=True) for ask in (ask_for_much, ask_for_little))
    much.start()
    try:
        wait_until(lambda: gated.steps()[-1][0] == SLOTS, 60, "the large request has every slot")
        before = gated.while_held(send)
        little.join(60)
        assert answers, "the short request still waits"
        assert answers[0]["meta_info"]["completion_tokens"] == OUTPUT
        after = gated.steps()[before:]
        started = next(number for number, (rows, tokens) in enumerate(after, 1) if tokens - rows >= PROMPT - 1)
        assert started <= 2 * alone + 1
        assert all(rows >= SLOTS - 1 for rows, _ in after[: started + OUTPUT]), "one sequence yields, not more"
    finally:
        (gated.folder / "hold").unlink(missing_ok=True)
        server.post("/abort_request", abort_all=True)
        much.join(60)
    assert server.wait_pages_back()["srv_retractions_total"] >= 1
