"""The parts of one reply, in the order in which the model wrote them. Every protocol formats these.

    Reasoning* Text* (CallStart CallArguments* CallEnd)* ...

Events of different calls never interleave: call 0 ends before call 1 begins, and no text comes in between a start and
its end. Nothing is empty except the text of a reply without any.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index`: its position among the calls of the reply, from 0. `id`: unique in the conversation,
    in the form that the model's format needs."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call `index`; all fragments together are a JSON object if the model wrote one.

    A reply that was cut, or a model that wrote invalid JSON, leaves invalid JSON here too: what a model wrote is not
    repaired.
    """

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is over. Each CallStart has a CallEnd, also in a reply that was cut; `cut`: within its arguments."""

    index: int
    cut: bool = False


ReplyEvent = Text | Reasoning | CallStart | CallArguments | CallEnd


@dataclass(slots=True)
class ParsedCall:
    """One complete call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedReply:
    """The events of a reply, collected: what a response that is not streamed contains."""

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[ReplyEvent]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, name_of, name):
                    self.calls.append(ParsedCall(name_of, name))
                case CallArguments(index, fragment):
                    self.calls[index].arguments += fragment
