"""Incremental detokenization: when text is released, and how many tokens it contains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from srv.errors import RequestError
from srv.server.text.detokenize import IncrementalDetokenizer
from srv.server.text.processor import TextDelta
from srv.server.text.tokenizers.codec import ByteCodec, WindowCodec

# Characters of one to four bytes, complete and split at every byte; words; a special token; bytes that are not UTF-8.
TABLE: list[bytes] = [
    b"a", b"b", b"ab", b" a", b" ", b"\n", b"aab", "é".encode(), "中".encode(), "😀".encode(),
    b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\xad", b"\xb8\xad", b"\xe4\xb8", b"\xf0\x9f", b"\x98", b"\x80", b"\x98\x80a",
    b"\xff", b"\xed\xa0", b"", b"<eos>",
]  # fmt: skip
EOS, EMPTY, OUTSIDE = len(TABLE) - 1, len(TABLE) - 2, len(TABLE) + 5
ids_of = {data: token for token, data in enumerate(TABLE)}
token_lists = st.lists(st.integers(0, len(TABLE) - 1) | st.just(OUTSIDE) | st.integers(0, 6), max_size=24)
stop_lists = st.lists(st.text(alphabet="ab é\n中", min_size=1, max_size=4), max_size=3)


def codec(strip_space: bool = False) -> ByteCodec:
    return ByteCodec(TABLE.__getitem__, len(TABLE), frozenset({EOS}), strip_space)


def detokenizer(
    stop: Sequence[str] = (),
    prompt: Sequence[int] = (),
    *,
    skip: bool = True,
    include: bool = False,
    strip_space: bool = False,
) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(codec(strip_space).stream(prompt, skip), stop, include)


def run(target: IncrementalDetokenizer, tokens: Sequence[int], splits: Sequence[int]) -> tuple[str, TextDelta]:
    """Push tokens in parts that end at `splits`; returns the text and the last `TextDelta`."""
    boundaries = [0, *sorted(split % (len(tokens) + 1) for split in splits), len(tokens)]
    text, last = "", TextDelta("", None, 0)
    for start, end in pairwise(boundaries):
        last = target.push(tokens[start:end], final=False)
        text += last.text
        if last.stop_string is not None:
            return text, last
    last = target.push([], final=True)
    return text + last.text, last


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    stops_in_text = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return (min(stops_in_text)[0], min(stops_in_text)[2]) if stops_in_text else None


@settings(max_examples=300, deadline=None)
@given(tokens=token_lists, splits=st.lists(st.integers(0, 99), max_size=5), skip=st.booleans(), strip=st.booleans())
def test_deltas_concatenate_to_the_decoded_text(tokens: list[int], splits: list[int], skip: bool, strip: bool) -> None:
    text, last = run(detokenizer(skip=skip, strip_space=strip), tokens, splits)
    assert text == codec(strip).decode(tokens, skip)
    assert last == TextDelta(last.text, None, len(tokens))


@settings(max_examples=400, deadline=None)
@given(tokens=token_lists, stops=stop_lists, splits=st.lists(st.integers(0, 99), max_size=5), include=st.booleans())
def test_text_ends_at_the_first_stop_string_for_any_split_of_the_tokens(
    tokens: list[int], stops: list[str], splits: list[int], include: bool
) -> None:
    complete = codec().decode(tokens, skip_special_tokens=True)
    text, last = run(detokenizer(stops, include=include), tokens, splits)
    match first_stop(complete, stops):
        case None:
            assert (text, last.stop_string, last.tokens_used) == (complete, None, len(tokens))
        case start, stop:
            assert text == complete[: start + len(stop) * include]
            assert last.stop_string == stop
    one_by_one, final = run(detokenizer(stops, include=include), tokens, range(len(tokens)))
    assert (one_by_one, final.stop_string, final.tokens_used) == (text, last.stop_string, last.tokens_used)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=20), stops=stop_lists, include=st.booleans())
def test_tokens_used_are_those_whose_text_starts_before_the_stop_string(
    tokens: list[int], stops: list[str], include: bool
) -> None:
    text, last = run(detokenizer(stops, include=include), tokens, ())
    starts = [sum(len(TABLE[token].decode()) for token in tokens[:index]) for index in range(len(tokens))]
    expected = len(tokens) if last.stop_string is None else sum(start < len(text) for start in starts)
    assert last.tokens_used == expected


@settings(max_examples=200, deadline=None)
@given(tokens=token_lists, stops=stop_lists)
def test_the_number_of_tokens_used_only_grows(tokens: list[int], stops: list[str]) -> None:
    target, used = detokenizer(stops), 0
    for count, token in enumerate(tokens, start=1):
        delta = target.push([token], final=False)
        assert used <= delta.tokens_used <= count
        used = delta.tokens_used
        if delta.stop_string is not None:
            break


def test_incomplete_character_is_held_back() -> None:
    target = detokenizer()
    assert target.push([ids_of[b"a"], ids_of[b"\xf0\x9f"]], final=False) == TextDelta("a", None, 1)
    assert target.push([ids_of[b"\x98"]], final=False) == TextDelta("", None, 1)
    assert target.push([ids_of[b"\x80"]], final=False) == TextDelta("😀", None, 4)


def test_incomplete_character_at_the_end_is_replaced_as_by_decode() -> None:
    tokens = [ids_of[b"a"], ids_of[b"\xf0\x9f"], ids_of[b"\x98"]]
    target = detokenizer()
    assert target.push(tokens, final=True) == TextDelta("a\ufffd", None, 3)
    assert codec().decode(tokens, skip_special_tokens=True) == "a\ufffd"


def test_text_is_held_back_only_while_it_could_be_part_of_a_stop_string() -> None:
    target = detokenizer(["ab\n"])
    assert target.push([ids_of[b" "], ids_of[b"a"]], final=False) == TextDelta(" ", None, 1)
    assert target.push([ids_of[b"b"]], final=False) == TextDelta("", None, 1)
    assert target.push([ids_of[b"b"]], final=False) == TextDelta("abb", None, 4)


def test_stop_string_across_token_boundaries_truncates_text_and_tokens() -> None:
    target = detokenizer(["b\na"])
    delta = target.push([ids_of[b"aab"], ids_of[b"\n"], ids_of[b"aab"], ids_of[b"b"]], final=False)
    assert delta == TextDelta("aa", "b\na", 1)
    assert target.push([ids_of[b"a"]], final=True) == TextDelta("", "b\na", 1)


def test_stop_string_may_be_included() -> None:
    target = detokenizer(["b\na"], include=True)
    delta = target.push([ids_of[b"aab"], ids_of[b"\n"], ids_of[b"aab"], ids_of[b"b"]], final=False)
    assert delta == TextDelta("aab\na", "b\na", 3)


def test_the_earliest_then_the_shortest_stop_string_wins() -> None:
    tokens = [ids_of[b" "], ids_of[b"a"], ids_of[b"b"], ids_of[b"\n"], ids_of[b" "]]
    assert run(detokenizer(["b", "ab\n"]), tokens, ())[1].stop_string == "ab\n"
    assert run(detokenizer(["ab\n", "ab"]), tokens, ())[1].stop_string == "ab"


def test_an_incomplete_stop_string_does_not_match_at_the_end() -> None:
    target = detokenizer(["ab\n", "b"])
    assert target.push([ids_of[b"ab"]], final=False) == TextDelta("", None, 0)  # "ab\n" would start before "b"
    assert target.push([], final=True) == TextDelta("a", "b", 1)


def test_special_tokens_are_hidden_or_shown_and_count_with_their_predecessor() -> None:
    tokens = [ids_of[b"a"], EOS]
    assert detokenizer().push(tokens, final=False) == TextDelta("a", None, 2)
    assert detokenizer(skip=False).push(tokens, final=False) == TextDelta("a<eos>", None, 2)
    assert detokenizer(["a"]).push([ids_of[b"b"], EOS, ids_of[b"a"], EOS], final=False) == TextDelta("b", "a", 2)


def test_tokens_outside_the_vocabulary_and_without_text_add_nothing() -> None:
    assert detokenizer().push([OUTSIDE, EMPTY, -1, ids_of[b"a"]], final=True) == TextDelta("a", None, 4)


def test_leading_space_is_stripped_only_at_the_start_of_the_whole_text() -> None:
    word = [ids_of[b" a"], ids_of[b" a"]]
    assert detokenizer(strip_space=True).push(word, final=True).text == "a a"
    assert detokenizer(strip_space=True, prompt=[EOS]).push(word, final=True).text == "a a"  # skipped: no text yet
    assert detokenizer(strip_space=True, prompt=[ids_of[b"b"]]).push(word, final=True).text == " a a"


def test_output_completes_a_character_that_the_prompt_began() -> None:
    prompt = [ids_of[b"a"], ids_of[b"\xf0\x9f"]]
    assert detokenizer(prompt=prompt).push([ids_of[b"\x98\x80a"]], final=True).text == "😀a"
    assert detokenizer(prompt=prompt).push([ids_of[b"b"]], final=True).text == "b"
    assert detokenizer(prompt=prompt).push([], final=True).text == ""
    assert detokenizer(prompt=[ids_of["中".encode()]]).push([ids_of[b"b"]], final=True).text == "b"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty stop string") as caught:
        detokenizer([""])
    assert caught.value.param == "stop"


def test_cost_per_token_does_not_grow_with_the_output_or_with_repetitive_stop_strings() -> None:
    stops = ["a" * length + "b" for length in (1000, 2000, 3000, 4000)]
    target, tokens = detokenizer(stops), [ids_of[b"a"]] * 10_000
    start = time.perf_counter()
    released = sum(len(target.push([token], final=False).text) for token in tokens)
    assert released == len(tokens) - 4000
    assert time.perf_counter() - start < 60  # quadratic matching takes minutes


def word_piece() -> Tokenizer:
    words = {"[UNK]": 0, "hello": 1, "##s": 2, "world": 3, "!": 4, "a": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@settings(max_examples=100, deadline=None)
@given(rest=st.lists(st.integers(0, 6), max_size=30), splits=st.lists(st.integers(0, 99), max_size=4))
def test_tokenizers_without_bytes_are_decoded_with_a_window(rest: list[int], splits: list[int]) -> None:
    tokens = [1, *rest]  # a text starts with a word, not with the continuation of one
    tokenizer = word_piece()
    window = WindowCodec(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), 6, frozenset())
    text, last = run(IncrementalDetokenizer(window.stream([], True), [], False), tokens, splits)
    assert text == window.decode(tokens, True)
    assert last.tokens_used == len(tokens)
