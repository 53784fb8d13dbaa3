"""The longest gap of a stream beside grammars that are made to stall it, one grammar at a time.

    python tests/bench/hostile_grammars.py [--backend llguidance] [--only NAME ...] [-- arguments for srv]

A stream of greedy tokens runs; once it is under way, a request with one of 60 hostile grammars comes, and then two
more that are the same, so that a cached grammar is tried too. Printed are, in seconds, the longest gap between two
tokens of the stream for each grammar, the longest gap of streams without a grammar (before, in the middle and after),
and the ratio of the two. No grammar may cause a gap over 0.3 s on a machine without other work.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

# The servers of the end-to-end tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from e2e_support import Server, events, greedy, launched

LIMIT_S = 0.3
TOKENS = 400  # of each stream: some seconds
START = 10  # tokens after which the grammar comes
AFTER_S = 20.0  # a compile that takes longer is followed by no further request
PROMPT = "Answer: "
LARGE = 10**30

Body = Mapping[str, Any]


def _regexes() -> Iterator[tuple[str, str]]:
    yield "long repeat", "a{49000}"
    yield "longer repeat", "a{70000}"
    yield "repeat beyond limits", "a{2000000000,2147483647}"
    yield "nested repeats", "((a{1,1000}){1,1000}){1,1000}b"
    yield "exponential automaton", "(.*a.{200}){9}"
    yield "exponential automaton, short", ".*a.{18}"
    yield "two pluses", "(x+x+)+y"
    yield "optional chain", "(a?){3000}a{3000}"
    yield "alternation of repeats", "|".join(f"(a{{{n}}}b)*" for n in range(1, 200))
    yield "alternation without end", "^(a|b|c|ab|bc|abc){1,5000}$"
    yield "classes of all letters", r"(\p{L}|\p{N}|[^\x00-\x7f]){1,2000}"
    yield "case of all letters", r"(?i)(\p{L}{1,50} ?){1,200}"
    yield "words of several lengths", "(" + "|".join("ab" * n for n in range(1, 300)) + "){1,50}"
    yield "prefixes", "(" + "|".join("a" * n for n in range(1, 600)) + ")*b"
    yield "dots", ".{0,20000}z"
    yield "dots in groups", "((.{1,100}),){1,100}"
    yield "not a letter, often", "([^a]{1,64}a){1,400}"
    yield "dates in a row", r"(\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?Z,){1,500}"
    yield "forced text", "The quick brown fox jumps over the lazy dog. " * 400
    yield "forced text of bytes", "é" * 8000


def _schemas() -> Iterator[tuple[str, Any]]:
    text = {"type": "string"}
    numbered = {f"p{n}": {"type": "string", "maxLength": n + 1} for n in range(2000)}
    yield "many lengths", {"type": "object", "properties": numbered}
    yield "large enum", {"enum": [f"value number {n}" for n in range(10_000)]}
    yield "long constant", {"const": "x" * 200_000}
    yield "pattern", {"type": "string", "pattern": "^(a|b|c|ab|bc|abc){1,5000}$"}
    yield "several patterns", {"allOf": [{"type": "string", "pattern": f"a.{{{n}}}b"} for n in range(8)]}
    deep: Any = text
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    yield "deep objects", deep
    deep = text
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    yield "deep arrays", deep
    yield (
        "many required",
        {
            "type": "object",
            "properties": {f"k{n}": {"type": "integer"} for n in range(1500)},
            "required": [f"k{n}" for n in range(1500)],
        },
    )
    yield "large bounds", {"type": "integer", "minimum": LARGE, "maximum": LARGE * 10}
    yield "bounds of many digits", {"type": "integer", "minimum": 10**3000 + 1, "maximum": 10**3000 * 7}
    yield "multiple of a prime", {"type": "integer", "multipleOf": 7919}
    yield "multiples of several", {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 89, 83)]}
    yield "fraction", {"type": "number", "multipleOf": 1e-9, "minimum": 0, "maximum": 1}
    yield "many items", {"type": "array", "items": text, "minItems": 5000, "maxItems": 100_000}
    yield "all items known", {"type": "array", "prefixItems": [text] * 3000, "items": False, "minItems": 3000}
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"const": n}]} for n in range(1000)}
    yield "chain of references", {"$ref": "#/$defs/d0", "$defs": {**chain, "d1000": text}}
    tree = {
        "node": {
            "type": "object",
            "properties": {side: {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]} for side in "abcdefgh"},
            "required": list("abcdefgh"),
        }
    }
    yield "tree without end", {"$ref": "#/$defs/node", "$defs": tree}
    doubling = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(24)}
    yield "doubling references", {"$ref": "#/$defs/d0", "$defs": {**doubling, "d24": text}}
    variants = [
        {"type": "object", "properties": {"kind": {"const": f"k{n}"}, "v": text}, "required": ["kind"]}
        for n in range(1000)
    ]
    yield "many variants", {"oneOf": variants}
    yield "products of unions", {"allOf": [{"anyOf": [{"maxLength": n}, {"minLength": n}]} for n in range(1, 18)]}
    yield (
        "pattern properties",
        {
            "type": "object",
            "patternProperties": {f"^{chr(97 + n)}.{{{n}}}$": {"type": "integer"} for n in range(26)},
        },
    )
    yield "unique items", {"type": "array", "items": {"enum": list(range(200))}, "uniqueItems": True, "minItems": 150}
    yield "contains", {"type": "array", "contains": {"const": 5}, "minContains": 300, "items": {"type": "integer"}}
    yield "negation", {"not": {"not": {"not": {"type": "string", "pattern": ".*a.{30}"}}}}
    yield (
        "dependencies",
        {
            "type": "object",
            "properties": {f"k{n}": text for n in range(60)},
            "dependentRequired": {f"k{n}": [f"k{(n * 7 + 1) % 60}"] for n in range(60)},
        },
    )


def _grammars() -> Iterator[tuple[str, str]]:
    rules = [f'r{n}: "a" | r{(n * 7 + 1) % 500}' for n in range(500)]
    yield "optional rules", "\n".join(["start: " + " ".join(f"r{n}?" for n in range(500)), *rules])
    yield "chain of rules", "\n".join(["start: r0", *(f'r{n}: r{n + 1} | "x"' for n in range(1500)), 'r1500: "y"'])
    yield "left recursion", 'start: start "a" | "a"'
    yield "ambiguous", 'start: start start | "a" | start start start'
    yield "ambiguous with empty", 'start: s "b"\ns: s s s | "a" | ""'
    yield "empty rules", "start: " + " ".join(["e"] * 3000) + '\ne: ""'
    yield "mirror", 'start: "a" start "a" | "b" start "b" | ""'
    yield "terminal", "start: T\nT: /(.*a.{200}){9}/"
    yield (
        "many terminals",
        "start: ("
        + " | ".join(f"T{n}" for n in range(800))
        + ")*\n"
        + "\n".join(f"T{n}: /a{{{n}}}b/" for n in range(800)),
    )
    yield "overlapping terminals", "start: (A | B | C | D)+\nA: /[a-z]+/\nB: /[a-z0-9]+/\nC: /[a-z ]+/\nD: /.+/"
    yield "keywords", "start: (" + " | ".join(f'"key{n}"' for n in range(4000)) + ")+"
    yield "doubling", "start: d0\n" + "\n".join(f"d{n}: d{n + 1} d{n + 1}" for n in range(24)) + '\nd24: "a"'


def _others() -> Iterator[tuple[str, Body]]:
    yield "choices", {"guided_choice": [f"value number {n}" for n in range(10_000)]}
    yield "long choices", {"guided_choice": ["x" * n for n in range(1, 2000)]}
    tags = [{"begin": f"<f{n}>", "schema": {"type": "object"}, "end": f"</f{n}>"} for n in range(300)]
    wanted = {"type": "structural_tag", "structures": tags, "triggers": ["<f"]}
    yield "structural tags", {"response_format": wanted}


def hostile() -> dict[str, Body]:
    """The field of a request for each grammar, by the grammar's name."""
    bodies: list[tuple[str, Body]] = [(name, {"guided_regex": text}) for name, text in _regexes()]
    bodies += [(name, {"guided_json": schema}) for name, schema in _schemas()]
    bodies += [(name, {"guided_grammar": text}) for name, text in _grammars()]
    bodies += _others()
    return dict(bodies)


class Neighbour:
    """A stream, and when its tokens arrived."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._arrivals: list[float] = []
        self.started = asyncio.Event()

    async def run(self) -> None:
        body = {**greedy("Once upon a time", TOKENS), "stream": True}
        async with self._http.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for _ in events(response):
                self._arrivals.append(time.perf_counter())
                if len(self._arrivals) == START:
                    self.started.set()

    @property
    def longest_s(self) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise(self._arrivals))


async def beside(server: Server, grammar: Body | None) -> tuple[float, str]:
    """The longest gap of one stream in seconds, and what the requests with the grammar were answered."""
    answers: list[str] = []
    async with server.asynchronous() as http:
        neighbour = Neighbour(http)
        stream = asyncio.create_task(neighbour.run())
        await neighbour.started.wait()
        while grammar is not None and len(answers) < 3:
            began = time.perf_counter()
            sent = {"prompt": PROMPT, "max_tokens": 60, "temperature": 1.0, "seed": len(answers), **grammar}
            response = await http.post("/v1/completions", json=sent)
            answers.append(str(response.status_code))
            if time.perf_counter() - began > AFTER_S or stream.done():
                break
        await stream
    return neighbour.longest_s, " ".join(answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--only", nargs="*", help="names of grammars")
    parser.add_argument("arguments", nargs="*", help="for srv launch")
    options = parser.parse_args()
    tried = {name: body for name, body in hostile().items() if not options.only or name in options.only}
    quiet: list[float] = []
    gaps: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = ("--grammar-backend", options.backend, *options.arguments)
        with launched(Path(folder) / "log", *start) as server:
            for number, (name, body) in enumerate(tried.items()):
                if number in (0, len(tried) // 2):
                    quiet.append(asyncio.run(beside(server, None))[0])
                gaps[name] = asyncio.run(beside(server, body))
            quiet.append(asyncio.run(beside(server, None))[0])
            server.stop()
    table = Table("grammar", "answers", "longest gap s", f"over {max(quiet):.3f} s without")
    for name, (gap, answers) in sorted(gaps.items(), key=lambda item: -item[1][0]):
        table.add_row(name, answers, f"{gap:.3f}", f"{gap / max(quiet):.1f}")
    Console(width=100).print(table)
    longest = max(gap for gap, _ in gaps.values())
    statuses = Counter(status for _, answers in gaps.values() for status in answers.split())
    print(f"{options.backend}: {len(gaps)} grammars, answers {dict(statuses)}, longest gap {longest:.3f} s")
    return int(longest > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
