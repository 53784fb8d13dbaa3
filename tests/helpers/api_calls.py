"""A call of an HTTP API, and what must be true of its response: one expectation per place in it.

A place is "status", "header:NAME", or a path in the JSON body, such as "choices.0.index": "#" is a length, "*" all
members of an array, and "$.status" a member of that name. A stream is the body {"names", "events", "done"}: the names
and payloads of its events, and whether `[DONE]` ended it. An expectation is a value, a type, or a predicate. Must not
know any endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import httpx

Expected = Any  # a value, a type, or a predicate
ALWAYS: dict[str, Expected] = {"status": 200, "header:x-request-id": str}


class Call(NamedTuple):
    """`request`: "PATH" (POST) or "METHOD PATH". `body`: JSON, or text to send as it is. `form`: fields and a file.

    `save`: names of places in the response, whose values stand for "{name}" in later calls.
    """

    request: str
    body: Any = None
    must: Mapping[str, Expected] = {}
    headers: Mapping[str, str] = {}
    form: Mapping[str, Any] | None = None
    save: Mapping[str, str] = {}


class Caller:
    """Makes calls in order, and remembers what they save."""

    def __init__(self, http: httpx.Client, **saved: str) -> None:
        self._http, self._saved = http, saved

    def faults(self, call: Call) -> list[str]:
        """What is not as it must be."""
        response = self._send(call)
        body = _body(response)
        for name, place in call.save.items():
            self._saved[name] = str(_at(body, place))
        expected = {**ALWAYS, **call.must}
        places = [(place, _place(response, body, place), self._filled(wanted)) for place, wanted in expected.items()]
        about = "" if response.status_code == expected["status"] else f" ({response.text[:300]})"
        return [
            f"{place} is {value!r:.200}, expected {getattr(wanted, '__name__', repr(wanted))}{about}"
            for place, value, wanted in places
            if not _fits(value, wanted)
        ]

    def _send(self, call: Call) -> httpx.Response:
        method, _, path = call.request.rpartition(" ")
        content = None
        if call.body is not None:
            content = self._filled(call.body if isinstance(call.body, str) else json.dumps(call.body))
        form: dict[str, Any] = {}
        if call.form is not None:
            fields = {name: value for name, value in call.form.items() if name != "file"}
            form = {"data": fields, "files": {"file": ("lines.jsonl", self._filled(call.form["file"]))}}
        headers = {"content-type": "application/json"} if content is not None else {}
        return self._http.request(
            method or "POST", self._filled(path), content=content, headers={**headers, **call.headers}, **form
        )

    def _filled(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for name, saved in self._saved.items():
            value = value.replace("{" + name + "}", saved)
        return value


def _body(response: httpx.Response) -> Any:
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return _stream(response.text)
    try:
        return response.json()
    except ValueError:
        return response.text


def _stream(text: str) -> dict[str, Any]:
    names, events, is_done = [], [], False
    for event in filter(None, text.split("\n\n")):
        lines = dict(line.split(": ", 1) for line in event.splitlines())
        names.append(lines.get("event"))
        is_done = lines["data"] == "[DONE]"
        if not is_done:
            events.append(json.loads(lines["data"]))
    return {"names": [name for name in names if name], "events": events, "done": is_done}


def _place(response: httpx.Response, body: Any, place: str) -> Any:
    if place == "status":
        return response.status_code
    if place.startswith("header:"):
        return response.headers.get(place.removeprefix("header:"))
    return _at(body, place.removeprefix("$."))


MISSING = "<missing>"


def _at(value: Any, place: str) -> Any:
    """What stands there; `MISSING` if nothing does."""
    if place == "":
        return value
    name, _, rest = place.partition(".")
    if name == "#":
        return len(value)
    if name == "*":
        return [_at(element, rest) for element in value]
    if isinstance(value, dict):
        return _at(value[name], rest) if name in value else MISSING
    if isinstance(value, list) and name.lstrip("-").isdigit() and -len(value) <= int(name) < len(value):
        return _at(value[int(name)], rest)
    return MISSING


def _fits(value: Any, wanted: Expected) -> bool:
    if isinstance(wanted, type):
        return isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool) and value != MISSING
    if callable(wanted):
        try:
            return bool(wanted(value))
        except (TypeError, ValueError, KeyError, IndexError, AttributeError):
            return False
    return type(value) is type(wanted) and bool(value == wanted)


def assertions(calls: list[Call]) -> int:
    """How many there are: the status, the request id, and each place."""
    return sum(len({*ALWAYS, *call.must}) for call in calls)


def has(*names: str) -> Callable[[Any], bool]:
    """An object with exactly these members."""
    return named(f"an object of {', '.join(names)}", lambda value: set(value) == set(names))


def contains(part: str) -> Callable[[Any], bool]:
    return named(f"something with {part!r}", lambda text: part in text)


def starts(part: str) -> Callable[[Any], bool]:
    return named(f"{part}...", lambda text: text.startswith(part))


def all_are(wanted: Expected) -> Callable[[Any], bool]:
    return named(f"only {wanted}", lambda values: len(values) > 0 and all(_fits(value, wanted) for value in values))


def named(name: str, predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def wanted(value: Any) -> bool:
        return bool(predicate(value))

    wanted.__name__ = name
    return wanted


def variants(request: str, base: Mapping[str, Any], rows: Mapping[str, Mapping[str, Expected]]) -> Iterator[Call]:
    """Calls whose bodies are `base` with other fields, as JSON: `{"n": 2}` -> what must be true."""
    for fields, must in rows.items():
        yield Call(request, {**base, **json.loads(fields)}, must)
