"""Budgets of reasoning in the whole engine: where one is used up, its end follows, whatever the model prefers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from bytes_model import write_model
from every import every
from grammar_world import World, launch, of

from srv.engine.thinking import ThinkingBudgets
from srv.planning.steps import draft_count
from srv.sched.late import LateInputs, LateRow
from srv.testing.engine import CheckedEngine
from srv.types import RequestSpec, SamplingParams, ThinkingBudget

END, BEGIN = "~", "^"
LETTERS = tuple(range(ord("a"), ord("z") + 1))
COUNT = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(write_model(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module", params=[{}, {"disable_graphs": True, "speculative_algorithm": "NGRAM"}], ids=str)
def engine(world: World, request: pytest.FixtureRequest) -> Iterator[CheckedEngine]:
    with launch(world, **request.param) as made:
        yield made


def budget(tokens: int, end: str = END, **fields: Any) -> ThinkingBudget:
    return ThinkingBudget(
        tokens=tokens, **{"end": tuple(end.encode()), "begins": (BEGIN,), "ends": (end,), "inside": True, **fields}
    )


def test_the_reasoning_ends_where_its_budget_is_used_up(world: World, engine: CheckedEngine) -> None:
    def output(name: str, thinking: ThinkingBudget | None) -> str:
        letters = (*LETTERS, *b"~</>")
        (result,) = engine.generate(
            [
                world.request(
                    name,
                    None,
                    b"some words",
                    max_tokens=COUNT,
                    ignore_eos=True,
                    thinking=thinking,
                    allowed_token_ids=letters,
                )
            ]
        )
        return world.decoded(result.tokens)

    free = output("free", None)
    assert len(set(free[:4])) > 1
    assert not set(END + BEGIN + "</>") & set(free)
    for tokens in (0, 1, 7):
        for end in (END, "</>"):
            found = output(f"limited {tokens} {end}", budget(tokens, end))
            assert found[:tokens] == free[:tokens]
            assert found[tokens:].startswith(end)
            assert end not in found[tokens + len(end) :], "it is forced once"
    ends = budget(7, ends=(END, free[2:5]))
    assert output("ends by itself", ends) == free
    assert output("does not reason", budget(3, inside=False)) == free
    assert output("is no start", budget(2, inside=False, begins=(free[4:6],))) == free
    at = free.index(free[4:6]) + 2  # it begins with these tokens
    later = budget(2, inside=False, anywhere=True, begins=(free[4:6],))
    assert output("begins later", later)[: at + 3] == free[: at + 2] + END


def test_the_answer_is_that_of_a_request_without_a_budget_and_has_drafts(world: World, engine: CheckedEngine) -> None:
    """It is the continuation of a prompt with the reasoning, in a batch with a request that has no budget either."""

    def run(names: Sequence[str], prompt: bytes, thinking: ThinkingBudget | None, count: int) -> list[list[int]]:
        params = {"max_tokens": count, "ignore_eos": True, "allowed_token_ids": (*LETTERS, *END.encode())}
        requests = [world.request(name, None, prompt, thinking=thinking, **params) for name in names]
        return [result.tokens for result in engine.generate(requests)]

    (limited,) = run(["limited"], b"some words", budget(3), 64)
    assert world.decoded(limited)[3] == END
    before = engine.stats()
    first, second = run(["limited 1", "limited 2"], b"some words", budget(3), 64)
    after = engine.stats()
    (free,) = run(["continued"], b"some words" + world.decoded(limited[:4]).encode(), None, 60)
    assert limited[4:] == free
    assert first == second == limited
    assert (after.drafts_accepted > before.drafts_accepted) == (draft_count(engine.context.resolved.config) > 0)


def test_a_grammar_begins_behind_the_forced_end(world: World, engine: CheckedEngine) -> None:
    for end in ("#", "#!"):
        grammar = world.grammar(of("regex", "[a-c]{4}"), begins_after=end)
        (result,) = engine.generate([world.request("both", grammar, max_tokens=60, thinking=budget(5, end))])
        text = world.decoded(result.tokens[5:])
        assert text.startswith(end)
        assert set(text[len(end) :][:4]) <= set("abc")


class _NoGrammars:
    def concerns(self, request: RequestSpec) -> bool:
        return False

    def make(self, rows: list[LateRow]) -> LateInputs:  # type: ignore[override]
        return LateInputs()


def forced(made: ThinkingBudgets, request: RequestSpec, output: list[int]) -> str:
    """What may follow this output: one character, or "" for anything."""
    masks = made.make([LateRow(0, request, output)]).masks
    if not masks:
        return ""
    (token,) = np.flatnonzero(np.unpackbits(np.frombuffer(masks[0][1], np.uint8), bitorder="little"))
    return chr(token)


def limited(thinking: ThinkingBudget) -> RequestSpec:
    return RequestSpec(id="a", tokens=(1,), params=SamplingParams(max_tokens=9, thinking=thinking))


def one_byte(token: int) -> bytes:
    return bytes([token])


def test_a_name_that_is_used_again_and_an_output_that_starts_again_are_followed_from_their_start() -> None:
    made = ThinkingBudgets(_NoGrammars(), 256, one_byte)
    first, second = limited(budget(2)), limited(budget(2, anywhere=True))
    end, begin = ord(END), ord(BEGIN)
    assert [forced(made, first, [1] * count) for count in range(4)] == ["", "", END, END]
    assert not forced(made, second, [1]), "it is another request"
    assert not forced(made, second, []), "its output starts again"
    assert not forced(made, second, [1, end, 1, 1, 1])
    assert not forced(made, second, [1, end, 1, 1, 1, begin])
    assert forced(made, second, [1, end, 1, 1, 1, begin, 1]), "all reasoning counts"


@every(
    ("text", "fields", "settles_at"),
    [
        ("xy</>ab", {}, 5),
        ("</>ab", {}, 3),
        ("a^xy", {"inside": False}, 1),
        ("^xy</>b", {"inside": False}, 6),
        ("xy</>ab", {"anywhere": True}, None),
    ],
)
def test_a_request_settles_where_no_reasoning_may_begin_any_more(
    text: str, fields: dict[str, Any], settles_at: int | None
) -> None:
    made = ThinkingBudgets(_NoGrammars(), 256, one_byte)
    request = limited(budget(2, "</>", **fields))
    rows = [LateRow(0, request, list(text[:size].encode())) for size in range(len(text) + 1)]
    settled = [bool(made.make([row]).settled) for row in rows]
    assert settled == [settles_at is not None and size >= settles_at for size in range(len(text) + 1)]


@every(
    ("text", "fields", "expected"),
    [
        ("xy", {}, "<"),
        ("xy<", {}, "/"),
        ("xy</", {}, ">"),
        ("xy</>", {}, ""),
        ("xy</>z", {}, ""),
        ("x<</", {}, ">"),
        ("xy</z", {}, "<"),
        ("</>xyz", {}, ""),
        ("xyCALL", {"ends": ("</>", "CALL")}, ""),
        ("</>^xy", {}, ""),
        ("</>^xy", {"anywhere": True}, "<"),
        ("^xy", {"inside": False}, "<"),
        (" ^xy", {"inside": False}, "<"),
        ("a^xy", {"inside": False}, ""),
        ("a^xy", {"inside": False, "anywhere": True}, "<"),
        ("ab^^xy", {"inside": False, "anywhere": True, "begins": ("ab^^",)}, "<"),
        ("ab^^xy", {"inside": False, "begins": ("ab^", "ab^^")}, "<"),
        ("ab!^xy", {"inside": False, "begins": ("ab^", "ab^^")}, ""),
    ],
)
def test_what_follows_an_output(text: str, fields: dict[str, Any], expected: str) -> None:
    """After two tokens of reasoning, also where a forced end was interrupted, as when a request is retracted."""
    made = ThinkingBudgets(_NoGrammars(), 256, one_byte)
    request = limited(budget(2, "</>", **fields))
    for size in range(1, len(text) + 1):
        found = forced(made, request, list(text[:size].encode()))
    assert found == expected
    assert forced(ThinkingBudgets(_NoGrammars(), 256, one_byte), request, list(text.encode())) == expected


def test_markers_are_found_in_whatever_tokens_the_model_writes_them() -> None:
    texts = [b"x", b"<", b"/", b">", b"x</", b">\n\n", b"^y", b"", b"</>^z"]
    made = ThinkingBudgets(_NoGrammars(), 256, texts.__getitem__)
    ends = budget(2, end="</>")
    request = limited(msgspec.structs.replace(ends, end=(1, 2, 3), anywhere=True))
    assert forced(made, request, [0, 4]) == chr(1)
    assert forced(made, request, [0, 4, 5]) == ""
    assert forced(made, request, [0, 4, 5, 6, 0]) == chr(1)
    assert forced(made, request, [0, 4, 5, 6, 0, 8, 0]) == chr(1), "it ends and begins within one token"
    silent = limited(msgspec.structs.replace(ends, end=(7, 7)))
    assert forced(made, silent, [0, 0]) == forced(made, silent, [0, 0, 7]) == chr(7)
    assert forced(made, silent, [0, 0, 7, 7]) == "", "what was forced has ended, even if it has no text"
