"""Regular expressions that end an output: where a match ends, what is sent before it, and what a pattern may cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from every import every
from hypothesis import given, settings
from hypothesis import strategies as st

from srv.errors import RequestError
from srv.server.text.detokenize import IncrementalDetokenizer
from srv.server.text.stop_regex import MAX_STATES, RegexMatcher, StopRegex
from srv.server.text.tokenizers.codec import ByteCodec

# Expressions that Python's `re`, which backtracks, matches alike.
atoms = st.sampled_from(["a", "b", r"\n", ".", "[ab]", "[^a]", r"\d", r"\w", "é", r"\x61", "[a-c1]"])
patterns = st.recursive(
    atoms,
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"]))
    ),
    max_leaves=6,
)
texts = st.text(alphabet="ab1é\n", max_size=16)


def run(
    patterns: Sequence[str], text: str, splits: Sequence[int] = (), include: bool = False
) -> tuple[str, str | None]:
    """What is released of a text that arrives in parts, and the expression that ended it."""
    matcher, released = RegexMatcher(StopRegex(patterns), include), ""
    bounds = [0, *sorted(split % (len(text) + 1) for split in splits), len(text)]
    for begin, end in pairwise(bounds):
        more, match = matcher.feed(text[begin:end], final=False)
        released += more
        if match is not None:
            return released, match
    more, match = matcher.feed("", final=True)
    return released + more, match


def first_end(pattern: str, text: str) -> tuple[int, int] | None:
    """Start and end of the match that ends first, and is the longest of those; by trying all of them."""
    compiled = re.compile(pattern)
    spans = ((start, end) for end in range(1, len(text) + 1) for start in range(end))
    return next((span for span in spans if compiled.fullmatch(text, *span)), None)


@settings(max_examples=400, deadline=None)
@given(pattern=patterns, text=texts, splits=st.lists(st.integers(0, 99), max_size=4), include=st.booleans())
def test_the_text_ends_where_a_match_ends_first_for_any_split(
    pattern: str, text: str, splits: list[int], include: bool
) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(RequestError, match="matches the empty text"):
            StopRegex([pattern])
        return
    match = first_end(pattern, text)
    expected = (text, None) if match is None else (text[: match[include]], pattern)
    assert run([pattern], text, splits, include) == expected
    assert run([pattern], text, range(len(text)), include) == expected


@every(
    ("pattern", "parts"),
    [
        ("ab+c", [("xa", "x"), ("bb", ""), ("d", "abbd")]),  # what may become a match waits, and no more than that
        ("b|a.*b", [("xa", "x"), ("yy", ""), ("\n", "ayy\n")]),
        (r"[^\n]*END", [("one", ""), ("\ntwo", "one\n")]),  # the whole line may belong to the match
    ],
)
def test_text_waits_only_while_it_may_belong_to_a_match(pattern: str, parts: list[tuple[str, str]]) -> None:
    matcher = RegexMatcher(StopRegex([pattern]), include=False)
    assert [matcher.feed(text, final=False) for text, _ in parts] == [(released, None) for _, released in parts]


def test_nothing_waits_if_the_match_stays_in_the_text() -> None:
    matcher = RegexMatcher(StopRegex([".*END"]), include=True)
    assert matcher.feed("all of this", final=False) == ("all of this", None)
    assert matcher.feed(" END and more", final=False) == (" END", ".*END")


def test_the_first_expression_that_ends_is_named() -> None:
    assert run(["longer", "lo"], "so longer") == ("so ", "lo")
    assert run([r"\d\d", "[0-9]+x"], "a 1x 22") == ("a ", "[0-9]+x")
    assert run(["(?i)human", r"[\s\S]!"], "Human") == ("", "(?i)human")
    assert run(["(?s)a.b"], "xa\nb") == ("x", "(?s)a.b")
    assert run(["[]-]"], "ab-") == ("ab", "[]-]")
    assert run([r"a{,2}b{x"], "aab{x") == ("", r"a{,2}b{x")


@every(
    ("pattern", "reason"),
    [
        ("(", "not closed"), (")", "not opened"), ("[a", "not closed"), ("a**", "repetition is repeated"),
        ("*", "nothing to repeat"), ("a{3,2}", "maximum is less"), ("[b-a]", "ends before it begins"),
        ("a\\", "unknown escape"), (r"\q", "unknown escape"), (r"\x1", "2 digits"), (r"\Uffffffff", "8 digits"),
        ("^a", "anchors"), ("a$", "anchors"), (r"\Aa", "anchors"), (r"\bword", "word boundaries"),
        ("a(?=b)", "lookahead"), ("(?<!a)b", "lookbehind"), (r"(a)\1", "backreferences"), ("(?P<x>a)(?P=x)", "backref"),
        ("(?>a)", "atomic"), ("a++", "possessive"), ("(?i:a)", "unknown kind of group"), ("(?m)a", "flag m"),
        ("a*", "empty text"), ("|a", "empty text"), (r"\01", "octal"), ("[\\d-z]\\", "unknown escape"),
        ("a{1000}", "too large"), ("a{99999}", "more than 1000"), ("((a{100}){100}){100}", "too large"),
        ("(?:" * 33 + "a" + ")" * 33, "32 groups"), ("(?:a|b){60}" * 2, "too large"),
    ],
)  # fmt: skip
def test_an_expression_that_is_refused_says_why(pattern: str, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)):
        StopRegex([pattern])


def test_the_states_of_a_hostile_search_are_bounded() -> None:
    """Expressions on which `re` needs exponential or quadratic time: at most one entry per state is kept."""
    for pattern in ("(a|a)*b", "(a+)+b", "a{127}b", "(a?){60}a{60}b", "(.*)(.*)(.*)b"):
        regex = StopRegex([pattern])
        matcher = RegexMatcher(regex, include=False)
        for _ in range(20):
            assert matcher.feed("a" * 100, final=False)[1] is None
            assert len(matcher._begun) <= MAX_STATES
        assert matcher.feed("b", final=False)[1] == pattern


TABLE = [b"a", b"b", "é".encode(), b"\xc3", b"\xa9", b"ab", b" "]


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(TABLE) - 1), max_size=12),
    stops=st.lists(st.text(alphabet="ab é", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
)
def test_a_stop_string_is_looked_for_first_and_several_tokens_at_once_change_nothing(
    tokens: list[int], stops: list[str], include: bool
) -> None:
    """As drafts bring them."""
    pattern, codec = "b|é a", ByteCodec(TABLE.__getitem__, len(TABLE), frozenset(), False)

    def target() -> IncrementalDetokenizer:
        return IncrementalDetokenizer(codec.stream([], True), stops, include, StopRegex([pattern]))

    whole = target().push(tokens, final=True)
    text = codec.decode(tokens, True)
    earliest = min(((text.find(stop), len(stop), stop) for stop in stops if stop in text), default=(len(text), 0, None))
    before, match = run([pattern], text[: earliest[0]], include=include)
    if match is not None:
        assert (whole.text, whole.stop_string) == (before, pattern)
    else:
        assert (whole.text, whole.stop_string) == (text[: earliest[0] + earliest[1] * include], earliest[2])
    one, released = target(), ""
    for token in tokens:
        delta = one.push([token], final=False)
        released += delta.text
        if delta.stop_string is not None:
            break
    else:
        delta = one.push([], final=True)
        released += delta.text
    assert (released, delta.stop_string, delta.tokens_used) == (whole.text, whole.stop_string, whole.tokens_used)
