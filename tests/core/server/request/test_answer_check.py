"""The check of an answer by its grammar, in the process that serves all others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from srv.server.request.grammars import CHECK_SECONDS, AnswerCheck


class Spinning:
    """A matcher that takes as much time as a check may, for any text."""

    failure = ""
    accepting = True

    def __init__(self) -> None:
        self.asked = 0

    def accept(self, tokens: Sequence[int]) -> bool:
        self.asked += 1
        until = time.thread_time() + 1.1 * CHECK_SECONDS
        while time.thread_time() < until:
            pass
        return True


def test_a_check_that_takes_long_ends() -> None:
    """Text behind it costs nothing, and whether the answer is valid is not known."""
    matcher = Spinning()
    check = AnswerCheck(lambda: matcher, "")
    assert not check.given_up
    for _ in range(5):
        check.feed("a")
    assert matcher.asked == 1
    assert check.given_up


def test_a_check_counts_only_its_own_time() -> None:
    class Quick(Spinning):
        def accept(self, tokens: Sequence[int]) -> bool:
            self.asked += 1
            return True

    matcher = Quick()
    check = AnswerCheck(lambda: matcher, "")
    for _ in range(3):
        check.feed("a")
        Spinning().accept(())
    assert matcher.asked == 3
    assert check.valid
    assert not check.given_up
