"""A corpus of JSON schemas: random documents that the masks of a backend allow are valid, by a validator of its own.

What a backend refuses is counted and printed (`pytest -s`). Of what it accepts, no document may be invalid.
"""

from __future__ import annotations

import datetime
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
from schema_corpus import generated, written

from srv.errors import GrammarError
from srv.grammar.backend import GrammarContext, JsonSpacing
from srv.grammar.registry import make
from srv.grammar.source import GrammarSource, from_json_schema, from_structural_tag
from srv.types import Vocabulary

# ASCII, characters of several bytes, and tokens of several characters. Bytes that are no UTF-8 concern detokenizers.
TOKENS = [chr(code) for code in range(128)] + ["é", "中", "😀", '":', '", "', "true", "12", "}]", "\\n", "  ", '"a"']
BYTES = [token.encode() for token in TOKENS]
END = len(TOKENS)
CONTEXT = GrammarContext(Vocabulary(b"".join(BYTES), list(map(len, BYTES)), []), END + 1, (END,))
CLOSING = frozenset({END, *b'"}]', *(TOKENS.index(token) for token in ('":', "}]", "true"))})
LONG, MOST = 60, 1500  # bytes of a document after which it is brought to its end, and at most
WALKS = 6
SCHEMAS, SEED = 1500, 0
LONG_EXPONENT = re.compile(r"([eE][+-]?\d{3})\d+")
FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date-time", ValueError)
def is_time(value: object) -> bool:
    """RFC 3339 has leap seconds, which Python's times have not."""
    return not isinstance(value, str) or bool(datetime.datetime.fromisoformat(value.upper().replace(":60", ":59")))


def load(text: str) -> Any:
    """JSON whose numbers are compared as they are written, with an exponent of at most 3 digits."""
    return json.loads(text, parse_float=_exact)


def _exact(text: str) -> Fraction | int:
    number = Fraction(LONG_EXPONENT.sub(r"\1", text))
    return int(number) if number.denominator == 1 else number  # 2.0 is an integer


def alone(schema: dict[str, Any]) -> GrammarSource:
    return from_json_schema(schema, param="test")


BEGIN, CLOSE = b"<a>", b"</a>"


def in_tag(schema: dict[str, Any]) -> GrammarSource:
    """The arguments of a call."""
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": BEGIN.decode(), "content": content, "end": CLOSE.decode()}
    return from_structural_tag({"type": "structural_tag", "format": tag}, param="test")


class Suite:
    """One backend. `place`: of the schemas. `counts`: of schemas and documents, and of reasons for refusals."""

    def __init__(self, name: str, place: Callable[[dict[str, Any]], GrammarSource] = alone) -> None:
        self.backend, self.place = make(name, CONTEXT), place
        self.counts: Counter[str] = Counter()
        self.invalid: list[tuple[dict[str, Any], str, str]] = []

    def try_schema(self, schema: dict[str, Any], choice: random.Random) -> None:
        spacing = choice.choice([JsonSpacing(), JsonSpacing(none=True)])
        try:
            new = self.backend.compile(self.backend.translate(self.place(schema), spacing))
        except GrammarError as error:
            self.counts["refused"] += 1
            self.counts[f"refused: {str(error)[:110]}"] += 1
            return
        self.counts["accepted"] += 1
        validator = jsonschema.Draft202012Validator(load(json.dumps(schema)), format_checker=FORMATS)
        for _ in range(WALKS):
            text = self.document(new(), choice)
            if text is None:
                self.counts["unfinished"] += 1
                continue
            self.counts["documents"] += 1
            text = text.removeprefix(BEGIN).removesuffix(CLOSE)
            if fault := fault_of(validator, text) or fault_of_spaces(text, 0 if spacing.none else 2):
                self.invalid.append((schema, text.decode(), fault))

    def document(self, matcher: Any, choice: random.Random) -> bytes | None:
        """A random output; None if it does not come to its end."""
        output, masks = bytearray(), np.empty((1, self.backend.words), dtype=np.int32)
        while len(output) < MOST:
            self.backend.fill([matcher], masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8)[0], bitorder="little")[: END + 1]).tolist()
            closing = [end for end in allowed if end in CLOSING]
            if not allowed:  # the engine ends such an output with an error
                return None
            token = choice.choice(closing if closing and (len(output) > LONG or choice.random() < 0.2) else allowed)
            if token == END:
                return None if matcher.failure else bytes(output)
            output += BYTES[token]
            if not matcher.accept([token]):
                return None
        return None

    def report(self) -> None:
        for name, count in self.counts.most_common(25):
            print(f"{count:6} {name}")
        for schema, text, fault in self.invalid[:20]:
            print(f"{json.dumps(schema)[:600]}\n    {text[:200]!r}: {fault[:200]}")


def fault_of(validator: Any, text: bytes) -> str:
    try:
        validator.validate(load(text.decode()))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    except RecursionError:  # a schema that refers to itself at the same place
        return ""
    return ""


def fault_of_spaces(text: bytes, most: int) -> str:
    """White space between the tokens of a document, where there is more of it in a row than allowed."""
    longest = max(map(len, re.findall(rb"\s+", re.sub(rb'"(\\.|[^"\\])*"', b"0", text))), default=0)
    return f"{longest} characters of white space in a row" if longest > most else ""


@pytest.mark.proof(minutes=0.3)
@pytest.mark.parametrize("place", [alone, in_tag])
@pytest.mark.parametrize(("name", "accepted"), [("llguidance", 0.55), ("xgrammar", 0.2)])
def test_documents_that_a_backend_allows_are_valid(
    name: str, accepted: float, place: Callable[[dict[str, Any]], GrammarSource]
) -> None:
    suite, choice = Suite(name, place), random.Random(0)
    for schema in written():
        suite.try_schema(schema, choice)
    accepted_count = suite.counts["accepted"]
    for schema in itertools.islice(generated(SEED), SCHEMAS):
        suite.try_schema(schema, choice)
    print(f"\n{name}: {accepted_count} of {len(written())} written schemas accepted")
    suite.report()
    assert not suite.invalid
    assert suite.counts["accepted"] >= accepted * (SCHEMAS + len(written()))
    assert suite.counts["documents"] >= 0.8 * WALKS * suite.counts["accepted"]


@pytest.mark.parametrize(
    ("name", "place", "refused"), [("llguidance", alone, 0), ("llguidance", in_tag, 0), ("xgrammar", in_tag, 8)]
)
def test_documents_for_schemas_that_clients_write_are_valid(
    name: str, place: Callable[[dict[str, Any]], GrammarSource], refused: int
) -> None:
    suite, choice = Suite(name, place), random.Random(1)
    for schema in written():
        suite.try_schema(schema, choice)
    suite.report()
    assert not suite.invalid
    assert suite.counts["refused"] == refused
